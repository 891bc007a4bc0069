"""Attention kinds side by side: their sum, their caches, costs, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import config as c
from jaxformer import costs, inspect
from jaxformer.generation import generate
from jaxformer.interop.config_comparison import canonical
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.attention.kinds import ATTENTION_MODULES, HybridHeads
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.parallel import check_divisible
from tests.small_models import BASE, LLAMA_VARIANTS, jitted_forward, random_params, random_tree

CONFIG = LLAMA_VARIANTS["hybrid heads"]
HEADS = BASE.attention
MAMBA = c.LinearAttention(num_heads=4, num_key_heads=2, key_dim=3, value_dim=5)
UNEVEN = c.HybridHeads(kinds=(HEADS, c.Decay(num_heads=5, head_dim=4)))
BOTH = replace(BASE, attention=c.HybridHeads(kinds=(MAMBA, HEADS)))


@pytest.mark.slow
def test_outputs_are_summed():
    x = np.float32(np.random.default_rng(0).normal(size=(2, 5, BASE.model_dim)))
    token_inputs = c.MixerInputs(None, None, None)
    mask = np.tri(5, dtype=bool)
    module = HybridHeads(BOTH, BOTH.attention, RuntimeConfig())
    inputs = token_inputs, AttentionInputs(mask)
    params = random_tree(jax.eval_shape(module.init, jax.random.key(0), x, inputs)["params"])
    both, _ = jax.jit(module.apply)({"params": params}, x, inputs)

    def alone(kind, name, inputs):
        part = ATTENTION_MODULES[type(kind)](BASE, kind, RuntimeConfig())
        return jax.jit(part.apply)({"params": params[name]}, x, inputs)[0]

    expected = alone(MAMBA, "kind_0", inputs[0]) + alone(HEADS, "kind_1", inputs[1])
    np.testing.assert_allclose(both, expected, atol=1e-6)


@pytest.mark.slow
def test_rows_of_different_lengths_and_chunks_of_prompts():
    """Each row generates what it does alone."""
    params, rows = random_params(CONFIG), [[3, 1], [9, 2, 6, 5, 30], [7, 8, 9]]
    together = generate(CONFIG, params, rows, max_new_tokens=4)
    in_chunks = generate(CONFIG, params, rows, max_new_tokens=4, prefill_chunk=2)
    np.testing.assert_array_equal(together, in_chunks)
    for row, tokens in zip(together, rows, strict=True):
        alone = generate(CONFIG, params, jnp.asarray(tokens), max_new_tokens=4)
        np.testing.assert_array_equal(row[: len(tokens) + 4], alone)


@pytest.mark.slow
def test_documents_of_a_row_are_documents_alone():
    params, run = random_params(CONFIG), jitted_forward(CONFIG)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 12), np.int32)
    segments, positions = np.repeat([[1, 2]], 6, axis=1), np.r_[0:6, 0:6][None]
    packed = run(params, tokens, segments=segments, positions=positions)
    alone = run(params, tokens.reshape(2, 6))
    np.testing.assert_allclose(packed, alone.reshape(packed.shape), atol=2e-5)


@pytest.mark.slow
def test_costs_are_those_of_the_kinds():
    apart = [replace(BOTH, attention=kind) for kind in BOTH.attention.kinds]
    rest = replace(BOTH, attention=c.NoAttention())

    def excess(count):
        return sum(map(count, apart)) - count(rest) - count(BOTH)

    norms = BOTH.num_layers * BOTH.model_dim  # before the branch, of which there is only one
    assert excess(lambda config: costs.forward_flops(config, 7)) == 0
    assert excess(lambda config: costs.activation_bytes(config, 2, 7)) == 0
    assert excess(costs.num_parameters) == norms
    assert excess(lambda config: costs.cache_bytes(config, 7)) == 0


def test_positions_and_windows_are_those_of_the_kind_with_slots():
    heads = replace(HEADS, positions=(c.Rope(), None), windows=(3, None, None))
    config = replace(BASE, attention=c.HybridHeads(kinds=(MAMBA, heads)))
    config = replace(config, num_layers=6)
    layers = config.layers
    assert [layer.window for layer in layers] == [3, None, None] * 2
    assert [layer.positions for layer in layers] == [c.Rope(), None] * 3
    scaling = c.LinearScaling(factor=2.0)
    assert config.with_rope_scaling(scaling).layers[2].rope == c.Rope(scaling=scaling)
    states = c.HybridHeads(kinds=(MAMBA, c.ShortConvolution(num_heads=2, head_dim=3)))
    assert (states.main.windows, states.main.has_scores) == ((1,), False)


def test_equal_models_have_one_canonical_form():
    long = replace(HEADS, windows=(None, None), scale=HEADS.head_dim**-0.5)
    other = replace(BASE, attention=c.HybridHeads(kinds=(MAMBA, long)))
    assert other != BOTH and canonical(other) == canonical(BOTH)


@pytest.mark.slow
def test_maps_are_of_the_scores_and_memories_of_the_state():
    params, tokens = random_params(BOTH), np.arange(10).reshape(2, 5)
    maps = inspect.attention_maps(BOTH, params, tokens).decoder
    assert maps.shape == (3, 2, 4, 5, 5)
    np.testing.assert_allclose(np.sum(maps, axis=-1), 1, atol=1e-6)
    memory = inspect.state_memory(BOTH, params, tokens)
    assert memory.layers == (0, 1, 2) and memory.decay.shape == (3, 2, 5, 4)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: c.HybridHeads(kinds=(MAMBA,)), "kinds must be two or more; got LinearAttention"),
        (
            lambda: c.HybridHeads(kinds=(HEADS, MAMBA, HEADS)),
            "cache slot per token; got 2 of MultiHead, LinearAttention, MultiHead",
        ),
        (
            lambda: replace(BOTH, dropout=c.Dropout(attention=0.1)),
            "LinearAttention has no attention weights, so dropout.attention must be 0; got 0.1",
        ),
        (
            lambda: replace(BOTH, topology=c.Encoder()),
            "LinearAttention is causal, so it needs a Decoder",
        ),
        (lambda: BOTH.with_positions(c.Rope()), "HybridHeads has no positions to replace"),
        (
            lambda: check_divisible(replace(BASE, attention=UNEVEN), dict(tensor=2)),
            "num_heads 5 is not divisible by tensor 2",
        ),
    ],
)
def test_options_that_cannot_be(build, message):
    with pytest.raises(ValueError, match=message):
        build()
