"""What stands where attention stands, from a person's own file: here this one."""

import shlex
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import Transformer, costs, generate, inspect, options, save_pretrained, zoo
from jaxformer import functional as F
from jaxformer.config import Encoder, Rope, TransformerConfig, from_json, to_json
from jaxformer.generation import Beam
from jaxformer.layers import empty_cache
from jaxformer.parallel import MeshConfig, check_divisible, make_mesh, parameter_metadata
from jaxformer.run import pretraining
from jaxformer.run.command_line import parse_run
from jaxformer.run.program import print_run
from tests.small_models import jitted_forward, random_params
from tests.test_custom_options import after_a_step, texts

LLAMA = zoo.get("llama-2-7b").tiny()


@dataclass(frozen=True, kw_only=True)
class GatedMemory(options.Mixer):
    """Values that fade at a rate of their head, of which each token opens as much as it asks."""

    num_heads: int = 4
    head_dim: int = 6

    def parameters(self, model_dim):
        into = (model_dim, self.num_heads, self.head_dim)
        return {
            "value": options.Parameter(into, "model -> heads features"),
            "gate": options.Parameter(into, "model -> heads features"),
            "fading": options.Parameter((self.num_heads,), "heads", 2.0),
            "out": options.Parameter((*into[1:], model_dim), "heads features -> model"),
        }

    def __call__(self, params, x, inputs, cache):
        value, gate = (jnp.einsum("...d,dnh->...nh", x, params[n]) for n in ("value", "gate"))
        result = F.linear_recurrence(
            value,
            jax.nn.sigmoid(params["fading"]),
            initial_state=cache,
            segments=inputs.segments,
            valid=inputs.valid,
        )
        seen = result.output.astype(x.dtype) * jax.nn.sigmoid(gate)
        y = jnp.einsum("...nh,nhd->...d", seen, params["out"])
        return y, None if cache is None else result.state

    def empty_cache(self, batch, room, dtype):
        return jnp.zeros((*batch, self.num_heads, self.head_dim))

    def flops(self, model_dim, length):
        return 2 * length * 3 * model_dim * self.num_heads * self.head_dim

    def small(self):
        return replace(self, num_heads=4, head_dim=6)


@dataclass(frozen=True, kw_only=True)
class OneForAll(options.Mixer):
    """The mean of the text so far, through one matrix that no device shares out by heads.

    It keeps each token in a place of its own.
    """

    num_heads: int = 1
    width: int = 64
    windows = (None,)

    def parameters(self, model_dim):
        return {"kernel": options.Parameter((model_dim, model_dim), "model -> features")}

    def __call__(self, params, x, inputs, cache):
        same = inputs.segments[..., :, None] == inputs.segments[..., None, :]
        seen, features = jnp.tril(same), x
        if cache is not None:
            cache = F.write_slots(cache, x[..., None, :, :], inputs.positions[..., None, :])
            features = cache[..., 0, :, :]
            seen = F.causal_mask(inputs.positions, jnp.arange(features.shape[-2])[None])
        weights = seen.astype(x.dtype)
        mean = weights @ features / jnp.sum(weights, axis=-1, keepdims=True)
        return mean @ params["kernel"], cache

    def empty_cache(self, batch, room, dtype):
        return jnp.zeros((*batch, 1, room, self.width), dtype)


MEMORY = replace(LLAMA, attention=GatedMemory(), num_layers=3)
SIDE_BY_SIDE = replace(MEMORY, block="parallel")
UNSHARED = replace(SIDE_BY_SIDE, attention=OneForAll())
ONE_NORM = replace(UNSHARED, block="parallel_shared_norm")
CONFIGS = {
    "serial": MEMORY,
    "parallel": SIDE_BY_SIDE,
    "beside heads": replace(MEMORY, attention=(GatedMemory(), LLAMA.attention)),
    "of no heads": replace(UNSHARED, block="serial"),
    "of no heads, parallel": UNSHARED,
    "of no heads, one norm": ONE_NORM,
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.slow
def test_it_trains_on_eight_devices_as_on_one(config):
    """In packed rows; kernels shared out by width and by heads."""
    actual = after_a_step(config, tuple(dict(data=2, fsdp=2, tensor=2).items()))
    expected = after_a_step(config, (("data", 1),))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), actual[1], expected[1])


@pytest.mark.parametrize("name", ["serial", "beside heads"])
@pytest.mark.slow
def test_a_document_does_not_see_the_one_before_it(name):
    batch, run, params = texts(), jitted_forward(CONFIGS[name]), random_params(CONFIGS[name])
    options = {"positions": batch.positions[:1], "segments": batch.segments[:1]}
    logits = run(params, batch.tokens[:1], **options)
    second = batch.segments[0] == 2
    alone = run(params, batch.tokens[:1, second])
    np.testing.assert_allclose(logits[:, second], alone, atol=2e-5)


@pytest.mark.parametrize("config", [MEMORY, UNSHARED], ids=["a state", "places"])
@pytest.mark.slow
def test_with_a_cache_it_is_that_of_the_whole_text(config):
    tokens, params, run = texts().tokens[:2, :9], random_params(config), jitted_forward(config)
    cache, parts = empty_cache(config, (2,), 9), []
    for part in np.split(tokens, [4, 5, 6, 8], axis=1):
        logits, cache = run(params, part, cache=cache)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), run(params, tokens), atol=2e-5)
    if config is UNSHARED:
        with pytest.raises(ValueError, match="holds 9 tokens; with the new ones there are 10"):
            run(params, texts().tokens[:2, :10], cache=empty_cache(config, (2,), 9))


@pytest.mark.slow
def test_it_generates_on_a_mesh_what_one_device_does():
    prompts, params = [[1, 2, 3], [4, 5]], random_params(MEMORY)
    alone = generate(MEMORY, params, prompts, max_new_tokens=5)
    logits = jitted_forward(MEMORY)(params, alone[1:, :6])  # of the prompt that was padded
    np.testing.assert_array_equal(np.argmax(logits[0, 1:], axis=-1), alone[1, 2:7])
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    together = generate(MEMORY, params, prompts, max_new_tokens=5, mesh=mesh)
    np.testing.assert_array_equal(together, alone)
    searched = generate(MEMORY, params, [[1, 2, 3]], max_new_tokens=4, sampler=Beam(num_beams=2))
    assert searched.shape == (1, 7)


def test_it_is_counted_and_its_matrices_are_known():
    assert costs.num_parameters(MEMORY) == sum(
        x.size for x in jax.tree.leaves(random_params(MEMORY))
    )
    D, width = MEMORY.model_dim, 24
    without = costs.forward_flops(MEMORY, 8) - 3 * 2 * 8 * 3 * D * width
    assert without == 2 * 8 * D * MEMORY.vocab_size + 3 * 2 * 8 * 3 * D * 88
    assert costs.cache_bytes(MEMORY, 100, batch=2) == 2 * 3 * width * 4  # a state in float32
    layer = parameter_metadata(MEMORY)["decoder"]["layers"]["layer_0"]["attention"]
    assert {name: x.role for name, x in layer.items()} == {
        "value": "kernel", "gate": "kernel", "out": "kernel", "fading": "vector",
    }  # fmt: skip
    assert layer["out"].partition_spec({"tensor": 2, "fsdp": 2}) == P(None, "tensor", None, "fsdp")
    assert isinstance(MEMORY.tiny().attention, GatedMemory)


def test_it_prints_is_read_back_and_is_a_flag():
    assert from_json(TransformerConfig, to_json(MEMORY)) == MEMORY
    flags = ["--model.attention", "GatedMemory(head_dim=8)", "--model.attention.num-heads", "2"]
    run = parse_run(pretraining.RUNS, "", flags)
    assert run.model.attention == GatedMemory(num_heads=2, head_dim=8)
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run
    kinds = "(GatedMemory(), MultiHead(num_heads=4, num_kv_heads=2, head_dim=6))"
    run = parse_run(pretraining.RUNS, "", ["--model.attention", f"{kinds}"])
    assert [type(kind).__name__ for kind in run.model.attention] == ["GatedMemory", "MultiHead"]
    again = shlex.split(print_run(run, pretraining.RUNS))[2:]
    assert parse_run(pretraining.RUNS, "", again) == run


@pytest.mark.slow
def test_what_it_leaves_out_is_named(tmp_path, capsys):
    @dataclass(frozen=True, kw_only=True)
    class Mute(options.Mixer):
        num_heads: int = 4

    config = replace(LLAMA, attention=Mute())
    for call, method in (
        (lambda: Transformer(config).init(jax.random.key(0), jnp.arange(5)), "parameters"),
        (lambda: empty_cache(config, (1,), 5), "empty_cache"),
        (lambda: costs.forward_flops(config, 8), "flops"),
    ):
        with pytest.raises(NotImplementedError, match=rf"Mute has no {method}\(...\), which"):
            call()


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="GatedMemory is causal.*got Encoder"):
        replace(MEMORY, topology=Encoder())
    with pytest.raises(ValueError, match="GatedMemory has no positions to replace; got .Rope"):
        MEMORY.with_positions(Rope())
    with pytest.raises(ValueError, match="context 2, but GatedMemory is recurrent"):
        check_divisible(MEMORY, {"context": 2})
    with pytest.raises(ValueError, match="its attention is GatedMemory, and none has"):
        save_pretrained(tmp_path / "mine", MEMORY, random_params(MEMORY))
    with pytest.raises(ValueError, match="GatedMemory computes no attention weights"):
        inspect.attention_maps(MEMORY, random_params(MEMORY), jnp.asarray([[1, 2]]))
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by tensor 8"):
        check_divisible(MEMORY, {"tensor": 8})
