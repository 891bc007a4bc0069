"""With a cache as without: every kind of position, attention, block, placement and window."""

from dataclasses import replace
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.config import (
    GLU,
    Alibi,
    Angles,
    BlockSparse,
    Decay,
    Embedding,
    Encoder,
    EncoderDecoder,
    Experts,
    Latent,
    Learned,
    Llama3Scaling,
    MultiHead,
    QKNorm,
    Rope,
    SharedKV,
    Sinusoid,
    T5Bias,
    TransformerConfig,
    TransformerXL,
    Yarn,
)
from jaxformer.generation.steps import decode_step, prefill
from jaxformer.layers import empty_cache, take_rows

LENGTH, WINDOW = 7, 3
POSITIONS = {
    "none": dict(),
    "sinusoid": dict(embedding=Embedding(positions=Sinusoid())),
    "learned": dict(embedding=Embedding(positions=Learned(max_length=LENGTH, offset=2))),
    "alibi": dict(positions=(Alibi(),)),
    "t5": dict(positions=(T5Bias(num_buckets=8, max_distance=6),)),
    "rope": dict(positions=(Rope(),)),
    "hybrid": dict(positions=(Rope(), None)),
}
HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
BLOCKS = ("serial", "parallel_shared_norm", "parallel")
PLACEMENTS = ("pre", "post", "sandwich", "branch_out")
WINDOWS = {"full": (None,), "window": (WINDOW, None)}
CHUNKS = ((1,) * LENGTH, (3, 3, 1))


def build(positions="none", heads="mha", block="serial", placement="pre", window="full"):
    choice = {"positions": (None,), "embedding": Embedding(), **POSITIONS[positions]}
    return TransformerConfig(
        vocab_size=19,
        model_dim=8,
        num_layers=2,
        attention=MultiHead(
            num_heads=4,
            num_kv_heads=HEADS[heads],
            head_dim=4,
            positions=choice["positions"],
            windows=WINDOWS[window],
        ),
        feed_forward=(GLU(hidden_dim=5),),
        block=block,
        placement=placement,
        embedding=choice["embedding"],
    )


def draw(config, **example):
    rng = np.random.default_rng(0)
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((2, 2), int), **example))
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), shapes["params"]
    )


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, LENGTH), 0, 19)


def in_chunks(config, apply, params, tokens, chunks, **first):
    """Logits of all tokens, read in parts of these lengths."""
    cache = empty_cache(config, tokens.shape[:-1], tokens.shape[-1])
    parts, start = [], 0
    for length in chunks:
        part = tokens[..., start : start + length]
        logits, cache = apply({"params": params}, part, cache=cache, **first)
        parts.append(logits)
        start, first = start + length, {}
    return jnp.concatenate(parts, axis=-2)


MATRIX = list(product(POSITIONS, HEADS, BLOCKS, PLACEMENTS, WINDOWS))


def covering(rows):
    """Few of the rows, in which any two values of different columns still meet."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    open_pairs, chosen = set().union(*pairs.values()), []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs[row] & open_pairs))
        chosen.append(best)
        open_pairs -= pairs[best]
    return chosen


def check(config, tokens, chunkings=CHUNKS, **example):
    params = draw(config, **example)
    apply = jax.jit(Transformer(config).apply)
    expected = apply({"params": params}, tokens, **example)
    for chunks in chunkings:
        logits = in_chunks(config, apply, params, tokens, chunks, **example)
        np.testing.assert_allclose(logits, expected, atol=2e-5, err_msg=f"{chunks} {config!r}")


@pytest.mark.usefixtures("no_checks_of_annotations")
@pytest.mark.parametrize("row", covering(MATRIX), ids="-".join)
def test_cached_is_uncached_at_every_step(row, tokens):
    check(build(*row), tokens)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_checks_of_annotations")
@pytest.mark.parametrize("row", MATRIX, ids="-".join)
def test_cached_is_uncached_in_every_combination(row, tokens):
    check(build(*row), tokens)


EVERYWHERE = ("q", "k", "v", "o")
STRETCHED = Yarn(factor=4.0, original_max_length=4)
KINDS = {
    "shared": SharedKV(
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        windows=(WINDOW, None),
        qk_norm=QKNorm(),
        biases=("query", "key_value", "out"),
    ),
    "shared, in part": SharedKV(
        num_heads=2,
        head_dim=6,
        positions=(Rope(fraction=0.7, scaling=STRETCHED, targets=EVERYWHERE), Alibi()),
    ),
    "latent": Latent(
        num_heads=4,
        latent_dim=5,
        query_latent_dim=7,
        nope_dim=3,
        rope_dim=4,
        value_dim=6,
        windows=(WINDOW, None),
        biases=("query_latent", "latent", "rotary_key", "out"),
    ),
    "latent, expanded for three": Latent(
        num_heads=2,
        latent_dim=64,
        nope_dim=2,
        rope_dim=2,
        value_dim=2,
        positions=(Rope(scaling=STRETCHED), T5Bias(num_buckets=8, max_distance=6)),
    ),
    "decay": Decay(num_heads=4, head_dim=4, shortest=1.5, angles=Angles(pairing="neighbours")),
    "decay, real": Decay(num_heads=2, head_dim=3, angles=None, biases=("value", "out")),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_other_kinds_of_attention(kind, tokens):
    config = replace(build(), attention=kind)
    check(config, tokens)


OTHERS = {
    "transformer-xl": dict(positions=(TransformerXL(),)),
    "block sparse": dict(windows=(BlockSparse(block=2, local_blocks=1, stride=2), None)),
    "rotary values": dict(positions=(Rope(targets=("q", "k", "v", "o")),)),
    "qk-norm": dict(qk_norm=QKNorm(over="width"), clip_qkv=0.7, logit_softcap=2.0),
    "llama 3 scaling": dict(positions=(Rope(scaling=Llama3Scaling(factor=8.0)),)),
    "transformer-xl in windows": dict(positions=(TransformerXL(),), windows=(2, 3)),
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
@pytest.mark.slow(but=["transformer-xl in windows", "rotary values", "block sparse"])
def test_other_attention_too(changes, tokens):
    config = build("rope", "gqa")
    check(replace(config, attention=replace(config.attention, **changes)), tokens)


CHOSEN = tuple(chosen for n in range(5) for chosen in combinations(EVERYWHERE, n))


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.slow
def test_every_choice_of_rotary_targets(pairing, shared, tokens):
    """A layer for each of the sixteen."""
    kinds = tuple(Rope(pairing=pairing, targets=chosen) for chosen in CHOSEN)
    config = build("rope", "gqa")
    if shared:
        attention = SharedKV(num_heads=4, num_kv_heads=2, head_dim=4, positions=kinds)
    else:
        attention = replace(config.attention, positions=kinds)
    check(replace(config, num_layers=len(kinds), attention=attention), tokens)


def test_experts_and_layers_after_the_last_pattern(tokens):
    experts = Experts(expert=GLU(hidden_dim=5), num_experts=4)
    config = replace(
        build("rope", "gqa", window="window"),
        num_layers=3,
        feed_forward=(experts, GLU(hidden_dim=7)),
    )
    check(config, tokens)


def test_a_window_longer_than_the_text_is_no_ring(tokens):
    config = build("alibi", "gqa")
    check(replace(config, attention=replace(config.attention, windows=(LENGTH + 4,))), tokens)


def test_no_and_two_batch_axes(tokens):
    config = build("t5", "gqa", window="window")
    check(config, tokens[0], ((3, 4),))
    check(config, jnp.stack([tokens, tokens[::-1]]), ((3, 4),))


@pytest.mark.parametrize("positions", ["t5", "sinusoid"])
@pytest.mark.slow
def test_an_encoder_decoder_reads_its_source_once(positions, tokens):
    config = replace(
        build(positions, window="window"), topology=EncoderDecoder(num_encoder_layers=1)
    )
    source = jax.random.randint(jax.random.key(3), (2, 5), 0, 19)
    segments = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    check(config, tokens, ((3, 4), (1,) * LENGTH), source=source, source_segments=segments)


MULTI_HEAD = build("rope", "gqa", window="window").attention
THREE = {"multi-head": MULTI_HEAD, "shared": KINDS["shared"], "latent": KINDS["latent"]}


@pytest.mark.parametrize("kind", THREE.values(), ids=THREE)
@pytest.mark.slow(but=["latent"])
def test_padding_is_not_remembered(kind, tokens):
    """Rows of two and four tokens in one call, then three more each, against each row alone."""
    config = replace(build(), attention=kind)
    params = draw(config)
    apply = jax.jit(Transformer(config).apply)
    cache = empty_cache(config, (2,), LENGTH)
    segments = jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1]])
    first, cache = apply({"params": params}, tokens[:, :4], segments=segments, cache=cache)
    second, cache = apply({"params": params}, tokens[:, 4:], cache=cache)
    np.testing.assert_array_equal(cache.length, [5, 7])
    for row, length in enumerate((2, 4)):
        alone = jnp.concatenate([tokens[row, :length], tokens[row, 4:]])
        expected = apply({"params": params}, alone)
        logits = jnp.concatenate([first[row, :length], second[row]])
        np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("kind", THREE.values(), ids=THREE)
@pytest.mark.slow(but=["shared"])
def test_rows_can_be_taken_in_any_order(kind, tokens):
    config = replace(build(), attention=kind, num_layers=3)
    params = draw(config)
    apply = jax.jit(Transformer(config).apply)
    _, cache = apply({"params": params}, tokens[:, :4], cache=empty_cache(config, (2,), LENGTH))
    after, _ = apply({"params": params}, tokens[:, 4:], cache=cache)
    rows = jnp.asarray([1, 1, 0])
    swapped, _ = apply({"params": params}, tokens[rows, 4:], cache=take_rows(cache, rows))
    np.testing.assert_allclose(swapped, after[rows], atol=1e-6)


def test_a_window_keeps_no_more_than_it_sees():
    config = build("rope", "gqa", window="window")
    shapes = [layer.own.key.shape for layer in empty_cache(config, (2,), 50).layers]
    assert shapes == [(1, 2, 2, WINDOW, 4), (1, 2, 2, 50, 4)]


def test_a_full_cache_is_refused_or_answers_nan(tokens):
    config = build("rope")
    params = draw(config)
    model = Transformer(config)
    cache = empty_cache(config, (2,), 4)
    with pytest.raises(ValueError, match="room for 4 tokens; with these there are 7"):
        model.apply({"params": params}, tokens, cache=cache)
    _, cache = model.apply({"params": params}, tokens[:, :3], cache=cache)
    logits, _ = jax.jit(model.apply)({"params": params}, tokens[:, 3:5], cache=cache)
    assert jnp.all(jnp.isnan(logits))


ROOMS = {
    "a window wider than the room": dict(windows=(8,)),
    "no window": dict(windows=(None,)),
    "some windows": dict(windows=(2, None)),
    "blocks": dict(windows=(BlockSparse(block=2, local_blocks=2, stride=2),)),
}


@pytest.mark.parametrize("changes", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize("kind", ["mha", "shared", "latent"])
@pytest.mark.slow(but=["mha-some windows", "shared-no window", "latent-some windows"])
def test_no_cache_is_written_beyond_its_room(tokens, kind, changes):
    """At once and token by token, in words outside jit; at trace time where shapes tell."""
    config = build("rope")
    attention = {
        "mha": config.attention,
        "shared": SharedKV(num_heads=4, head_dim=4),
        "latent": Latent(num_heads=4, latent_dim=4, nope_dim=4, rope_dim=4, value_dim=4),
    }[kind]
    config = replace(config, attention=replace(attention, **changes))
    params, model = draw(config), Transformer(config)
    cache = empty_cache(config, (2,), 4)
    message = r"room for 4 tokens; with these there are {}\. Make it .*capacity={}\)"
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(ValueError, match=message.format(5, 5)):
            apply({"params": params}, tokens[:, :5], cache=cache)
    _, context = prefill(config, params, tokens[:, :4], jnp.full(2, 4), capacity=4)
    with pytest.raises(ValueError, match=message.format(5, 5)):
        decode_step(config, params, tokens[:, 4], context)
    step = jax.jit(decode_step, static_argnums=0)
    assert jnp.all(jnp.isnan(step(config, params, tokens[:, 4], context)[0]))
    with pytest.raises(ValueError, match="Prompts of 5 places need a capacity .* got 4"):
        prefill(config, params, tokens[:, :5], jnp.full(2, 4), capacity=4)


def test_padding_takes_no_room(tokens):
    config = build("rope")
    params, apply = draw(config), jax.jit(Transformer(config).apply)
    real = jnp.broadcast_to(jnp.arange(7) < 4, tokens.shape).astype(int)
    logits, _ = apply({"params": params}, tokens, segments=real, cache=empty_cache(config, (2,), 4))
    expected = apply({"params": params}, tokens[:, :4])
    np.testing.assert_allclose(logits[:, :4], expected, atol=2e-5)


@pytest.mark.slow
def test_states_of_decay_never_fill(tokens):
    config = replace(build("rope"), attention=Decay(num_heads=2, head_dim=4))
    params, model = draw(config), Transformer(config)
    logits, cache = model.apply(
        {"params": params}, tokens[:, :5], cache=empty_cache(config, (2,), 1)
    )
    last, _ = model.apply({"params": params}, tokens[:, 5:], cache=cache)
    expected = model.apply({"params": params}, tokens)
    np.testing.assert_allclose(jnp.concatenate([logits, last], 1), expected, atol=2e-5)


def test_windows_alone_never_fill(tokens):
    config = build("rope")
    config = replace(config, attention=replace(config.attention, windows=(WINDOW,)))
    params, apply = draw(config), jax.jit(Transformer(config).apply)
    logits, _ = apply({"params": params}, tokens, cache=empty_cache(config, (2,), 4))
    np.testing.assert_allclose(logits, apply({"params": params}, tokens), atol=2e-5)


@pytest.mark.parametrize(
    "changes, capacity, message",
    [
        (dict(topology=Encoder()), 4, "An Encoder sees all of its text at once"),
        ({}, 0, "room for at least 1 token; got capacity 0"),
        (
            dict(embedding=Embedding(positions=Learned(max_length=9))),
            10,
            "9 learned positions; a cache for 10 tokens",
        ),
    ],
)
def test_caches_that_cannot_be(changes, capacity, message):
    with pytest.raises(ValueError, match=message):
        empty_cache(replace(build(), **changes), (2,), capacity)


def test_positions_follow_from_the_cache(tokens):
    config = build()
    with pytest.raises(ValueError, match="Positions follow from the cache; do not pass both"):
        Transformer(config).apply(
            {"params": draw(config)},
            tokens,
            positions=jnp.arange(LENGTH),
            cache=empty_cache(config, (2,), LENGTH),
        )
