"""What config.json says of latent attention and of experts."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.config import Decay, ExpertGroups, QueryScaling, RMSNorm, Rope, Router, Yarn
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.families.llama_like import heads_of
from jaxformer.interop.load import build_config
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden, write_folder
from tests.interop.numpy_folders import config_from_fields
from tests.small_models import random_params

DENSE = {"first_k_dense_replace": 4, "num_key_value_heads": None}
SCALED = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
RELEASED = {  # of DeepSeek-V3's config.json, what concerns attention
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": SCALED
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def test_released_attention():
    """DeepSeek's modeling file has 0.1 ln 40 + 1 = 1.3689, squared, and rotations of length 1."""
    attention = config_from_fields("deepseek_v3", **DENSE, **RELEASED).attention
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879**2, rel=1e-6)
    (rope,) = attention.positions
    assert rope.pairing == "neighbours"
    assert rope.scaling == Yarn(factor=40.0, original_max_length=4096, attention_factor=1.0)
    assert (attention.latent_dim, attention.query_latent_dim) == (512, 1536)
    assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == (128, 64, 128)
    assert attention.norm == RMSNorm(eps=1e-6) and attention.biases == ()


def test_what_a_file_leaves_out():
    """The defaults of transformers, and null for no latent of the queries."""
    lite = config_from_fields("deepseek_v2", **DENSE, attention_bias=True, rms_norm_eps=1e-5)
    assert (lite.attention.latent_dim, lite.attention.query_latent_dim) == (512, 1536)
    assert lite.attention.biases == ("latent", "rotary_key", "out", "query_latent")
    assert (
        lite.attention.positions == (Rope(pairing="neighbours"),) and lite.attention.scale is None
    )
    assert (lite.norm.eps, lite.attention.norm.eps) == (1e-5, 1e-6)
    values = {"vocab_size": 13, "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 6, "q_lora_rank": None, "rope_interleave": False}
    whole = build_config(FAMILIES["deepseek_v3"], values, where="").attention
    assert whole.query_latent_dim is None and whole.positions == (Rope(),)


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("deepseek_v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, "moe_layer_freq = 2: "),
        ("deepseek_v3", {"first_k_dense_replace": 1, "scoring_func": "softmax"}, "scoring_func = "),
        ("deepseek_v2", {"first_k_dense_replace": 1}, "num_experts_per_tok = None: expected a val"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2: .* must be 6\."),
        ("deepseek_v3", {"head_dim": 100}, r"head_dim = 100: it repeats .* must be 64\."),
        ("deepseek_v2", {"qk_head_dim": 64}, r"qk_head_dim = 64: the parts .* must be 192\."),
        ("deepseek_v3", {"mlp_bias": True}, r"mlp_bias = True: unknown attribute"),
        ("deepseek_v2", {"index_topk": 4}, r"index_topk = 4: unknown attribute"),
    ],
)
def test_what_is_refused(kind, fields, message):
    with pytest.raises(ValueError, match=rf"(?s)here: 1 attributes .*\n  {message}"):
        config_from_fields(kind, **{**DENSE, **fields})


def test_what_experts_would_be_changes_nothing_where_all_layers_are_dense():
    fields = {"n_routed_experts": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    fields |= {"moe_layer_freq": 1, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
    assert config_from_fields("deepseek_v3", **DENSE, **fields) == config_from_fields(
        "deepseek_v3", **DENSE
    )


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("deepseek_v2", {}),
        ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}),
        ("deepseek_v3", RELEASED),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_scaling": SCALED | {"mscale": 0.5, "mscale_all_dim": 0.707}}),
        ("deepseek_v2", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
def test_what_is_written_reads_back(kind, fields):
    config = config_from_fields(kind, **DENSE, **fields)
    family, values = choose_family(config, {})
    assert family.model_type == kind
    assert build_config(family, values, where="") == config


def test_a_scale_that_no_field_says_is_not_written():
    config = config_from_fields("deepseek_v3", **DENSE)
    scaled = replace(config, attention=replace(config.attention, scale=0.1))
    with pytest.raises(ValueError, match=r"(?s)No family .*attention.scale: None instead of 0.1"):
        choose_family(scaled, {})


def test_other_kinds_of_attention_are_written_by_no_family_of_latents():
    config = config_from_fields("llama", num_hidden_layers=1)
    other = replace(config, attention=Decay(num_heads=6, head_dim=2), model_type=None)
    message = "No family can represent .*: its attention is Decay, and none has"
    with pytest.raises(ValueError, match=message):
        choose_family(other, {})
    with pytest.raises(ValueError, match="needs MultiHead; the model has Decay"):
        heads_of(other)


EXPERTS = {"first_k_dense_replace": 1, "num_key_value_heads": None}


def test_experts_of_released_files():
    """DeepSeek-V3's, V2's and V2-Lite's numbers of experts."""
    third = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
    third |= {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    third |= {"moe_intermediate_size": 2048, "moe_layer_freq": 1, "routed_scaling_factor": 2.5}
    third |= {"norm_topk_prob": True, "ep_size": 1, "num_nextn_predict_layers": 1}
    config = config_from_fields("deepseek_v3", **EXPERTS, **third)
    assert [x.feed_forward.is_moe for x in config.layers[:4]] == [False, *[True] * 3]
    moe = config.feed_forward[-1]
    groups = ExpertGroups(num_groups=8, top_k=4)
    assert moe.router == Router(score="sigmoid", selection_bias=True, groups=groups, scale=2.5)
    assert (moe.num_experts, moe.top_k, moe.shared.expert.hidden_dim) == (256, 8, 2048)
    second = {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6}
    second |= {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}
    second |= {"moe_intermediate_size": 1536, "routed_scaling_factor": 16.0}
    *_, moe = config_from_fields("deepseek_v2", **EXPERTS, **second).feed_forward
    groups = ExpertGroups(num_groups=8, top_k=3, score="max")
    assert moe.router == Router(groups=groups, renormalise=False, scale=16.0)
    assert moe.shared.expert.hidden_dim == 3072
    lite = second | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
    *_, moe = config_from_fields("deepseek_v2", **EXPERTS, **lite).feed_forward
    assert moe.router.groups is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_group": 5}, "num_experts must be a multiple of num_groups"),
        ({"num_experts_per_tok": 9}, "at most the 8 experts of the 2 groups that are kept"),
    ],
)
def test_groups_that_do_not_fit_are_refused(fields, message):
    experts = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match=message):
        config_from_fields("deepseek_v3", **EXPERTS, **experts | fields)


@pytest.mark.slow
def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    golden = read_golden("deepseek_v3_moe")
    extra = {
        key.replace("layers.1.", "layers.2."): x
        for key, x in golden.tensors.items()
        if "layers.1." in key
    }
    extra["model.layers.2.enorm.weight"] = np.ones(3, np.float32)  # not all of a module
    tensors = golden.tensors | extra
    config, params = load_pretrained(write_folder(golden._replace(tensors=tensors), tmp_path / "a"))
    plain, same = load_pretrained(write_folder(golden, tmp_path / "b"))
    assert config == plain and jax.tree.all(jax.tree.map(np.array_equal, params, same))
    qwen = read_golden("qwen3")
    folder = write_folder(qwen._replace(tensors=qwen.tensors | extra), tmp_path / "c")
    with pytest.raises(ValueError, match="tensors do not belong to a qwen3"):
        load_pretrained(folder)


def test_a_released_ax_k1_lacks_biases_and_has_a_norm_too_many(tmp_path):
    """Zeros in place of the biases choose the same, and a dense layer has no norm of a sum."""
    golden = read_golden("axk1")
    tensors = golden.tensors
    zeros = {x: 0 * y for x, y in tensors.items() if x.endswith("e_score_correction_bias")}
    assert zeros
    spare = {"model.layers.0.post_mlp_layernorm.weight": np.ones(24, np.float32)}
    lacking = {name: x for name, x in tensors.items() if name not in zeros} | spare
    with_zeros, released = (
        load_pretrained(write_folder(golden._replace(tensors=x), tmp_path / name))
        for name, x in (("zeros", tensors | zeros), ("released", lacking))
    )
    assert released.config == with_zeros.config
    jax.tree.map(np.testing.assert_array_equal, released.params, with_zeros.params)
    save_pretrained(tmp_path / "ours", *released)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "axk1"
    assert {name for name, x in written.items() if not x.any()} == {*zeros}
    fewer = {name: x for name, x in lacking.items() if not name.endswith("gate.weight")}
    folder = write_folder(golden._replace(tensors=fewer), tmp_path / "fewer")
    with pytest.raises(ValueError, match="1 tensors are missing: model.layers.1.mlp.gate.weight"):
        load_pretrained(folder)


@pytest.mark.slow
def test_a_folder_that_lacks_some_of_its_biases_is_damaged(tmp_path):
    """All may be absent, as in the released A.X K1; one of two may not."""
    small = load_pretrained(write_folder(read_golden("axk1"), tmp_path / "one")).config
    dense, experts = (layer.feed_forward for layer in small.layers)
    longer = replace(small, num_layers=3, feed_forward=(dense, experts, experts))
    save_pretrained(tmp_path / "two", longer, random_params(longer))
    weights = tmp_path / "two" / "model.safetensors"
    tensors = load_file(weights)
    first, _ = sorted(name for name in tensors if name.endswith("e_score_correction_bias"))
    save_file({name: x for name, x in tensors.items() if name != first}, weights)
    with pytest.raises(ValueError, match=f"1 tensors are missing: {first}"):
        load_pretrained(tmp_path / "two")


def test_what_mistral_4_says():
    """The part of a head that turns, which rope_parameters have and transformers needs."""
    fields = DENSE | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
    scaling = SCALED | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.4}
    config = config_from_fields("mistral4", **fields, head_dim=10, rope_parameters=scaling)
    assert config.attention.query_scaling == QueryScaling(beta=0.1, original_max_length=4096)
    assert config.attention.positions[0].fraction == 1
    _, values = choose_family(config, {}, "mistral4")
    assert values["rope_parameters"]["partial_rotary_factor"] == 0.4
    with pytest.raises(ValueError, match=r"query_scaling: None instead of QueryScaling"):
        choose_family(config, {}, "deepseek_v3")
    with pytest.raises(ValueError, match="head_dim = 4: the parts of a head add up to it"):
        config_from_fields("mistral4", **fields, head_dim=4, rope_parameters=scaling)
    with pytest.raises(ValueError, match=r"rope_parameters = None: expected an object with llama"):
        config_from_fields("mistral4", **fields)
