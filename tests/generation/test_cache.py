"""How a cache is read and written.

That token by token it changes nothing is shown in tests/layers/test_every_option.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer import functional as F
from jaxformer.config import (
    GLU,
    Alibi,
    BlockSparse,
    Embedding,
    Encoder,
    EncoderDecoder,
    Latent,
    Learned,
    Llama3Scaling,
    MoE,
    Rope,
    SharedKV,
    T5Bias,
    TransformerXL,
)
from jaxformer.generation.steps import decode_step, prefill
from jaxformer.layers import empty_cache, take_rows
from tests.small_models import BASE, jitted_forward, random_params

LENGTH, WINDOW = 7, 3
TOKENS = np.random.default_rng(1).integers(0, BASE.vocab_size, (2, LENGTH))
SHARED = SharedKV(num_heads=4, head_dim=4, windows=(WINDOW, None))
LATENT = Latent(
    num_heads=4, latent_dim=5, nope_dim=3, rope_dim=4, value_dim=6, windows=(WINDOW, None)
)


def of(*, attention=None, **changes):
    """`BASE` with another attention, or with changes to its own."""
    return replace(BASE, attention=attention or replace(BASE.attention, **changes))


def check(config, parts, tokens=TOKENS, room=LENGTH, **first):
    """A text read in parts of these lengths has the logits of the whole."""
    params, run = random_params(config), jitted_forward(config)
    whole = np.asarray(run(params, tokens, **first))
    cache = empty_cache(config, tokens.shape[:-1], room)
    for end, length in zip(np.cumsum(parts), parts, strict=True):
        part = slice(end - length, end)
        logits, cache = run(params, tokens[..., part], cache=cache, **first)
        bound = 5e-6 * np.abs(whole).max()
        np.testing.assert_allclose(logits, whole[..., part, :], atol=bound, err_msg=f"{end}")
        first = {}


ALONE = (("k",), ("v",), ("o",), ("q", "v"))
TURNED = tuple(
    Rope(targets=targets, pairing=pairing)
    for targets, pairing in zip(ALONE, ("halves", "neighbours") * 2, strict=True)
)
IN_PARTS = {
    "ring": of(windows=(WINDOW, None), positions=(Rope(scaling=Llama3Scaling(factor=8.0)),)),
    "two rings": of(windows=(2, WINDOW), positions=(TransformerXL(),)),
    "no ring": of(windows=(LENGTH + 4,), positions=(Alibi(),)),
    "shared": of(attention=SHARED),
    "latent": of(attention=LATENT),
    "experts": replace(
        of(windows=(WINDOW, None)),
        feed_forward=(MoE(expert=GLU(hidden_dim=5), num_experts=4), GLU(hidden_dim=7)),
    ),
    "rotary targets": replace(of(positions=TURNED), num_layers=4),
    "shared rotary targets": replace(of(attention=replace(SHARED, positions=TURNED)), num_layers=4),
}
SELDOM = {"experts", "rotary targets"}  # the first remember nothing, the others are as if shared


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else ())
        for name in IN_PARTS
    ],
)
@pytest.mark.slow
def test_a_text_may_be_read_in_parts(name):
    check(IN_PARTS[name], (3, 3), TOKENS[:, :6])


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.slow
def test_no_and_two_batch_axes(batch):
    tokens = np.stack([TOKENS, TOKENS[::-1]]) if batch else TOKENS[0]
    check(of(windows=(WINDOW, None), positions=(T5Bias(),)), (3, 3), tokens[..., :6])


@pytest.mark.slow
def test_an_encoder_decoder_reads_its_source_once():
    config = replace(
        of(windows=(WINDOW, None), positions=(T5Bias(),)),
        topology=EncoderDecoder(num_encoder_layers=1),
    )
    segments = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    check(config, (3, 4), source=TOKENS[:, :5], source_segments=segments)


THREE = {"multi-head": of(windows=(WINDOW, None)).attention, "shared": SHARED, "latent": LATENT}


@pytest.mark.parametrize("kind", THREE.values(), ids=THREE)
@pytest.mark.slow
def test_padding_is_not_remembered(kind):
    """Rows of two and four tokens in one call, then three more each, against each row alone."""
    config = of(attention=kind)
    params, run = random_params(config), jitted_forward(config)
    cache = empty_cache(config, (2,), LENGTH)
    segments = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    first, cache = run(params, TOKENS[:, :4], segments=segments, cache=cache)
    second, cache = run(params, TOKENS[:, 4:], cache=cache)
    np.testing.assert_array_equal(cache.length, [5, 7])
    for row, length in enumerate((2, 4)):
        alone = np.concatenate([TOKENS[row, :length], TOKENS[row, 4:]])
        logits = np.concatenate([first[row, :length], second[row]])
        alone = np.pad(alone, (0, 4 - length))  # behind it, where nothing looks
        np.testing.assert_allclose(logits, run(params, alone)[: length + 3], atol=2e-5)


@pytest.mark.parametrize("kind", THREE.values(), ids=THREE)
@pytest.mark.slow
def test_rows_can_be_taken_in_any_order(kind):
    config = of(attention=kind)
    params, run = random_params(config), jitted_forward(config)
    _, cache = run(params, TOKENS[:, :4], cache=empty_cache(config, (2,), LENGTH))
    after, _ = run(params, TOKENS[:, 4:], cache=cache)
    rows = np.array([1, 1, 0])
    swapped, _ = run(params, TOKENS[rows, 4:], cache=take_rows(cache, rows))
    np.testing.assert_allclose(swapped, after[rows], atol=1e-5)


def test_a_window_keeps_no_more_than_it_sees():
    config = of(windows=(WINDOW, None))
    shapes = [layer.self_attention.key.shape for layer in empty_cache(config, (2,), 50).layers]
    assert shapes == [(1, 2, 2, WINDOW, 6), (1, 2, 2, 50, 6)]


@pytest.mark.slow
def test_a_full_cache_is_refused_or_answers_nan():
    params, run = random_params(BASE), jitted_forward(BASE)
    cache = empty_cache(BASE, (2,), 4)
    with pytest.raises(ValueError, match="holds 4 tokens; with the new ones there are 7"):
        run(params, TOKENS, cache=cache)
    _, cache = run(params, TOKENS[:, :3], cache=cache)
    logits, _ = run(params, TOKENS[:, 3:6], cache=cache)
    assert np.all(np.isnan(logits))


def test_a_step_has_no_second_cache():
    """What layers remember goes round the loop over them, and is written in place."""
    config = replace(BASE, num_layers=6)
    params = jax.eval_shape(lambda: random_params(config))
    cache = jax.eval_shape(lambda: empty_cache(config, (2,), 4096))
    model = Transformer(config)

    def step(params, tokens, cache):
        return model.apply({"params": params}, tokens, cache=cache)

    token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    program = jax.jit(step, donate_argnums=2).lower(params, token, cache).compile()
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    assert program.memory_analysis().temp_size_in_bytes < cache_bytes


ROOMS = {
    "some windows": of(windows=(2, None)),
    "blocks": of(windows=(BlockSparse(block_size=2, local_blocks=2, stride=2),)),
    "shared, no window": of(attention=replace(SHARED, windows=(None,))),
    "latent, a wider window": of(attention=replace(LATENT, windows=(8,))),
}


@pytest.mark.parametrize("config", ROOMS.values(), ids=ROOMS)
@pytest.mark.slow
def test_no_cache_is_written_beyond_its_room(config):
    """At once and token by token, in words outside jit; at trace time where shapes tell."""
    params, model = random_params(config), Transformer(config)
    cache = empty_cache(config, (2,), 4)
    message = r"holds 4 tokens; with the new ones there are {}\. Use .*capacity={}\)"
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(ValueError, match=message.format(5, 5)):
            apply({"params": params}, TOKENS[:, :5], cache=cache)
    first = jax.jit(partial(prefill, config, capacity=4))
    _, context = first(params, TOKENS[:, :4], np.full(2, 4))
    with pytest.raises(ValueError, match=message.format(5, 5)):
        decode_step(config, params, TOKENS[:, 4], context)
    step = jax.jit(decode_step, static_argnums=0)
    assert np.all(np.isnan(step(config, params, TOKENS[:, 4], context)[0]))
    with pytest.raises(
        ValueError, match="capacity must be at least the prompt's width of 5 .* got 4"
    ):
        prefill(config, params, TOKENS[:, :5], jnp.full(2, 4), capacity=4)


@pytest.mark.slow
def test_padding_takes_no_room():
    params, run = random_params(BASE), jitted_forward(BASE)
    real = np.broadcast_to(np.arange(7) < 4, TOKENS.shape).astype(int)
    logits, _ = run(params, TOKENS, segments=real, cache=empty_cache(BASE, (2,), 4))
    np.testing.assert_allclose(logits[:, :4], run(params, TOKENS)[:, :4], atol=2e-5)


@pytest.mark.parametrize("name", ["ring", "shared", "latent"])
@pytest.mark.slow
def test_kernels_without_positions_read_a_prompt(name, monkeypatch):
    """As kernels do: padding stands behind, where no real token looks; the cache goes on."""
    config, attend = IN_PARTS[name], F.dot_product_attention

    def by_order(query, key, value, mask, bias, *, implementation, **options):
        assert mask.rule.contiguous_positions and mask.query_segments is None
        at = jnp.arange(query.shape[-3])
        return attend(query, key, value, F.AttentionMask(at, at, rule=mask.rule), **options)

    params, real = random_params(config), np.arange(LENGTH) < np.array([[LENGTH], [2]])
    whole = jitted_forward(config)(params, TOKENS)
    monkeypatch.setattr(F, "dot_product_attention", by_order)
    model = Transformer(config, attention_implementation="blockwise")
    run = jax.jit(partial(model.apply, {"params": params}, cache_is_empty=True))
    inputs = {"segments": real.astype(np.int32), "cache": empty_cache(config, (2,), LENGTH + 1)}
    logits, cache = run(TOKENS, **inputs)
    np.testing.assert_allclose(logits[real], whole[real], atol=1e-5 * np.abs(whole).max())
    monkeypatch.undo()
    following, _ = jitted_forward(config)(params, TOKENS[:, 2:3], cache=cache)
    np.testing.assert_allclose(following[1, 0], whole[1, 2], atol=1e-5 * np.abs(whole).max())


@pytest.mark.slow
def test_cache_is_empty_is_refused_for_a_filled_cache():
    params, model = random_params(BASE), Transformer(BASE)
    _, cache = jitted_forward(BASE)(params, TOKENS[:, :4], cache=empty_cache(BASE, (2,), LENGTH))
    with pytest.raises(ValueError, match="needs an empty cache; a row of this one has 4 tokens"):
        model.apply({"params": params}, TOKENS[:, 4:], cache=cache, cache_is_empty=True)


@pytest.mark.slow
def test_a_cache_of_windows_alone_is_never_full():
    check(of(windows=(WINDOW,)), (LENGTH,), room=4)


def test_batch_axes_are_a_tuple():
    with pytest.raises(ValueError, match=r"batch must be a tuple, such as \(8,\); got 2\."):
        empty_cache(BASE, 2, 4)


@pytest.mark.parametrize(
    "changes, capacity, message",
    [
        (dict(topology=Encoder()), 4, "An Encoder attends in both directions"),
        ({}, 0, "capacity must be an integer of at least 1; got 0"),
        ({}, 2.5, "capacity must be an integer of at least 1; got 2.5"),
        (
            dict(embedding=Embedding(positions=Learned(max_length=9))),
            10,
            "at most 9, the number of learned positions; got 10",
        ),
    ],
)
def test_caches_that_cannot_be(changes, capacity, message):
    with pytest.raises(ValueError, match=message):
        empty_cache(replace(BASE, **changes), (2,), capacity)


def test_a_cache_needs_a_device():
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of .* got 0"):
        empty_cache(BASE, (2,), LENGTH, tensor_parallel_size=0)


def test_positions_follow_from_the_cache():
    cache = empty_cache(BASE, (2,), LENGTH)
    with pytest.raises(
        ValueError, match="positions follow from it; pass either positions or a cache"
    ):
        jitted_forward(BASE)(random_params(BASE), TOKENS, positions=np.arange(LENGTH), cache=cache)
