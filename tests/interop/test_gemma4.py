"""Gemma 4: two ways to say which heads full layers have, and what is refused."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.config import (
    GLU,
    LayerEmbedding,
    MoE,
    MultiHead,
    PRope,
    QKNorm,
    RMSNorm,
    Rope,
    Router,
    SharedExpert,
    SharedKV,
)
from jaxformer.interop import load_pretrained
from jaxformer.interop.load import find_family
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden, write_folder
from tests.interop.numpy_folders import SIZES, config_from_fields

PLAIN = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 12}
SHARED = PLAIN | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def test_fields_and_defaults():
    """Without `layer_types` every sixth layer is full, with heads of 512 and p-RoPE."""
    config = config_from_fields("gemma4_text", head_dim=6, **SHARED, rms_norm_eps=1e-5)
    norm = RMSNorm(eps=1e-5)
    common = dict(
        num_heads=6,
        scale=1.0,
        qk_norm=QKNorm(norm=norm),
        value_norm=RMSNorm(eps=1e-5, parameters="none"),
    )
    rope = Rope(base=1e6, scaling=PRope(fraction=0.25))
    local = MultiHead(num_kv_heads=2, head_dim=6, windows=(512,), **common)
    full = SharedKV(num_kv_heads=1, head_dim=512, positions=(rope,), **common)
    assert [layer.attention for layer in config.layers] == ([local] * 5 + [full]) * 2
    assert {layer.feed_forward for layer in config.layers} == {
        GLU(hidden_dim=10, activation="gelu_tanh")
    }
    assert (config.norm, config.norm_placement, config.layer_scalar) == (norm, "sandwich", True)
    fields = SHARED | {"attention_k_eq_v": False, "rms_norm_eps": 1e-5}
    apart = config_from_fields("gemma4_text", **fields)
    expected = MultiHead(num_kv_heads=2, head_dim=512, positions=(rope,), **common)
    assert apart.layers[5].attention == expected


def test_experts_beside_the_dense_network():
    fields = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
    config = config_from_fields("gemma4_text", **SHARED, **fields, moe_intermediate_size=3)
    dense = GLU(hidden_dim=10, activation="gelu_tanh")
    experts = MoE(
        expert=GLU(hidden_dim=3, activation="gelu_tanh"),
        num_experts=5,
        router=Router(norm=config.norm, expert_scale=True),
        shared=SharedExpert(expert=dense),
        norm=config.norm,
    )
    assert config.feed_forward == (experts,)
    fields = dict.fromkeys(fields, None) | {"enable_moe_block": False, "num_experts": 5}
    assert config_from_fields("gemma4_text", **SHARED, **fields).feed_forward == (dense,)


def test_heads_by_layer_are_those_of_released_fields():
    """Transformers 5.24 writes an entry for each full layer, its number as long as the last's."""
    heads = {"head_dim": 20, "num_key_value_heads": 1}
    released = config_from_fields("gemma4_text", head_dim=6, global_head_dim=20, **SHARED)
    by_layer = PLAIN | {"attention_k_eq_v": True, "head_dim": 6}
    for numbers in (("05", "11"), ("5", "11")):
        entries = dict.fromkeys(numbers, heads)
        assert config_from_fields("gemma4_text", **by_layer, per_layer_config=entries) == released
    for entries, message in (
        ({"05": heads, "11": heads | {"head_dim": 8}}, "full layers must have the same heads"),
        ({"05": heads, "11": heads, "04": heads}, r"per_layer_config\.04 = .*unknown attribute"),
        ({"05": heads | {"scale": 2}, "11": heads}, r"per_layer_config\.05\.scale = 2: unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_fields("gemma4_text", **by_layer, per_layer_config=entries)


def test_the_last_layer_is_full_as_in_transformers():
    kinds = ["sliding_attention"] * 12
    config = config_from_fields("gemma4_text", layer_types=kinds, **SHARED)
    assert [config.layers[i].window for i in range(12)] == [512] * 11 + [None]


def test_a_model_without_layers():
    for more in ({}, {"per_layer_config": {"0": {"head_dim": 4}}}):
        with pytest.raises(ValueError, match="num_layers must be positive; got 0"):
            config_from_fields("gemma4_text", **SHARED | {"num_hidden_layers": 0} | more)


EDGE = {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "hidden_size_per_layer_input": 5}


def test_the_last_layers_read_keys_of_earlier_ones():
    fields = EDGE | {"vocab_size_per_layer_input": 13, "attention_bias": True}
    config = config_from_fields("gemma4_text", **fields, use_double_wide_mlp=True)
    assert config.layer_embedding == LayerEmbedding(dim=5)
    layers = [config.layers[i] for i in range(12)]
    assert [layer.attention.cross_layer_kv for layer in layers] == [False] * 6 + [True] * 6
    assert [layer.feed_forward.hidden_dim for layer in layers] == [10] * 6 + [20] * 6
    assert [layer.window for layer in layers] == ([512] * 5 + [None]) * 2
    assert layers[5].attention.biases == ("query", "key", "value", "out")
    assert layers[11].attention.biases == ("query", "out")
    assert config.segments("decoder") == (6, 6, 1, 0)


EDGE_PROBLEMS = {
    "all layers": ({"num_kv_shared_layers": 12}, "expected 0 or more, and fewer than the 12"),
    "a negative number": ({"num_kv_shared_layers": -1}, "expected 0 or more"),
    "no earlier layer": ({"num_kv_shared_layers": 7}, "each of these layers needs an earlier one"),
    "one projection": ({"attention_k_eq_v": True}, "attention_k_eq_v, one projection for key"),
    "another vocabulary": ({"vocab_size_per_layer_input": 12}, "must be vocab_size, which is 13"),
}


@pytest.mark.parametrize("fields, message", EDGE_PROBLEMS.values(), ids=EDGE_PROBLEMS)
def test_layers_without_a_source_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"1 attributes are not supported:\n  .*{message}"):
        config_from_fields("gemma4_text", **EDGE | {"vocab_size_per_layer_input": 13} | fields)


def test_full_layers_without_an_entry_have_the_common_heads():
    """transformers writes entries of what differs only, and so an empty object if nothing does."""
    config = config_from_fields("gemma4_text", **PLAIN, head_dim=8, per_layer_config={})
    assert {config.layers[i].attention.head_dim for i in range(12)} == {8}


def test_a_model_without_windows_is_written_with_one():
    """transformers requires the field, though no layer has a window."""
    full = ["full_attention"] * 12
    config = config_from_fields("gemma4_text", **PLAIN, layer_types=full)
    _, fields = choose_family(config, {})
    assert (fields["sliding_window"], fields["layer_types"]) == (512, full)


def test_attention_in_both_directions_is_refused():
    with pytest.raises(ValueError, match="use_bidirectional_attention = 'all': not supported"):
        config_from_fields("gemma4_text", **SHARED, use_bidirectional_attention="all")


def test_the_text_model_of_a_folder_with_images(tmp_path):
    golden = read_golden("gemma4")
    config, params = load_pretrained(write_folder(golden, tmp_path / "text"))
    tensors = {
        name.replace("model.", "model.language_model.", 1): x for name, x in golden.tensors.items()
    }
    for name in ("vision_tower.x", "embed_vision.y", "audio_tower.z", "embed_audio.w"):
        tensors[f"model.{name}.weight"] = np.zeros(3, np.float32)
    values = {"model_type": "gemma4", "text_config": golden.config, "vision_config": {"a": 4}}
    values |= {"eoa_token_index": 9, "image_token_id": 8, "audio_config": None}
    both = golden._replace(config=values, tensors=tensors)
    again = load_pretrained(write_folder(both, tmp_path / "images"))
    assert again.config == config and again.config.model_type == "gemma4_text"
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("given", [{}, None])
def test_rope_parameters_without_one_of_two_kinds(kind, given):
    """Which transformers does not read either."""
    both = {name: {"rope_theta": 9.0} for name in ("full_attention", "sliding_attention")}
    with pytest.raises(ValueError, match=rf"rope_parameters\.{kind} = {given}: expected an object"):
        config_from_fields("gemma4_text", **SHARED, rope_parameters=both | {kind: given})


def test_a_model_without_width():
    with pytest.raises(ValueError, match="must be positive; got -1. The file has hidden_size = -1"):
        config_from_fields("gemma4_text", **SHARED | {"hidden_size": -1})


def test_a_length_that_is_none():
    with pytest.raises(
        ValueError, match=r": 1 attributes .*\n  max_position_embeddings = -1: expected 1 or more\."
    ):
        config_from_fields("gemma4_text", **SHARED, max_position_embeddings=-1)


def test_fields_of_the_text_model_outside_text_config():
    """Which transformers does not read either."""
    values = {"model_type": "gemma4", **SIZES, **SHARED}
    with pytest.raises(ValueError, match="it needs text_config, the object that describes its te"):
        find_family(values, Path("here"))
