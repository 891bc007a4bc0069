"""Gemma 3n: what its files say, what is refused, and keys that layers do not read."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer.config import GLU, AltUp, Laurel, LayerEmbedding, OtherStreams, Rope
from jaxformer.interop import load_pretrained
from jaxformer.interop.save import choose_family
from tests.interop.golden_files import read_golden, write_folder
from tests.interop.numpy_folders import config_from_fields

FEW = {"num_hidden_layers": 12, "num_kv_shared_layers": 5}


def test_fields_and_defaults():
    """Every fifth layer is full, the first ten of more have sparse gates, the last read keys."""
    config = config_from_fields("gemma3n_text", **FEW, rms_norm_eps=1e-5)
    layers = config.layers
    assert [layer.window for layer in layers] == [512] * 4 + [None] + [512] * 4 + [None, 512, 512]
    assert {(x.window, x.rope) for x in layers} == {(512, Rope()), (None, Rope(base=1e6))}
    assert [layer.attention.cross_layer_kv for layer in layers] == [False] * 7 + [True] * 5
    sparse, dense = (
        GLU(hidden_dim=10, activation="gelu_tanh", sparsity=share) for share in (0.95, None)
    )
    assert [layer.feed_forward for layer in layers] == [sparse] * 10 + [dense] * 2
    assert config.residual == AltUp(
        branches=Laurel(norm_eps=1e-5), layer_embedding=OtherStreams(), norm_eps=1e-5
    )
    assert config.layer_embedding == LayerEmbedding(dim=256, vocab_size=262_144)
    assert (config.head.softcap, config.embedding.scale) == (30.0, 12**0.5)


PROBLEMS = {
    "widths": ({"intermediate_size": [3, 4]}, r"intermediate_size = .*a number for each of 12"),
    "shares": ({"activation_sparsity_pattern": [0.5]}, "expected a number for each of 12 layers"),
    "a share": ({"activation_sparsity_pattern": [1.0] + [0.0] * 11}, "numbers from 0 to less"),
    "streams": ({"altup_num_inputs": 9}, "altup_num_inputs = 9: expected at most 8"),
    "another stream": ({"altup_active_idx": 1}, "altup_active_idx = 1: not supported"),
    "no scale": ({"altup_correct_scale": False}, "altup_correct_scale = False: not supported"),
    "all read": ({"num_kv_shared_layers": 12}, "expected 0 or more, and fewer than the 12"),
}


@pytest.mark.parametrize("fields, message", PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_fields("gemma3n_text", **FEW | fields)


def test_keys_of_layers_that_read_others_are_left_out(tmp_path):
    """Released files have them, and transformers leaves them out."""
    folder = write_folder(read_golden("gemma3n"), tmp_path / "gemma3n")
    config, params = load_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        source = tensors[f"model.layers.3.self_attn.{name}.weight"]
        tensors[f"model.layers.4.self_attn.{name}.weight"] = source
    save_file(tensors, folder / "model.safetensors")
    again, same = load_pretrained(folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_a_model_without_a_cap_is_not_written():
    """Transformers' class needs a number, and reads a file without one as 30."""
    config = config_from_fields("gemma3n_text", **FEW)
    assert choose_family(config, {})[0].model_type == "gemma3n_text"
    plain = replace(config, head=replace(config.head, softcap=None))
    with pytest.raises(ValueError, match="head.softcap: 30.0 instead of None"):
        choose_family(plain, {})
