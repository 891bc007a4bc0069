"""What config.json says of experts and of their router."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxformer import config as c
from jaxformer.interop.load import build_config
from jaxformer.interop.save import choose_family
from jaxformer.layers.feed_forward import FeedForward
from jaxformer.layers.runtime import MeshAxes, RuntimeConfig
from jaxformer.parallel import check_divisible
from tests.interop.numpy_folders import config_from_fields

MHA = {"num_key_value_heads": 6}
MIXED = ["sparse", "dense", "sparse", "sparse"]
SWITCH = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers")),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads")),
    **{"d_model": 12, "d_kv": 2, "d_ff": 10, "num_heads": 6, "num_layers": 4},
    "is_encoder_decoder": True,
}
SHORT = {
    "type": "longrope",
    "short_factor": [1.0],
    "long_factor": [2.0],
    "short_mscale": 1.2,
    "original_max_position_embeddings": 16,
}
LONG = SHORT | {"long_mscale": 1.2}
LINEAR = {"type": "linear", "factor": 2.0, "short_mscale": 1.2, "long_mscale": 1.2}


def kinds(config):
    """Whether each layer has experts."""
    return [isinstance(config.layers[i].feed_forward, c.MoE) for i in range(config.num_layers)]


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, [False, True, True, True]),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 2}, [True, True, True, False]),
        ({"moe_layer_interval": 2}, [False, True, False, True]),
        ({"moe_layer_start_index": 2, "moe_layer_interval": 2}, [False, False, False, True]),
        ({"moe_layer_start_index": 4}, [False] * 4),
        ({"moe_layer_start_index": -(10**12)}, [True] * 4),  # in no time
    ],
)
def test_layers_with_experts_are_numbered(fields, expected):
    assert kinds(config_from_fields("ernie4_5_moe", **fields)) == expected


def test_shared_experts_are_one_as_wide_as_they_together():
    """Its biases are those of dense layers; experts have none."""
    config = config_from_fields("ernie4_5_moe", moe_intermediate_size=7, use_bias=True)
    moe = config.layers[1].feed_forward
    assert moe.expert == c.GLU(hidden_dim=7)
    assert moe.shared.expert == c.GLU(hidden_dim=14, bias=True)
    assert config.head.bias and config.layers[0].feed_forward.bias
    without = config_from_fields("ernie4_5_moe", moe_num_shared_experts=0, use_bias=False)
    assert without.layers[1].feed_forward.shared is None and not without.head.bias
    family, _ = choose_family(config, {}, "ernie4_5_moe")
    assert family.is_ignored("model.mtp_linear_proj.0.weight", config, {})
    assert not family.is_ignored("model.layers.3.mlp.gate.weight", config, {})


def test_released_glm_lite():
    """What GLM 4.7 Flash leaves to the defaults of transformers."""
    config = config_from_fields("glm4_moe_lite", **MHA, partial_rotary_factor=1.0)
    attention, moe = config.attention, config.layers[1].feed_forward
    assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == (192, 64, 256)
    assert (attention.latent_dim, attention.query_latent_dim) == (512, 768)
    assert (attention.norm.eps, config.norm.eps) == (1e-6, 1e-5)
    assert moe.router == c.Router(score="sigmoid", selection_bias=True, scale=1.8)
    assert (moe.num_experts, moe.top_k) == (64, 4)
    assert moe.expert == moe.shared.expert == c.GLU(hidden_dim=1536)
    assert kinds(config) == [False, True, True, True]


def test_layers_of_command_a_plus():
    """Dense layers have their own windows, and if none has one, they rotate all the same."""
    fields = {"num_hidden_layers": 7, "first_k_dense_replace": 2, "sliding_window": 5}
    config = config_from_fields("cohere2_moe", **fields)
    layers = [config.layers[i] for i in range(7)]
    assert [layer.window for layer in layers] == [None, None, 5, 5, 5, None, 5]
    assert [layer.rope is None for layer in layers] == [False] * 5 + [True, False]
    assert kinds(config) == [False] * 2 + [True] * 5
    other = config_from_fields("cohere2_moe", **fields, prefix_dense_sliding_window_pattern=2)
    layers = [other.layers[i] for i in range(7)]
    assert [layer.window for layer in layers] == [5, None, 5, 5, 5, None, 5]
    assert [layer.rope is None for layer in layers] == [False, True] + [False] * 3 + [True, False]
    assert other.attention.head_dim == 128 and other.layers[2].feed_forward.shared is None
    types = ["dense"] * 2 + ["sparse"] * 5  # by which the windows do not go
    typed = config_from_fields(
        "cohere2_moe", num_hidden_layers=7, mlp_layer_types=types, sliding_window=5
    )
    layers = [typed.layers[i] for i in range(7)]
    assert [layer.window for layer in layers] == [5, 5, 5, None, 5, 5, 5]
    assert [layer.rope is None for layer in layers] == [i == 3 for i in range(7)]
    assert kinds(typed) == kinds(config)


def test_scores_of_command_a_plus():
    """A softmax over the chosen is one over all, divided by the sum of the chosen."""
    for score, flag, renormalise in (
        ("softmax", False, True),
        ("sigmoid", False, False),
        ("sigmoid", True, True),
    ):
        config = config_from_fields("cohere2_moe", expert_selection_fn=score, norm_topk_prob=flag)
        router = config.layers[3].feed_forward.router
        assert router == c.Router(score=score, renormalise=renormalise)


def test_released_phi_moe():
    """Its factor of attention stands under two names, and the context of the training twice."""
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    config = config_from_fields("phimoe", rope_scaling=LONG, **lengths, input_jitter_noise=0.01)
    (rope,) = config.attention.positions
    assert rope == c.Rope(
        base=1e6,
        scaling=c.LongRope(
            short_factors=(1.0,),
            long_factors=(2.0,),
            original_max_length=16,
            max_length=64,
            attention_factor=1.2,
        ),
    )
    (moe,) = config.feed_forward
    assert (moe.router, moe.num_experts, moe.top_k) == (c.SparseMixer(jitter=0.01), 16, 2)
    assert config.norm == c.LayerNorm(eps=1e-5) and not config.head.bias


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"num_sparse_encoder_layers": 2}, [1, 3]),
        ({"num_sparse_encoder_layers": 3}, [0, 1, 2, 3]),  # four by three is one
        ({"num_sparse_encoder_layers": 1}, [1]),
        ({"num_sparse_encoder_layers": 0}, [1]),  # as in transformers
        ({"num_sparse_encoder_layers": 5}, []),
        ({"num_sparse_encoder_layers": 1, "encoder_sparse_step": 3}, [1]),
        ({"num_sparse_encoder_layers": 1, "encoder_sparse_step": 2}, [1, 3]),
    ],
)
def test_layers_of_switch_with_experts(fields, expected):
    config = config_from_fields("switch_transformers", **SWITCH, **fields)
    branches = [layer.feed_forward for layer in config.encoder_layers]
    assert [i for i, branch in enumerate(branches) if isinstance(branch, c.MoE)] == expected
    family, values = choose_family(config, {}, "switch_transformers")
    assert build_config(family, values, where="") == config


def test_released_switch():
    """switch-base-8: every second layer has experts of 64 tokens a row."""
    released = {"router_type": "tokens_masked", "num_selected_experts": 1, "expert_capacity": 64}
    released |= {"batch_prioritized_routing": False, "feed_forward_proj": "relu"}
    released |= {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
    config = config_from_fields("switch_transformers", **SWITCH, **released)
    dense, moe = config.feed_forward
    assert config.topology.feed_forward is None and dense == c.MLP(hidden_dim=10, activation="relu")
    assert moe == c.MoE(
        expert=dense, num_experts=8, top_k=1, router=c.Router(renormalise=False, capacity=64)
    )
    assert (config.head.tied, config.head.multiplier) == (True, 12**-0.5)


def test_rows_of_a_capacity_are_not_sharded():
    """By the mesh before anything is compiled, and by the layer for who goes without it."""
    config = config_from_fields("switch_transformers", **SWITCH)
    check_divisible(config, {"data": 2}, batch_size=4, lengths=[16])
    with pytest.raises(ValueError, match="context 2, but Router.capacity 64 counts the tokens of"):
        check_divisible(config, {"context": 2}, batch_size=4, lengths=[16])
    x = jnp.zeros((2, 4, 12))
    runtime = RuntimeConfig(mesh_axes=MeshAxes(context="context"))
    layer = FeedForward(config, config.feed_forward[-1], runtime)
    with pytest.raises(ValueError, match="Router.capacity=64 counts .* context axis 'context'"):
        layer.init(jax.random.key(0), x)


@pytest.mark.parametrize("kind", ["glm4_moe_lite", "exaone_moe", "hy_v3"])
def test_layers_are_written_by_their_types(kind):
    """Transformers reads no other field, also where all are dense."""
    for dense in (1, 4):
        types = ["dense"] * dense + ["sparse"] * (4 - dense)
        config = config_from_fields(kind, **MHA, mlp_layer_types=types)
        assert choose_family(config, {}, kind)[1]["mlp_layer_types"] == types


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval = 0: expected 1 or more"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, r"moe_norm_min = 0\.5: .* must be 1e-12\."),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act = 'sigmoid': .* 'softmax'"),
        ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, r"moe_num_experts = \[8, 8\]: expected a"),
        ("glm4_moe_lite", {**MHA, "mlp_layer_types": MIXED}, "mlp_layer_types = .* for all 4 lay"),
        ("switch_transformers", {**SWITCH, "num_sparse_encoder_layers": -1}, "num_sparse_encoder"),
        ("switch_transformers", {**SWITCH, "is_gated_act": True}, "is_gated_act = True: .* False"),
        (
            "switch_transformers",
            {**SWITCH, "router_dtype": "bfloat16"},
            "router_dtype = 'bfloat16'",
        ),
        (
            "switch_transformers",
            {**SWITCH, "tie_word_embeddings": False},
            "tie_word_embeddings = F",
        ),
        (
            "switch_transformers",
            {**SWITCH, "feed_forward_proj": "gelu"},
            "feed_forward_proj = 'gel",
        ),
        ("hy_v3", {**MHA, "norm_topk_prob": False}, "norm_topk_prob = False: .* it must be True"),
        ("hy_v3", {**MHA, "n_group": 2}, "n_group = 2: this family has no such choice; .* 1"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3: .* must be 2"),
        (
            "phimoe",
            {"rope_scaling": LONG | {"long_mscale": 1.3}},
            "rope_scaling.long_mscale = 1.3: ",
        ),
        ("phimoe", {"rope_scaling": SHORT}, "rope_scaling.long_mscale = None: expected a value"),
        ("phimoe", {"rope_scaling": LINEAR}, "rope_scaling.type = 'linear': expected default or"),
        ("cohere2_moe", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: expected 1 or"),
        ("cohere2", {"layer_switch": 0}, "layer_switch = 0: expected 1 or more"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: expected 1 or"),
        ("exaone4", {"sliding_window_pattern": -2}, "sliding_window_pattern = -2: expected 1 or"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0: expected 1 or"),
        ("qwen3_moe", {**MHA, "decoder_sparse_step": 0}, "decoder_sparse_step = 0: expected 1 or"),
        ("switch_transformers", {**SWITCH, "d_model": 0}, "d_model = 0: expected 1 or more"),
        ("t5", {**SWITCH, "d_model": -4}, "d_model = -4: expected 1 or more"),
        ("deepseek_v3", {**MHA, "qk_nope_head_dim": -64}, "qk_nope_head_dim = -64: expected 1 or"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0: expected a number ab"),
        ("gpt_neox", {"num_attention_heads": 0}, "num_attention_heads = 0: expected 1 or more"),
        (
            "cohere2_moe",
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_theta": 2e4},
            },
            "rope_scaling = .*: transformers ignores it in this family, and the other fields say",
        ),
        ("cohere2_moe", {"mlp_layer_types": MIXED}, "mlp_layer_types = .* for all 4 layers"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn = 'tanh': expected"),
        ("cohere2_moe", {"use_parallel_block": False}, "use_parallel_block = False: .* True"),
        ("glm4_moe_lite", {**MHA, "partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5: "),
    ],
)
def test_what_is_refused(kind, fields, message):
    with pytest.raises(ValueError, match=rf"(?s)here: 1 attributes .*\n  {message}"):
        config_from_fields(kind, **fields)


@pytest.mark.parametrize("topk_group", [0, 2])
def test_one_group_is_chosen(topk_group):
    with pytest.raises(
        ValueError, match=rf"here: ExpertGroups.top_k must .* has .*topk_group = {topk_group}"
    ):
        config_from_fields("glm4_moe", **MHA, n_group=1, topk_group=topk_group)


@pytest.mark.parametrize(
    "router", [{"renormalise": False}, {"groups": c.ExpertGroups(num_groups=2, top_k=1)}]
)
def test_hunyuan_3_stands_for_no_other_router(router):
    """Transformers reads neither, so the folder would be another model there."""
    config = config_from_fields("hy_v3", **MHA, first_k_dense_replace=0)
    (moe,) = config.feed_forward
    other = replace(moe, router=replace(moe.router, **router))
    with pytest.raises(ValueError, match="(?s)hy_v3 cannot .* this family has no such choice"):
        choose_family(replace(config, feed_forward=(other,)), {}, "hy_v3")
