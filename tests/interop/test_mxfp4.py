"""Folders whose experts are stored in MXFP4 are read as the bfloat16 values that they stand for."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxformer import config as c
from jaxformer import zoo
from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.interop.mxfp4 import dequantize
from jaxformer.layers.layouts import unstack_layers
from tests.small_models import random_params

FP4 = "0 0.5 1 1.5 2 3 4 6 -0.0 -0.5 -1 -1.5 -2 -3 -4 -6".split()
MODULES = ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]


def by_hand(blocks, scales):
    """Value by value."""
    E, F, groups, _ = blocks.shape
    kernels = np.empty((E, 32 * groups, F))
    for e, f, g, i in np.ndindex(E, F, groups, 32):
        byte = int(blocks[e, f, g, i // 2])
        bits = byte // 16 if i % 2 else byte % 16
        kernels[e, 32 * g + i, f] = float(FP4[bits]) * 2.0 ** (int(scales[e, f, g]) - 127)
    return kernels


def draw(rng, experts, outputs, inputs):
    shape = experts, outputs, inputs // 32
    return rng.integers(0, 256, (*shape, 16), np.uint8), rng.integers(110, 130, shape, np.uint8)


def test_values():
    blocks, scales = draw(np.random.default_rng(0), 2, 3, 64)
    kernels = dequantize(blocks, scales)
    assert kernels.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(kernels.astype(np.float64), by_hand(blocks, scales))
    too_large = dequantize(np.full((1, 1, 1, 16), 0xF7, np.uint8), np.uint8([[[254]]]))
    assert np.all(np.isinf(too_large))
    for byte in (0x00, 0x11):  # 0 and 1/2, whose exponents have room for one more
        no_scale = dequantize(np.full((1, 1, 1, 16), byte, np.uint8), np.uint8([[[255]]]))
        assert np.all(np.isnan(no_scale))


@pytest.fixture
def quantized(tmp_path):
    """A folder as it was released: the experts' kernels are bytes."""
    config = zoo.get("gpt-oss-20b").tiny()
    experts = replace(config.feed_forward[0], expert=c.ClampedGEGLU(hidden_dim=32, limit=7.0))
    config = replace(config, model_dim=64, feed_forward=(experts,), model_type="gpt_oss")
    save_pretrained(tmp_path, config, random_params(config))
    path, rng, expected = tmp_path / "model.safetensors", np.random.default_rng(1), {}
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks, scales = draw(rng, count, outputs, inputs)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = by_hand(blocks, scales)
    save_file(tensors, path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": MODULES}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path, tensors, expected


@pytest.mark.slow
def test_a_folder(quantized):
    folder, _, expected = quantized
    config, params = load_pretrained(folder)
    layers = unstack_layers(params["decoder"])
    assert len(layers) == config.num_layers == len(expected) // 2
    for i, layer in enumerate(layers):
        experts = layer["feed_forward"]["experts"]
        gate_up = expected[f"model.layers.{i}.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(experts["gate"]["kernel"], gate_up[..., 0::2])
        np.testing.assert_array_equal(experts["up"]["kernel"], gate_up[..., 1::2])
        down = expected[f"model.layers.{i}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(experts["down"]["kernel"], down)


def test_blocks_and_scales_that_do_not_fit(quantized):
    folder, tensors, _ = quantized
    name = "model.layers.0.mlp.experts.down_proj"
    scales = tensors[f"{name}_scales"]
    save_file(tensors | {f"{name}_scales": scales[:-1].copy()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_blocks must be \[experts, .* got \[\d+, 64, "):
        load_pretrained(folder)
    del tensors[f"{name}_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 tensors are missing: {name}"):
        load_pretrained(folder)


def test_a_scale_that_is_no_number(quantized):
    folder, tensors, _ = quantized
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"][0, 1, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} in .*: 32 of \d+ values are not finite"):
        load_pretrained(folder)
