"""Meaning of each config.json attribute, and that written files read back."""

import math
from dataclasses import replace

import pytest

from jaxformer import config as c
from jaxformer import costs, zoo
from jaxformer.interop.config_comparison import canonical, config_differences
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config
from jaxformer.interop.save import choose_family
from tests.interop.numpy_folders import LLAMA3, SIZES, YARN, config_from_fields


def rope(kind="llama", **fields):
    return config_from_fields(kind, **fields).attention.positions[0]


def test_defaults_of_fields_that_files_leave_out():
    """As in transformers 5.23; each family has its own."""
    assert rope("llama").base == rope("mistral").base == 1e4
    assert rope("mixtral").base == 1e6
    assert rope("cohere").base == 5e5
    assert rope("nemotron", head_dim=4).fraction == 0.5
    assert config_from_fields("llama", num_key_value_heads=None).attention.num_kv_heads == 6
    many = {**SIZES, "num_attention_heads": 16, "head_dim": 4}
    del many["num_key_value_heads"]
    for kind, fields, heads in (
        ("mistral", {}, 8),
        ("mistral", {"num_key_value_heads": None}, 16),
        ("llama", {}, 16),
    ):
        config = build_config(FAMILIES[kind], {**many, **fields}, where="")
        assert config.attention.num_kv_heads == heads
    assert config_from_fields("mistral").attention.windows == (4096,)
    assert build_config(
        FAMILIES["mistral"], {**SIZES, "sliding_window": None}, where=""
    ).attention.windows == (None,)
    assert config_from_fields("mixtral").attention.windows == (None,)
    assert (
        config_from_fields("llama").head.tied,
        config_from_fields("gemma2").head.tied,
        config_from_fields("cohere").head.tied,
    ) == (*(False, True, True),)
    assert config_from_fields("cohere").head.multiplier == 0.0625
    gemma2 = config_from_fields("gemma2").attention
    assert (gemma2.head_dim, gemma2.logit_softcap, gemma2.scale) == (256, 50.0, 1 / 16)
    assert config_from_fields("gemma2").head.softcap == 30.0
    assert config_from_fields("gemma3_text").head.softcap is None


def test_patterns_over_the_layers():
    assert config_from_fields("gemma2", sliding_window=5).attention.windows == (5, None)
    gemma3 = config_from_fields("gemma3_text", sliding_window=5, num_hidden_layers=62).attention
    assert gemma3.windows == (5, 5, 5, 5, 5, None)
    assert [p.base for p in gemma3.positions] == [1e4] * 5 + [1e6]
    cohere2 = config_from_fields("cohere2", sliding_window=5, num_hidden_layers=9).attention
    assert cohere2.windows == (5, 5, 5, None)
    assert cohere2.positions == (*(c.Rope(pairing="neighbours"),) * 3, None)
    qwen2 = {"sliding_window": 5, "max_window_layers": 1}
    assert config_from_fields("qwen2", **qwen2).attention.windows == (None,)
    assert config_from_fields("qwen2", use_sliding_window=True, **qwen2).attention.windows == (
        None,
        5,
        5,
        5,
    )
    assert config_from_fields("qwen3", **qwen2).attention.windows == (None,)
    assert config_from_fields("qwen3", use_sliding_window=True, **qwen2).attention.windows == (
        None,
        5,
        5,
        5,
    )
    kinds = ["sliding_attention", "full_attention"] * 2
    qwen3 = {"sliding_window": 5, "layer_types": kinds}
    assert config_from_fields("qwen3", use_sliding_window=True, **qwen3).attention.windows == (
        5,
        None,
    )
    with pytest.raises(
        ValueError, match=r"sliding_window = 5: layers with a window need this size"
    ):
        config_from_fields("qwen3", **qwen3)
    assert config_from_fields(
        "gemma3_text", sliding_window=5, layer_types=kinds
    ).attention.windows == (5, None)
    with pytest.raises(ValueError, match=r"layer_types = \['full_attention'\]: .* each of 4 layer"):
        config_from_fields("gemma2", layer_types=["full_attention"])
    small = config_from_fields(
        "phi3small",
        ff_intermediate_size=7,
        dense_attention_every_n_layers=2,
        intermediate_size=None,
        blocksparse_block_size=4,
        blocksparse_vert_stride=3,
    )
    assert small.attention.windows == (c.BlockSparse(block_size=4, local_blocks=16, stride=3), None)


def test_multipliers_of_granite():
    config = config_from_fields(
        "granite",
        embedding_multiplier=12,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=16,
    )
    assert (config.embedding.scale, config.attention.scale) == (12.0, 0.0078125)
    assert (config.residual_multiplier, config.head.multiplier) == (0.22, 1 / 16)
    plain = config_from_fields("granite")
    assert (plain.attention.scale, plain.residual_multiplier, plain.head.multiplier) == (1, 1, 1)
    with pytest.raises(ValueError, match=r"logits_scaling = 0: the logits are divided by it"):
        config_from_fields("granite", logits_scaling=0)
    with pytest.raises(ValueError, match=r"residual_multiplier = 'x': expected a value of type fl"):
        config_from_fields("granitemoe", residual_multiplier="x")
    shared = {"num_local_experts": 3, "shared_intermediate_size": 7}
    (moe,) = config_from_fields("granitemoeshared", **shared).feed_forward
    assert moe.shared.expert == c.GLU(hidden_dim=7) and moe.expert == c.GLU(hidden_dim=10)
    with pytest.raises(ValueError, match=r"shared_intermediate_size = 7: unknown attribute"):
        config_from_fields("granitemoe", **shared)


def test_what_hunyuan_says():
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    fields = {"head_dim": 6, "max_position_embeddings": 64, "rope_scaling": scaling}
    dense = config_from_fields("hunyuan_v1_dense", **fields)
    assert dense.attention.positions == (c.Rope(scaling=c.NTKScaling(factor=1000.0)),)
    assert dense.attention.qk_norm.placement == "after_rope"
    with pytest.raises(ValueError, match=r"qk_norm\.placement: before_rope instead of after_rope"):
        choose_family(config_from_fields("hunyuan_v1_dense", head_dim=6), {}, "qwen3")
    without = config_from_fields(
        "hunyuan_v1_dense", **fields | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    )
    assert without.attention.positions[0].scaling == c.DynamicNTK(
        factor=2.0, original_max_length=64
    )
    for config in (dense, without):
        family, values = choose_family(config, {}, "hunyuan_v1_dense")
        assert build_config(family, values, where="") == config
    with pytest.raises(ValueError, match=r"rope_scaling\.alpha = -2"):
        config_from_fields("hunyuan_v1_dense", **fields | {"rope_scaling": scaling | {"alpha": -2}})
    counts = {"num_experts": [5] * 4, "moe_topk": 3}
    (moe,) = config_from_fields("hunyuan_v1_moe", **counts).feed_forward
    assert (moe.num_experts, moe.top_k, moe.shared.expert) == (5, 3, moe.expert)
    with pytest.raises(ValueError, match=r"moe_topk = \[3, 2\]: expected one number, the same in"):
        config_from_fields("hunyuan_v1_moe", **counts | {"moe_topk": [3, 2]})


def test_what_ministral_3_says():
    scaling = {"rope_type": "yarn", **YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    config = config_from_fields("ministral3", head_dim=4, rope_parameters=scaling)
    assert config.attention.query_scaling == c.QueryScaling(beta=0.1, original_max_length=16)
    lengths = {"original_max_position_embeddings": 8}  # before the object's, as in RoPE
    other = config_from_fields("ministral3", head_dim=4, rope_parameters=scaling, **lengths)
    (rope,), queries = other.attention.positions, other.attention.query_scaling
    assert rope.scaling.original_max_length == queries.original_max_length == 8
    with pytest.raises(ValueError, match=r"query_scaling: None instead of QueryScaling\(beta=0\.1"):
        choose_family(config, {}, "mistral")
    with pytest.raises(ValueError, match=r"rope_parameters\.llama_4_scaling_beta = None: expected"):
        config_from_fields("ministral3", rope_parameters=scaling | {"llama_4_scaling_beta": None})
    with pytest.raises(ValueError, match=r"rope_parameters = None: expected an object with llama"):
        config_from_fields("ministral3")
    attention = replace(config.attention, positions=(c.Rope(),))
    plain = replace(config, attention=attention)
    family, values = choose_family(plain, {})
    assert family.model_type == "ministral3" and values["rope_scaling"] is None
    assert build_config(family, values, where="") == plain
    other = replace(config.attention, query_scaling=c.QueryScaling(original_max_length=32))
    with pytest.raises(ValueError, match=r"\[0\]\.scaling\.original_max_length: 32 instead of 16$"):
        choose_family(replace(config, attention=other), {}, "ministral3")


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "glm-4.7-flash"])
def test_scales_of_latent_attention_are_written_at_test_size_too(name):
    config = zoo.get(name).tiny()
    family, values = choose_family(config, {})
    assert not config_differences(
        canonical(config), canonical(build_config(family, values, where=""))
    )


def test_differences_of_layers_are_named_by_their_field():
    config = zoo.get("deepseek-v3").tiny()
    first, *later = config.feed_forward
    other = replace(config, feed_forward=(replace(first, hidden_dim=7), *later))
    assert config_differences(config, other) == ["feed_forward[0].hidden_dim: 7 instead of 88"]


@pytest.mark.slow
def test_a_released_file_of_lfm2():
    """LFM2-1.2B: the width by the multiplier, attention by the numbers of its layers."""
    fields = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "block_ff_dim": 12_288,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        **{"block_dim": 2048, "conv_dim": 2048, "conv_dim_out": 2048, "num_heads": 32},
        "vocab_size": 65_536,
        **{"block_use_swiglu": True, "block_use_xavier_init": True, "use_pos_enc": True},
    }
    config = build_config(FAMILIES["lfm2"], fields, where="")
    assert config.feed_forward == (c.GLU(hidden_dim=8192),)
    kinds = [type(layer.attention) for layer in config.layers]
    assert [i for i, kind in enumerate(kinds) if kind is c.MultiHead] == fields["full_attn_idxs"]
    assert costs.num_parameters(config) == 1_170_340_608  # as its page counts
    with pytest.raises(ValueError, match="expected full_attention or conv for each of 16 layers"):
        build_config(FAMILIES["lfm2"], fields | {"layer_types": ["conv"] * 15}, where="")
    with pytest.raises(ValueError, match="use_pos_enc = False: not supported"):
        build_config(FAMILIES["lfm2"], fields | {"use_pos_enc": False}, where="")


@pytest.mark.slow
def test_what_qwen_3_next_says():
    """80B-A3B by the defaults of transformers' class, as its name counts."""
    fields = {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48}
    fields |= {"num_attention_heads": 16, "intermediate_size": 5632}
    config = config_from_fields("qwen3_next", **fields)
    kinds = [type(layer.attention) for layer in config.layers]
    assert kinds == ([c.LinearAttention] * 3 + [c.MultiHead]) * 12
    assert config.attention[3].positions == (c.Rope(fraction=0.25),)
    assert costs.num_parameters(config) == 79_674_391_296
    assert costs.num_active_parameters(config) == 3_874_929_408
    assert FAMILIES["qwen3_next"].is_ignored("mtp.layers.0.input_layernorm.weight", config, {})
    with pytest.raises(ValueError, match="attention_bias = True: not supported"):
        config_from_fields("qwen3_next", attention_bias=True, **fields)
    with pytest.raises(ValueError, match="linear_attention and full_attention for 48 layers"):
        config_from_fields("qwen3_next", layer_types=["linear_attention"] * 48, **fields)


@pytest.mark.slow
def test_a_released_file_of_kimi_linear():
    """48B-A3B, whose lists count layers from 1; its head_dim and its RoPE have no effect."""
    full = [4, 8, 12, 16, 20, 24, 27]
    delta = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    delta |= {"full_attn_layers": full, "kda_layers": [i for i in range(1, 28) if i not in full]}
    fields = {
        **{"vocab_size": 163_840, "hidden_size": 2304, "num_hidden_layers": 27, "head_dim": 72},
        **{"intermediate_size": 9216, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"kv_lora_rank": 512, "q_lora_rank": None, "v_head_dim": 128, "mla_use_nope": True},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "linear_attn_config": delta},
        **{
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
        },
        **{"moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8},
        **{"num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "topk_group": 1},
        **{"num_expert_group": 1, "use_grouped_topk": True, "topk_method": "noaux_tc"},
        **{"routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0},
        **{"model_max_length": 1_048_576, "tie_word_embeddings": False},
    }
    config = config_from_fields("kimi_linear", **fields)
    kinds = [type(config.layers[i].attention) for i in range(27)]
    assert [i + 1 for i, kind in enumerate(kinds) if kind is c.Latent] == full
    assert [isinstance(x, c.MoE) for x in config.feed_forward] == [False] + [True] * 26
    assert costs.num_parameters(config) == 49_122_681_728
    assert choose_family(config, {})[1]["linear_attn_config"] == delta
    for name, value, problem in (
        ("mla_use_nope", False, "not supported"),
        ("num_experts_per_tok", 4, "this family calls it num_experts_per_token"),
        ("moe_router_activation_func", "softmax", "not supported"),
        ("linear_attn_config", delta | {"gate_lower_bound": -5.0}, "unknown attribute"),
        (
            "linear_attn_config",
            delta | {"full_attn_layers": full[1:]},
            "one of them for each of 27",
        ),
        ("linear_attn_config", delta | {"full_attn_layers": [3, *full]}, "one of them for each of"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{problem}"):
            config_from_fields("kimi_linear", **fields | {name: value})


@pytest.mark.slow
def test_a_released_file_of_minimax():
    """Text-01, whose sums have the weights of DeepNorm and whose heads turn by half."""
    types = (["linear_attention"] * 7 + ["full_attention"]) * 10
    factors = {f"{x}_beta_factor": 1.0 for x in ("full_attn", "linear_attn", "mlp")}
    factors |= {name.replace("beta", "alpha"): 160**0.25 for name in factors}
    fields = {
        **{"vocab_size": 200_064, "hidden_size": 6144, "num_hidden_layers": 80, "head_dim": 128},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 9216},
        **{"num_local_experts": 32, "num_experts_per_tok": 2, "layer_types": types},
        **{"rope_theta": 10_000_000, "rotary_dim": 64, "rms_norm_eps": 1e-5, "postnorm": True},
        **{"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "block_size": 256},
        **{"max_position_embeddings": 10_240_000, "tie_word_embeddings": False},
    }
    config = config_from_fields("minimax", **fields, **factors)
    assert set(vars(config.residual).values()) == {(160**0.25, 1.0)}
    first, *_, last = config.attention
    assert first.decay == c.SlopeDecay(scale=1.00001)
    assert last.positions == (c.Rope(base=1e7, fraction=0.5),)
    assert costs.num_parameters(config) == 456_089_655_296
    written = choose_family(config, {})[1]
    assert (written["rotary_dim"], written["layer_types"]) == (64, types)
    for name, value, problem in (
        ("mlp_beta_factor", "x", "expected a value of type"),
        ("postnorm", False, "not supported"),
        ("shared_intermediate_size", 8, "not supported"),
        ("layer_types", types[:79], "linear_attention and full_attention for 80 layers"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{problem}"):
            config_from_fields("minimax", **fields | factors | {name: value})


@pytest.mark.slow
def test_what_trinity_says():
    """A file of the released code, whose fields of groups and of training change nothing."""
    fields = {
        **{"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_hidden_layers": 32, "vocab_size": 200_192, "intermediate_size": 6144},
        **{"moe_intermediate_size": 1024, "num_experts": 128, "num_experts_per_tok": 8},
        **{"num_shared_experts": 1, "num_dense_layers": 2, "sliding_window": 2048},
        **{"score_func": "sigmoid", "route_norm": True, "route_scale": 2.826},
        **{"n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1},
        **{"load_balance_coeff": 0.001, "use_grouped_mm": True, "mup_enabled": True},
    }
    config = config_from_fields("afmoe", **fields)
    attention = config.attention
    assert attention.windows == (2048, 2048, 2048, None) and attention.head_dim == 128
    assert [x is None for x in attention.positions] == [False, False, False, True]
    assert (attention.output_gate, config.embedding.scale) == (c.OutputGate(), math.sqrt(2048))
    assert config.feed_forward[:2] == (c.GLU(hidden_dim=6144),) * 2
    assert f"{costs.num_parameters(config) / 1e9:.3f}" == "26.124"
    for changes in ({}, {"num_dense_layers": 32}, {"mup_enabled": False}):
        config = config_from_fields("afmoe", **fields | changes)
        family, values = choose_family(config, {}, "afmoe")
        assert build_config(family, values, where="") == config
    for changes, message in (
        ({"route_norm": False}, "route_norm = False: .* must be True"),
        ({"n_group": 2}, "n_group = 2: .* must be 1"),
        ({"sliding_window": 0}, r"windows\[0\] must be positive; got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types = .* for each of 32 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_fields("afmoe", **fields | changes)
    values = {"model_type": "afmoe", **fields, "sliding_window": None}
    with pytest.raises(ValueError, match="sliding_window = None: layers with a window need this"):
        build_config(FAMILIES["afmoe"], values, where="")


def test_what_mamba_2_says():
    fields = {"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None}
    fields |= {"num_heads": 4, "head_dim": 6, "n_groups": 2, "state_size": 5, "use_bias": True}
    fields |= {"time_step_limit": [0.0, math.inf], "time_step_min": 0.01, "residual_in_fp32": True}
    config = config_from_fields("mamba2", **fields)
    layer = config.attention
    assert (layer.num_heads, layer.value_dim, layer.num_key_heads, layer.key_dim) == (4, 6, 2, 5)
    assert set(layer.biases) == {"in", "convolution", "out"}
    assert layer.decay == c.StepDecay() and config.feed_forward == (c.NoFeedForward(),)
    limits = {"time_step_limit": [0.001, {"__float__": "Infinity"}]}
    limited = config_from_fields("mamba2", **fields | limits)
    assert limited.attention.decay == c.StepDecay(min_step=0.001)
    family, values = choose_family(limited, {})
    assert family.model_type == "mamba2" and values["time_step_limit"] == limits["time_step_limit"]
    refused = {
        r"head_dim = 5: 4 heads of 5 make 20 features, but expand \* hidden_size is 24": {
            "head_dim": 5
        },
        r"time_step_limit = \[0.1\]: expected the smallest and the largest step": {
            "time_step_limit": [0.1]
        },
        r"StepDecay needs 0 <= min_step < max_step; got min_step=0.2, max_step=0.1": {
            "time_step_limit": [0.2, 0.1]
        },
        "hidden_act = 'relu': not supported by jaxformer": {"hidden_act": "relu"},
        "conv_bias = True: unknown attribute": {"conv_bias": True},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            config_from_fields("mamba2", **fields | change)


def test_what_bamba_says():
    mamba = {
        "mamba_n_heads": 3,
        "mamba_d_head": "auto",
        "mamba_d_state": 5,
        "mamba_conv_bias": False,
    }
    fields = mamba | {"head_dim": 4, "attn_layer_indices": [1, 3]}
    config = config_from_fields("bamba", **fields)
    kinds = config.attention
    assert [type(kind) for kind in kinds] == [c.LinearAttention, c.MultiHead]
    assert (kinds[0].value_dim, kinds[0].num_key_heads, kinds[0].biases) == (8, 1, ())
    assert kinds[1].positions == (c.Rope(fraction=0.5),)
    for other in (config, config_from_fields("bamba", **fields | {"attn_layer_indices": []})):
        family, values = choose_family(other, {})
        assert family.model_type == "bamba"
        assert build_config(family, values, where="") == other
    with pytest.raises(ValueError, match="partial_rotary_factor = 1.0: not supported by jaxformer"):
        config_from_fields("bamba", **fields, partial_rotary_factor=1.0)
    with pytest.raises(ValueError, match="mamba_rms_norm = True: unknown attribute, which may"):
        config_from_fields("bamba", **fields, mamba_rms_norm=True)


def test_what_falcon_h1_says():
    fields = {"mamba_n_heads": 6, "mamba_d_ssm": 30, "mamba_d_head": "auto", "mamba_d_state": 5}
    fields |= {"head_dim": 4, "key_multiplier": 0.5, "embedding_multiplier": 5.5}
    fields |= {"lm_head_multiplier": 0.25, "rope_theta": 1e11, "mamba_use_mlp": True}
    config = config_from_fields("falcon_h1", **fields)
    heads, mamba = config.attention.kinds
    assert (heads.scale, heads.positions, heads.biases) == (0.25, (c.Rope(base=1e11),), ())
    assert (mamba.value_dim, mamba.num_key_heads, mamba.biases) == (5, 1, ("convolution",))
    assert mamba.output == c.GatedNorm(norm=None, over="group", placement="before_norm")
    assert (config.embedding.scale, config.head.multiplier) == (5.5, 0.25)
    for more, norm, placement in (
        ({"mamba_rms_norm": True}, config.norm, "after_norm"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": False}, config.norm, "before_norm"),
    ):
        other = config_from_fields("falcon_h1", **fields | more)
        output = other.attention.kinds[1].output
        assert (output.norm, output.placement) == (norm, placement)
        family, values = choose_family(other, {})
        assert family.model_type == "falcon_h1"
        assert build_config(family, values, where="") == other
    biased = {"mamba_proj_bias": True, "mamba_conv_bias": False, "projectors_bias": True}
    expanded = {"mamba_d_ssm": None, "mamba_expand": 3}
    other = build_config(
        FAMILIES["falcon_h1"], {**SIZES, **fields, **biased, **expanded}, where="here"
    )
    mamba = other.attention.kinds[1]
    assert (mamba.biases, mamba.value_dim) == (("in", "out"), 6)
    refused = {
        "6 heads of 7 make 42 features, but mamba_d_ssm is 30": {"mamba_d_head": 7},
        "ssm_multipliers = .1.0, 2.0.: expected 5 numbers": {"ssm_multipliers": [1.0, 2.0]},
        "mlp_multipliers = 'a': expected a list of float": {"mlp_multipliers": "a"},
        "ssm_in_multiplier = 'a': expected a value of type float": {"ssm_in_multiplier": "a"},
        "mamba_use_mlp = False: not supported by jaxformer": {"mamba_use_mlp": False},
        "attn_layer_indices = .1.: not supported by jaxformer": {"attn_layer_indices": [1]},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            config_from_fields("falcon_h1", **fields | change)


def test_what_olmo_hybrid_says():
    positions = {"rope_parameters": {"rope_theta": None}}
    config = config_from_fields("olmo_hybrid", linear_a_log_max=16.0, **positions)
    *deltas, heads = config.attention
    assert [type(kind) for kind in deltas] == [c.LinearAttention] * 3
    assert config.norm_placement == ("pre", "pre", "pre", "res_post")
    assert (deltas[0].num_heads, deltas[0].num_key_heads, deltas[0].max_beta) == (6, 6, 2.0)
    assert (deltas[0].key_dim, deltas[0].value_dim, deltas[0].output.norm.eps) == (1, 2, 1e-5)
    assert (heads.positions, heads.biases) == ((None,), ())
    assert heads.qk_norm == c.QKNorm(norm=config.norm, over="width")
    plain = {"rope_parameters": {"rope_type": "default"}, "linear_allow_neg_eigval": False}
    other = config_from_fields("olmo_hybrid", attention_bias=True, num_hidden_layers=3, **plain)
    assert other.norm_placement == ("pre", "pre", "res_post")
    assert other.attention[-1].positions == (c.Rope(),)
    assert other.attention[0].max_beta == 1.0
    for model in (config, other):
        family, values = choose_family(model, {})
        assert family.model_type == "olmo_hybrid"
        assert build_config(family, values, where="") == model
    with pytest.raises(ValueError, match="norm_placement"):
        choose_family(replace(config, norm_placement="pre"), {}, "olmo_hybrid")
    no_type = config_from_fields("olmo_hybrid", rope_parameters={"rope_type": None})
    assert no_type.attention == config.attention
    refused = {
        "rope_parameters = None: transformers takes this for a base of 10,000, its authors": {
            "rope_parameters": None
        },
        "expected linear_attention and full_attention for 4 layers": {
            "layer_types": ["linear_attention"] * 4
        },
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            config_from_fields("olmo_hybrid", **positions | change)


def test_what_granite_4_says():
    fields = {"layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 3}
    fields |= {"num_local_experts": 3, "shared_intermediate_size": 7, "head_dim": 4}
    fields |= {"attention_multiplier": 0.5, "position_embedding_type": "nope", "rope_theta": 1e4}
    config = config_from_fields("granitemoehybrid", **fields)
    kinds, linear = config.attention, c.LinearAttention
    assert [type(kind) for kind in kinds] == [linear, linear, c.MultiHead]
    assert (kinds[2].scale, kinds[2].positions) == (0.5, (None,))
    (moe,) = config.feed_forward
    assert (moe.shared.expert, moe.expert) == (c.GLU(hidden_dim=7), c.GLU(hidden_dim=10))
    dense = fields | {"num_local_experts": 0, "position_embedding_type": "rope"}
    all_attention = dense | {"layer_types": ["attention"] * 4}
    for other in (fields, dense, all_attention, fields | {"layer_types": None}):
        config = config_from_fields("granitemoehybrid", **other)
        family, values = choose_family(config, {})
        assert family.model_type == "granitemoehybrid"
        assert build_config(family, values, where="") == config
    assert config_from_fields("granitemoehybrid", **dense).feed_forward == (c.GLU(hidden_dim=7),)
    refused = {
        r"layer_types = \['mamba'\]: .* for each of 4 layers": {"layer_types": ["mamba"]},
        "position_embedding_type = 'alibi': expected one of": {"position_embedding_type": "alibi"},
        "mamba_use_norm = False: unknown attribute": {"mamba_use_norm": False},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            config_from_fields("granitemoehybrid", **fields | change)


def test_what_nemotron_3_nano_says():
    fields = {
        **{"vocab_size": 131_072, "hidden_size": 2688, "num_hidden_layers": 52},
        "hybrid_override_pattern": "MEMEM*E" * 5 + "ME" * 3 + "M*E" + "ME" * 4,
        **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
        **{"n_routed_experts": 128, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5},
        **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        **{"time_step_limit": [0.0, math.inf], "rope_theta": 10_000, "expand": 2},
    }
    config = build_config(FAMILIES["nemotron_h"], fields, where="")
    assert [type(config.layers[i].attention) for i in (0, 1, 5, 51)] == [
        *(c.LinearAttention, c.NoAttention, c.MultiHead, c.NoAttention)
    ]
    assert config.layers[0].attention.decay == c.StepDecay(min_step=0.001)
    assert config.layers[5].feed_forward == c.NoFeedForward()
    moe = config.layers[1].feed_forward
    assert moe.expert == c.MLP(hidden_dim=1856, activation="relu_squared")
    assert moe.shared.expert == c.MLP(hidden_dim=3712, activation="relu_squared")
    family, values = choose_family(config, {})
    assert family.model_type == "nemotron_h"
    assert build_config(family, values, where="") == config
    refused = {
        "ExpertLatent.latent_dim must be positive; got 0": {"moe_latent_size": 0},
        "n_shared_experts = 2: not supported": {"n_shared_experts": 2},
        r"time_step_limit = \[0.0, 0.1\]: steps are limited by time_step_min alone": {
            "time_step_limit": [0.0, 0.1]
        },
        "hybrid_override_pattern = 'MX': expected M .* for each layer": {
            "hybrid_override_pattern": "MX"
        },
        "num_hidden_layers = 52: hybrid_override_pattern has another number of layers": {
            "hybrid_override_pattern": "M*"
        },
        "sliding_window = 8: unknown attribute": {"sliding_window": 8},
    }
    for message, change in refused.items():
        with pytest.raises(ValueError, match=message):
            build_config(FAMILIES["nemotron_h"], fields | change, where="")


def test_what_released_files_say_beside_what_transformers_writes():
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    small = config_from_fields(
        "smollm3",
        max_window_layers=28,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0],
        use_sliding_window=False,
        sliding_window=None,
        rope_theta=5e6,
    )
    assert small.attention.positions == (*[c.Rope(base=5e6)] * 3, None)
    assert small.attention.windows == (None,)
    exaone = config_from_fields(
        "exaone4", sliding_window=5, sliding_window_pattern="LLLG", layer_types=kinds
    )
    assert exaone.attention.positions == (*[c.Rope()] * 3, None)
    assert exaone.attention.windows == (5, 5, 5, None)
    fields = SIZES | {"sliding_window": None, "sliding_window_pattern": 0}
    full = build_config(FAMILIES["exaone4"], fields, where="")
    assert (full.attention.windows, full.attention.positions) == ((None,), (c.Rope(),))
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    olmo = config_from_fields("olmo3", rope_theta=5e5, rope_scaling=scaling, layer_types=kinds)
    assert olmo.attention.positions[0] == c.Rope(base=5e5)
    assert olmo.attention.positions[3] == c.Rope(
        base=5e5, scaling=c.Yarn(factor=8.0, original_max_length=64)
    )
    qwen = config_from_fields(
        "qwen3_moe",
        max_window_layers=48,
        use_sliding_window=False,
        sliding_window=None,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=7,
        norm_topk_prob=True,
    )
    experts = c.MoE(expert=c.GLU(hidden_dim=7), num_experts=6, top_k=2)
    layers = [qwen.layers[i].feed_forward for i in range(4)]
    assert layers == [c.GLU(hidden_dim=10), *[experts] * 3]
    assert qwen.segments("decoder") == (1, 1, 3, 0)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("smollm3", dict(no_rope_layers=[1, 0]), r"no_rope_layers = \[1, 0\]: .* each of 4 layers"),
        ("olmoe", dict(clip_qkv=8.0), "clip_qkv = 8.0: not supported"),
        ("qwen3_moe", dict(num_experts=3, num_experts_per_tok=4), "top_k must be at most num_exp"),
        ("qwen3_moe", dict(mlp_only_layers="0"), "mlp_only_layers = '0': expected a list of int"),
        (
            "olmo3",
            dict(rope_parameters=dict(rope_type="yarn")),
            r"rope_parameters\.rope_type = 'ya",
        ),
    ],
    ids=str,
)
def test_what_a_family_cannot_have_is_named(family, fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_fields(family, **fields)


def test_norms_branches_and_scales():
    assert config_from_fields("olmo").norm == c.LayerNorm(eps=1e-5, parameters="none")
    olmo2 = config_from_fields("olmo2", rms_norm_eps=1e-6)
    assert olmo2.norm_placement == "res_post"
    assert olmo2.attention.qk_norm == c.QKNorm(norm=c.RMSNorm(eps=1e-6), over="width")
    gemma3 = config_from_fields("gemma3_text", query_pre_attn_scalar=16)
    assert gemma3.norm_placement == "sandwich"
    assert gemma3.attention.qk_norm == c.QKNorm(norm=c.RMSNorm(scale_offset=1.0), over="head")
    assert (gemma3.attention.scale, gemma3.embedding.scale) == (0.25, math.sqrt(12))
    qwen3 = config_from_fields("qwen3", num_attention_heads=4, rms_norm_eps=1e-5).attention
    assert (qwen3.head_dim, qwen3.num_kv_heads, qwen3.biases) == (128, 2, ())
    assert qwen3.qk_norm == c.QKNorm(norm=c.RMSNorm(eps=1e-5), over="head")
    nemotron = config_from_fields("nemotron", head_dim=4)
    assert nemotron.norm == c.LayerNorm(scale_offset=1.0)
    assert nemotron.feed_forward == (c.MLP(hidden_dim=10, activation="relu_squared"),)
    cohere = config_from_fields("cohere", use_qk_norm=True, logit_scale=0.5)
    assert (cohere.block, cohere.head.multiplier) == ("parallel_shared_norm", 0.5)
    assert cohere.attention.qk_norm == c.QKNorm(
        norm=c.LayerNorm(parameters="scale"), over="each_head"
    )
    experts = config_from_fields("mixtral", num_local_experts=3, num_experts_per_tok=1).feed_forward
    assert experts == (c.MoE(expert=c.GLU(hidden_dim=10), num_experts=3, top_k=1),)
    qwen = config_from_fields("qwen", num_key_value_heads=None)
    assert qwen.feed_forward == (c.GLU(hidden_dim=5),)
    assert qwen.attention.biases == ("query", "key", "value")
    small = config_from_fields("phi3small", intermediate_size=None, ff_intermediate_size=7)
    assert small.feed_forward == (c.ClampedGEGLU(hidden_dim=7, limit=20.0),)
    assert (small.attention.scale, small.embedding.scale) == (1 / 2, 10.0)
    assert (small.head.tied, small.head.multiplier) == (True, 1 / 8)


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 4}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 4}),
        ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5}),
        ("llama", {"rope_scaling": {"type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 2}}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen3", {"head_dim": 10, "tie_word_embeddings": True, "rope_theta": 1e6}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen3", {"attention_bias": True, "rope_scaling": {"type": "yarn", **YARN}}),
        ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
        ("olmo", {"clip_qkv": 8.0, "tie_word_embeddings": True}),
        ("olmo2", {"rms_norm_eps": 1e-6}),
        ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": 2.0}),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}, "head_dim": 4}),
        ("nemotron", {"partial_rotary_factor": 1.0, "head_dim": 8}),
        ("cohere", {"use_qk_norm": True, "logit_scale": 0.8333333333333334}),
        ("cohere2", {"sliding_window": 5}),
        ("cohere2", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}),
        ("cohere2", {"layer_types": ["full_attention"] * 4}),
        ("phi3", {"partial_rotary_factor": 1.0, "sliding_window": 3}),
        (
            "phi3",
            {
                "rope_scaling": {"type": "su", "short_factor": [1.5], "long_factor": [3.0]},
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
            },
        ),
        (
            "phi3small",
            {"ff_intermediate_size": 7, "intermediate_size": None, "dummy_token_indices": [3, 4]},
        ),
        ("qwen", {"num_key_value_heads": None, "no_bias": False, "rotary_pct": 1.0}),
        ("ernie4_5_moe", {"use_bias": True, "moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"use_bias": True, "moe_layer_start_index": 0, "moe_k": 2}),
        ("phimoe", {"router_jitter_noise": 0.1, "lm_head_bias": True, "attention_bias": True}),
        ("cohere2_moe", {"first_k_dense_replace": 3, "sliding_window": 5, "num_shared_experts": 1}),
        ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2, "sliding_window_pattern": 2}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_a_family_writes_reads_back(kind, fields):
    config = config_from_fields(kind, **fields)
    family, values = choose_family(config, {}, kind)
    assert family.model_type == kind
    assert build_config(family, values, where="") == config
    if family.in_transformers:
        assert choose_family(config, {})[0] is family
    first, _ = choose_family(replace(config, model_type=None), {})
    assert first.read(ConfigReader(choose_family(config, {}, first.model_type)[1])) == config


def test_a_model_is_written_under_the_name_it_was_read_by():
    """The name is no part of the model, and goes through JSON with it."""
    config = config_from_fields("phi3")
    assert config == config_from_fields("llama", rms_norm_eps=1e-5) and hash(config) == hash(
        replace(config, model_type="llama")
    )
    again = c.from_json(c.TransformerConfig, c.to_json(config))
    assert choose_family(again, {})[0].model_type == "phi3"
    assert choose_family(config, {}, "llama")[0].model_type == "llama"
    qwen = config_from_fields("qwen", num_key_value_heads=None, rotary_pct=1.0)
    assert choose_family(qwen, {})[0].model_type == "qwen2"  # transformers has no class for qwen
    other = replace(config, block="parallel", norm=c.LayerNorm(eps=1e-5))
    with pytest.raises(ValueError, match="No family can represent this configuration"):
        choose_family(replace(other, model_type="a kind unknown"), {})


def test_what_lfm_3_says():
    """As transformers' class by default: every fourth layer is full, the others by turns."""
    config = config_from_fields("lfm3", num_hidden_layers=9, head_dim=128)
    kinds = [type(layer.attention) for layer in config.layers]
    assert [i for i, kind in enumerate(kinds) if kind is c.MultiHead] == [2, 4, 6, 8]
    heads = [config.layers[i] for i in (2, 4, 6, 8)]
    assert [layer.window for layer in heads] == [None, 256, None, 256]
    full = c.Rope(base=1e6, scaling=c.PRope(fraction=0.5))
    assert [layer.rope for layer in heads] == [full, c.Rope()] * 2
    assert heads[0].attention.output_gate == c.OutputGate(over="head")
    assert config.layers[0].attention.width == 7 and config.norm_placement == "sandwich"
    plain = config_from_fields("lfm3", use_sandwich_norm=False, use_attention_gate=False)
    assert plain.norm_placement == "pre" and plain.layers[2].attention.output_gate is None
    types = {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}
    with pytest.raises(ValueError, match=r"sliding_window = None: layers with a window need this"):
        build_config(FAMILIES["lfm3"], {**SIZES, "sliding_window": None, **types}, where="")
    with pytest.raises(ValueError, match=r"expected conv or sliding_attention or full_attention"):
        config_from_fields("lfm3", layer_types=["conv"] * 3)


def test_layers_of_lara():
    fields = {"num_experts": 5, "head_dim": 6, "num_hidden_layers": 5, "intermediate_size": None}
    config = config_from_fields("lara_mini", **fields)
    kinds = [(type(x.attention), x.window, x.rope) for x in config.layers if x.rope or not x.window]
    assert kinds == [
        (c.MultiHead, 512, c.Rope()),
        (c.MultiHead, None, None),
        (c.MultiHead, 512, c.Rope()),
    ]
    assert not config.feed_forward[0].shared.gated and config.norm.scale_offset == 0


def test_ropes_of_compass():
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}
    both = {"full_attention": None, "sliding_attention": {"rope_theta": 5e4, "mrope_section": [1]}}
    config = config_from_fields("cohere_compass_text", rope_parameters=both, **types)
    assert config.attention.positions == (c.Rope(base=5e4), None)
    assert config.attention.windows == (5, None) and config.head.multiplier == 1
    one = {"full_attention": {"rope_theta": 1e6}, "rope_theta": 1e4}
    config = config_from_fields("cohere_compass_text", rope_parameters=one)
    assert config.attention.positions == (c.Rope(base=1e6),)
    assert choose_family(config, {}, "cohere_compass_text")[1]["sliding_window"] == 4096
    with pytest.raises(ValueError, match=r"sliding_attention = None: expected an object, or null"):
        config_from_fields("cohere_compass_text", rope_parameters=one, **types)


def test_gemma_4_of_12b_has_no_experts():
    config = config_from_fields("gemma4_unified_text", head_dim=4, global_head_dim=6)
    assert config.layer_embedding is None and config.layers[0].window == 1024
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        with pytest.raises(ValueError, match=rf"{name} = 1: unknown attribute"):
            config_from_fields("gemma4_unified_text", head_dim=4, **{name: 1})


def test_gelu_of_gemma_1_is_its_approximation():
    """As transformers reads its released files."""
    for name, ours in (("gelu", "gelu_tanh"), ("gelu_python", "gelu"), (None, "gelu_tanh")):
        config = config_from_fields("gemma", head_dim=4, hidden_act=name)
        assert config.feed_forward[0].activation == ours
        written = choose_family(config, {}, "gemma")[1]["hidden_act"]
        assert written == {"gelu": "gelu_python", "gelu_tanh": "gelu_pytorch_tanh"}[ours]
    assert config_from_fields("gemma", hidden_activation="gelu_pytorch_tanh").head.tied
    with pytest.raises(
        ValueError, match=r"hidden_activation = 'gelu': transformers reads hidden_a"
    ):
        config_from_fields("gemma", hidden_activation="gelu")


OLD_EXPERTS = {"num_experts": 9, "num_shared_experts": 2}
NEW_EXPERTS = {"n_routed_experts": 9, "n_shared_experts": 2}
SARVAM_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "kind, old, new",
    [
        ("exaone", {"num_layers": 7, "num_hidden_layers": None}, {"num_hidden_layers": 7}),
        ("exaone", {"layer_norm_epsilon": 1e-3}, {"rms_norm_eps": 1e-3}),
        ("exaone", {"activation_function": "gelu_new"}, {"hidden_act": "gelu_new"}),
        ("internlm3", {"qkv_bias": True, "bias": True}, {"attention_bias": True, "mlp_bias": True}),
        ("sarvam_moe", OLD_EXPERTS, NEW_EXPERTS),
        ("sarvam_moe", {"use_qkv_bias": True}, {"attention_bias": True}),
        (
            "sarvam_mla",
            OLD_EXPERTS
            | {"head_dim": 576, "q_head_dim": 192, "num_key_value_heads": 6}
            | {"rope_scaling": {"type": "deepseek_yarn", **SARVAM_YARN}},
            NEW_EXPERTS
            | {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "yarn", **SARVAM_YARN}},
        ),
    ],
)
def test_old_names_of_fields(kind, old, new):
    config = config_from_fields(kind, **old)
    assert config == config_from_fields(kind, **new)
    same = {"num_key_value_heads": old.get("num_key_value_heads", 2)}
    assert config != config_from_fields(kind, **same)
    written = choose_family(config, {}, kind)[1]
    assert not set(written) & {"num_layers", "layer_norm_epsilon", "bias", "num_experts"}


def test_internlm_3_has_all_biases_or_none():
    with pytest.raises(ValueError, match=r"bias = False: all layers have biases, or none; it must"):
        config_from_fields("internlm3", qkv_bias=True, bias=False)
    config = config_from_fields("internlm3", attention_bias=True, mlp_bias=True, head_dim=4)
    part = replace(config, feed_forward=(replace(config.feed_forward[0], bias=False),))
    with pytest.raises(ValueError, match=r"internlm3 cannot represent"):
        choose_family(part, {}, "internlm3")


def windows_of(kind, **fields):
    return [layer.window for layer in config_from_fields(kind, **fields).layers]


def test_windows_that_files_leave_out():
    """As the classes of transformers: every fourth layer, or some, sees everything."""
    scaling = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}}
    assert windows_of("cwm", num_hidden_layers=5, **scaling) == [None, 8192, 8192, 8192, None]
    assert windows_of("granite_swa") == windows_of("granitemoe_swa") == [None, 128, 128, 128]
    flint = {"num_hidden_layers": 9, "head_dim": 4}
    assert windows_of("flint", **flint) == [None, None, 513, 513, 513, None, 513, 513, None]
    layers = config_from_fields("flint", **flint).layers
    assert [layer.rope is not None for layer in layers] == [bool(x.window) for x in layers]
    assert [layer.feed_forward.is_moe for layer in layers] == [False] * 2 + [True] * 7
    assert windows_of("mellum") == [None] * 4
    with pytest.raises(ValueError, match=r"the scaling of RoPE must be in the file"):
        config_from_fields("cwm")


@pytest.mark.parametrize("kind", ["cwm", "granite_swa", "granitemoe_swa", "flint"])
def test_a_window_that_no_layer_has_is_written(kind):
    """Transformers makes the mask of windows whatever the layers are."""
    full = {"layer_types": ["full_attention"] * 4, "head_dim": 2, "rope_scaling": {}}
    config = config_from_fields(kind, **full, sliding_window=9)
    assert config.attention.windows == (None,)
    assert choose_family(config, {}, kind)[1]["sliding_window"] > 0


def test_bases_of_granites_layers():
    fields = {"layer_rope_theta": [0, 1e4, 5e2, 1e4, 7e7], "num_hidden_layers": 4}
    config = config_from_fields("granite_swa", **fields)
    ropes = [layer.rope for layer in config.layers]
    assert [rope and rope.base for rope in ropes] == [None, 1e4, 5e2, 1e4]
    assert choose_family(config, {})[1]["layer_rope_theta"] == [0, 1e4, 5e2, 1e4]
    none = config_from_fields("granite_swa", layer_rope_theta=[0] * 4)
    assert none.attention.positions == (None,)
    assert choose_family(none, {})[1]["layer_rope_theta"] == [0] * 4
    with pytest.raises(ValueError, match=r"layer_rope_theta = .*a number for each of 4 layers"):
        config_from_fields("granite_swa", layer_rope_theta=[1e4] * 3)


def test_ropes_of_mellum():
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 4}
    config = config_from_fields("mellum", **types)
    assert [rope.base for rope in config.attention.positions] == [1e4, 5e5]
    written = choose_family(config, {}, "mellum")[1]
    assert "rope_scaling" not in written  # transformers would take it for rope_parameters
    assert written["rope_parameters"]["full_attention"]["rope_theta"] == 5e5


def test_multipliers_of_minicpm_3():
    fields = {"num_key_value_heads": 6, "num_hidden_layers": 4}
    config = config_from_fields("minicpm3", **fields)
    assert (config.residual_multiplier, config.embedding.scale) == (1.4 / 2, 12)
    assert config.head.multiplier == 256 / 12 and config.attention.value_dim == 2
    written = choose_family(config, {}, "minicpm3")[1]
    assert (written["scale_depth"], written["dim_model_base"]) == (1.4, 256)
    values = {**SIZES, **fields, "scale_depth": None, "dim_model_base": None}
    plain = build_config(FAMILIES["minicpm3"], values, where="")
    assert plain.residual_multiplier == plain.head.multiplier == 1
    odd = replace(config, head=replace(config.head, multiplier=0.3))
    with pytest.raises(ValueError, match=r"The family minicpm3 cannot represent"):
        choose_family(odd, {}, "minicpm3")


def test_factor_of_hyperclovax():
    """Logits are multiplied by it, Granite's divided."""
    config = config_from_fields("hyperclovax", logits_scaling=4.0, attention_multiplier=None)
    assert config.head.multiplier == 4 and config.attention.scale is None
    assert config.norm_placement == "sandwich"
    assert config_from_fields("granite", logits_scaling=4.0).head.multiplier == 0.25
