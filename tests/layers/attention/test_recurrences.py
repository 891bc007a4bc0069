"""Generation, packed rows and meshes with recurrences: of RG-LRU, of Mamba, of RWKV."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import RGLRU, ChannelMixing, NoFeedForward, RMSNorm, SelectiveScan, TimeMixing
from jaxformer.data import Batch
from jaxformer.generation import generate
from jaxformer.layers import empty_cache
from jaxformer.parallel import MeshConfig, abstract_parameters, make_mesh, put_batch, shardings
from jaxformer.training.gradient import make_value_and_grad
from tests.small_models import BASE, jitted_forward, random_params

ALL_BIASES = ("in", "convolution", "out")
MAMBA = SelectiveScan(width=12, step_rank=3, state_dim=5, biases=ALL_BIASES)
MIXERS = {
    "griffin": RGLRU(num_heads=4, head_dim=3),
    "time mixing": TimeMixing(width=12),
    "channel mixing": ChannelMixing(hidden_dim=20),
    "mamba": MAMBA,
    "jamba": replace(MAMBA, norm=RMSNorm(eps=1e-3), biases=()),
    "jamba with biases": replace(MAMBA, norm=RMSNorm(eps=1e-3)),
}


def beside_attention(name):
    """A model with attention in every second layer."""
    return replace(BASE, attention=(MIXERS[name], BASE.attention), num_layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["griffin", "jamba", "time mixing", "channel mixing"])
def test_rows_of_different_lengths_and_chunks_of_prompts(name):
    """Each row generates what it does alone."""
    config = beside_attention(name)
    params, rows = random_params(config), [[3, 1], [9, 2, 6, 5, 30], [7, 8, 9]]
    together = generate(config, params, rows, max_new_tokens=4)
    in_chunks = generate(config, params, rows, max_new_tokens=4, prefill_chunk=2)
    np.testing.assert_array_equal(together, in_chunks)
    for row, tokens in zip(together, rows, strict=True):
        alone = generate(config, params, jnp.asarray(tokens), max_new_tokens=4)
        np.testing.assert_array_equal(row[: len(tokens) + 4], alone)


@pytest.mark.parametrize("name", ["griffin", "mamba", "time mixing", "channel mixing"])
@pytest.mark.slow(but=["griffin"])
def test_a_text_in_two_parts_is_the_whole_at_every_split(name):
    config = replace(BASE, attention=MIXERS[name], num_layers=1)
    params, run = random_params(config), jitted_forward(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 5), np.int32)
    whole = run(params, tokens)
    for split in range(1, 5):
        first, cache = run(params, tokens[:, :split], cache=empty_cache(config, (1,), 5))
        rest, _ = run(params, tokens[:, split:], cache=cache)
        np.testing.assert_allclose(np.concatenate([first, rest], axis=1), whole, atol=2e-5)


@pytest.mark.parametrize("name", ["griffin", "jamba", "time mixing", "channel mixing"])
@pytest.mark.slow
def test_documents_of_a_row_are_documents_alone(name):
    config = beside_attention(name)
    params, run = random_params(config), jitted_forward(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, 12), np.int32)
    segments, positions = np.repeat([[1, 2]], [5, 7], axis=1), np.r_[0:5, 0:7][None]
    packed = run(params, tokens, segments=segments, positions=positions)
    alone = [run(params, tokens[:, part]) for part in (slice(0, 5), slice(5, 12))]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["griffin", "jamba with biases", "time mixing", "channel mixing"])
def test_heads_or_features_that_devices_share(name):
    """Devices with some of the heads or features equal one device, in every gradient."""
    sizes = dict(num_layers=1, vocab_size=12, feed_forward=(NoFeedForward(),))
    config = replace(BASE, attention=MIXERS[name], **sizes)
    params, tokens = random_params(config), np.arange(16, dtype=np.int32).reshape(2, 8) % 12
    positions = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    batch = Batch(tokens, tokens, positions, np.ones_like(tokens), tokens != 7)

    def gradients(**sizes):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod([*sizes.values()]))])
        program = jax.jit(make_value_and_grad(Transformer(config), mesh))
        local = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
        return jax.device_get(program(local, {}, jnp.int32(0), put_batch(batch, mesh, 2))[1])

    expected = gradients(tensor=1)
    layer = expected["decoder"]["layers"]["layer_0"]["attention"]
    assert min(np.abs(x).max() for x in jax.tree.leaves(layer)) > 0
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for devices in (dict(tensor=4), dict(tensor=2, context=2, fsdp=2)):
        jax.tree.map(close, gradients(**devices), expected)
