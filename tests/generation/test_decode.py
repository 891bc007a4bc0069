from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

import jaxformer
from jaxformer import generate
from jaxformer.config import DynamicNTK, Embedding, Encoder, EncoderDecoder, Learned, LongRope, Rope
from jaxformer.generation import Beam, Greedy, Sample, decode, steps, stream
from jaxformer.generation import decode_loop as programs
from jaxformer.generation.decode_loop import decode_tokens
from jaxformer.generation.prompts import bucket_length, pad_rows
from jaxformer.layers import empty_cache
from jaxformer.layers.parameter_metadata import cast_parameters
from tests.small_models import jitted_forward, random_params

LEARNED = Embedding(positions=Learned(max_length=11))


@pytest.fixture(scope="module")
def stepwise(config, params):
    """Greedy decoding by hand: the model over the whole text, of which what follows is not seen."""

    def decode(prompt, steps):
        text = np.pad(prompt, [(0, 0), (0, steps)])
        for end in range(prompt.shape[-1], text.shape[-1]):
            text[:, end] = np.argmax(jitted_forward(config)(params, text)[:, end - 1], axis=-1)
        return text

    return decode


def test_greedy_is_the_argmax_of_the_model_step_by_step(config, params, prompts, stepwise):
    expected = stepwise(prompts, 6)
    tokens = generate(config, params, prompts, max_new_tokens=6)
    np.testing.assert_array_equal(tokens, expected)
    assert len(np.unique(expected[:, 5:])) > 3  # the text matters; it is no constant answer


@pytest.mark.slow
def test_a_prompt_alone_a_batch_and_numpy_give_the_same(config, params, prompts):
    together = generate(config, params, prompts, max_new_tokens=6)
    for row in range(2):
        alone = generate(config, params, prompts[row], max_new_tokens=6)
        np.testing.assert_array_equal(alone, together[row])
    tokens = generate(config, params, np.asarray(prompts), max_new_tokens=6)
    np.testing.assert_array_equal(tokens, together)


@pytest.mark.slow
def test_a_sampler_that_leaves_one_candidate_is_greedy(config, params, prompts):
    greedy = generate(config, params, prompts, max_new_tokens=6, sampler=Greedy())
    options = dict(sampler=Sample(top_k=1), key=jax.random.key(0))
    tokens = generate(config, params, prompts, max_new_tokens=6, **options)
    np.testing.assert_array_equal(tokens, greedy)


@pytest.mark.slow
def test_the_key_decides(config, params, prompts):
    def tokens(seed):
        return generate(
            config,
            params,
            prompts,
            max_new_tokens=6,
            sampler=Sample(temperature=2.0),
            key=jax.random.key(seed),
        )

    first = tokens(0)
    np.testing.assert_array_equal(first[:, :5], prompts)
    assert first.shape == (2, 11) and first.dtype == prompts.dtype
    np.testing.assert_array_equal(tokens(0), first)
    assert np.any(first != tokens(1))


@pytest.mark.slow
def test_a_large_penalty_forbids_repetition(config, params, prompts):
    """Of the prompt and of what was added: eleven different tokens where greedy repeats some."""
    prompt = jnp.asarray([3, 1, 4, 30, 5], jnp.int32)
    tokens = generate(
        config,
        params,
        prompt,
        max_new_tokens=6,
        sampler=Sample(temperature=1e-3, repetition_penalty=1e6),
        key=jax.random.key(0),
    )
    # A penalised logit is all but zero or far below; the highest of the others is above both.
    assert len(np.unique(tokens)) == 11


@pytest.mark.slow
def test_to_the_end_of_a_learned_table_and_not_beyond(learned, learned_params, prompts):
    """The last token is chosen and never read, so it needs no position."""
    tokens = generate(learned, learned_params, prompts, max_new_tokens=7)
    assert tokens.shape == (2, learned.max_length + 1) and np.all((tokens >= 0) & (tokens < 31))
    last = jnp.argmax(jitted_forward(learned)(learned_params, tokens[:, :-1])[:, -1], axis=-1)
    np.testing.assert_array_equal(tokens[:, -1], last)
    with pytest.raises(
        ValueError, match="11 learned positions, but a prompt of 5 tokens with max_.*=8 needs 12"
    ):
        generate(learned, learned_params, prompts, max_new_tokens=8)


@pytest.mark.parametrize("table, capacity", [(Embedding(), 128), (LEARNED, 11)])
@pytest.mark.slow
def test_a_cache_on_a_tpu_fills_its_registers(config, prompts, monkeypatch, table, capacity):
    """But for a table of positions that ends before. One token less is another program."""
    config = replace(config, vocab_size=33, embedding=table, num_layers=1)
    tokens, seen = generate(config, random_params(config), prompts, max_new_tokens=6), []

    def empty(config, batch, capacity, **options):
        seen.append(capacity)
        return empty_cache(config, batch, capacity, **options)

    monkeypatch.setattr(steps, "empty_cache", empty)
    monkeypatch.setattr(programs, "target_platform", lambda: "tpu")
    actual = generate(config, random_params(config), prompts, max_new_tokens=5)
    np.testing.assert_array_equal(actual, tokens[:, :-1])
    assert seen == [capacity]


@pytest.mark.slow
def test_compiles_once_for_prompts_of_one_bucket(config, params, prompts):
    generate(config, params, prompts, max_new_tokens=6)
    compiled = decode_tokens._cache_size()
    generate(replace(config), params, prompts[::-1], max_new_tokens=6, sampler=Greedy())
    for width in (1, 2, 16):
        longer = jnp.tile(prompts, (1, 4))[:, :width]
        assert generate(config, params, longer, max_new_tokens=6).shape == (2, width + 6)
    generate(config, params, [[1, 2, 3], [4]], max_new_tokens=6)
    assert decode_tokens._cache_size() == compiled
    generate(config, params, jnp.tile(prompts, (1, 4))[:, :17], max_new_tokens=6)
    assert decode_tokens._cache_size() == compiled + 1


@given(st.integers(1, 10_000))
def test_buckets_hold_what_they_are_asked_to(length):
    width = bucket_length(length)
    assert width >= length and bucket_length(width) == width and width % 16 == 0
    assert width - length < max(16, length / 8)


@pytest.mark.slow
def test_bfloat16_converts_kernels_once_and_norms_never(config, params, prompts, monkeypatch):
    """XLA for CPUs and GPUs would convert each kernel again for each token of `stream`."""
    call = decode.decode_next

    def observed(options, params, *inputs):
        dtypes = {path[-1]: x.dtype for path, x in flatten_dict(params).items()}
        assert dtypes == dict(kernel=jnp.bfloat16, embedding=jnp.bfloat16, scale=jnp.float32)
        return call(options, params, *inputs)

    monkeypatch.setattr(decode, "decode_next", observed)
    options = dict(max_new_tokens=3, dtype=jnp.bfloat16)
    *_, last = stream(config, params, prompts, **options)
    np.testing.assert_array_equal(last, generate(config, params, prompts, **options)[:, -1])
    forward = jitted_forward(config, dtype=jnp.bfloat16)
    trees = params, cast_parameters(config, params, jnp.bfloat16)
    np.testing.assert_array_equal(*(forward(tree, prompts) for tree in trees))


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({}, dict(prompt=jnp.zeros((2, 0), jnp.int32)), "prompt is empty; pass at least one"),
        ({}, dict(prompt=jnp.asarray([[3, 31]])), r"Token id 31 at position \(0, 1\).* of 31"),
        ({}, dict(prompt=jnp.asarray([-1, 3])), r"Token id -1 at position \(0,\)"),
        (dict(topology=Encoder()), {}, r"Decoder or an EncoderDecoder; got Encoder\(\)"),
        (
            dict(topology=EncoderDecoder(num_encoder_layers=2)),
            {},
            "An EncoderDecoder needs source=token_ids",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(config, params, prompts, changes, arguments, message):
    arguments = {"prompt": prompts, "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(replace(config, **changes), params, arguments.pop("prompt"), **arguments)


@pytest.mark.parametrize("write", [generate, lambda *inputs, **how: list(stream(*inputs, **how))])
@pytest.mark.slow(but=["<lambda>"])
def test_parameters_that_are_no_numbers_write_no_text(config, params, write):
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with pytest.raises(ValueError, match="Logits of the prompt are NaN or infinite; check the"):
        write(config, broken, ROWS, max_new_tokens=2)


@pytest.mark.slow
def test_beams_of_parameters_that_are_no_numbers_write_no_text(config, params):
    broken = jax.tree.map(lambda x: x * jnp.inf, params)
    with pytest.raises(ValueError, match="Logits of the prompt are NaN or infinite"):
        generate(config, broken, ROWS, max_new_tokens=2, sampler=Beam(num_beams=2))


def test_generate_is_public():
    assert jaxformer.generate is generate


SHORT, LONG = (1.0, 1.0, 1.0), (1.0, 3.0, 9.0)


@pytest.mark.parametrize(
    "scaling",
    [
        DynamicNTK(factor=8.0, original_max_length=3),
        LongRope(short_factors=SHORT, long_factors=LONG, original_max_length=7, max_length=16),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
@pytest.mark.slow
def test_a_length_that_is_still_to_come_changes_nothing(config, params, prompts, scaling):
    """Scalings that look at the length see the text so far, not the room for what will be added."""
    attention = replace(config.attention, positions=(Rope(scaling=scaling),))
    cfg = replace(config, attention=attention)
    text = np.asarray(prompts)
    for _ in range(4):
        logits = jitted_forward(cfg)(params, text)[..., -1, :]
        text = np.concatenate([text, np.argmax(logits, axis=-1)[..., None]], axis=-1)
    np.testing.assert_array_equal(generate(cfg, params, prompts, max_new_tokens=4), text)


@pytest.mark.slow
def test_ids_beyond_the_vocabulary_of_the_tokenizer_are_never_chosen(config, params, prompts):
    sampler = Sample(temperature=50.0)

    def largest(vocab_size):
        tokens = generate(
            config,
            params,
            prompts,
            max_new_tokens=6,
            sampler=sampler,
            key=jax.random.key(0),
            vocab_size=vocab_size,
        )
        return tokens[:, 5:].max()

    assert largest(None) > 7 > largest(7)


# Rows of different lengths, stop tokens, chunks, streams


ROWS = [[3, 1], [9, 2, 6, 5, 30], [7, 8, 9]]


@pytest.mark.slow
def test_rows_of_different_lengths_are_rows_alone(config, params):
    together = generate(config, params, ROWS, max_new_tokens=6)
    assert together.shape == (3, 11)
    for row, tokens in zip(together, ROWS, strict=True):
        alone = generate(config, params, jnp.asarray(tokens), max_new_tokens=6)
        np.testing.assert_array_equal(row[: len(tokens) + 6], alone)
        assert np.all(row[len(tokens) + 6 :] == alone[-1])


@pytest.mark.slow
def test_padding_and_lengths_say_the_same_as_a_list(config, params):
    padded, lengths = pad_rows(ROWS)
    np.testing.assert_array_equal(lengths, [2, 5, 3])
    padded[0, 2:] = 17  # what stands in the padding does not matter
    actual = generate(config, params, padded, lengths=lengths, max_new_tokens=6)
    np.testing.assert_array_equal(actual, generate(config, params, ROWS, max_new_tokens=6))


@pytest.mark.parametrize(
    "chunk", [2, 9, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))]
)
@pytest.mark.slow
def test_any_chunks_of_the_prompt_give_the_same(config, params, chunk):
    actual = generate(config, params, ROWS, max_new_tokens=6, prefill_chunk=chunk)
    np.testing.assert_array_equal(actual, generate(config, params, ROWS, max_new_tokens=6))


@pytest.mark.slow
def test_a_row_ends_at_its_stop_token_and_repeats_it(config, params):
    free = np.asarray(generate(config, params, ROWS, max_new_tokens=6))
    stops = [int(free[0, 2 + 1]), int(free[1, 5 + 3])]  # what rows choose second and fourth
    stop_tokens = jnp.asarray([[stops[0]], [stops[1]], [-1]])
    actual = np.asarray(generate(config, params, ROWS, max_new_tokens=6, stop_tokens=stop_tokens))
    for row, (length, tokens) in enumerate(zip((2, 5, 3), ROWS, strict=True)):
        end = length + 6
        if stop_tokens[row, 0] >= 0:
            chosen = free[row, length:end].tolist()
            end = length + chosen.index(stop_tokens[row, 0]) + 1
        np.testing.assert_array_equal(actual[row, :end], free[row, :end])
        assert np.all(actual[row, end:] == actual[row, end - 1])
        assert tokens == actual[row, :length].tolist()


def test_a_stop_token_of_all_rows_ends_each(config, params):
    free = np.asarray(generate(config, params, ROWS, max_new_tokens=6))
    stop = int(free[0, 2])
    actual = np.asarray(generate(config, params, ROWS, max_new_tokens=6, stop_tokens=(stop,)))
    assert np.all(actual[0, 2:] == stop)


@pytest.mark.parametrize("sampler", [Greedy(), Sample(temperature=2.0, repetition_penalty=1.3)])
@pytest.mark.slow(but=["a loop-sampler0"])
def test_a_stream_gives_the_tokens_of_generate(config, params, sampler, form):
    options = dict(max_new_tokens=6, sampler=sampler, key=jax.random.key(4), stop_tokens=(11,))
    tokens = np.stack(list(stream(config, params, ROWS, **options)), axis=-1)
    whole = np.asarray(generate(config, params, ROWS, **options))
    for row, length in enumerate((2, 5, 3)):
        np.testing.assert_array_equal(tokens[row], whole[row, length : length + tokens.shape[1]])


@pytest.mark.slow
def test_a_stream_ends_when_all_rows_have(config, params):
    free = np.asarray(generate(config, params, ROWS[:1], max_new_tokens=6))
    stop = (int(free[0, 4]),)
    tokens = list(stream(config, params, ROWS[:1], max_new_tokens=6, stop_tokens=stop))
    assert len(tokens) == free[0, 2:].tolist().index(stop[0]) + 1


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param(Rope(), marks=pytest.mark.exhaustive),
        Rope(scaling=DynamicNTK(factor=8.0, original_max_length=3)),
        pytest.param(
            Rope(
                scaling=LongRope(
                    short_factors=SHORT, long_factors=LONG, original_max_length=5, max_length=16
                )
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda rope: type(rope.scaling).__name__,
)
@pytest.mark.slow
def test_an_encoder_decoder_writes_from_a_source(config, rope):
    """Padding of the source, of its rows and of their bucket, does not make it longer."""
    attention = replace(config.attention, positions=(rope,))
    cfg = replace(config, attention=attention, topology=EncoderDecoder(num_encoder_layers=1))
    rng = np.random.default_rng(0)
    source, start = jnp.asarray(rng.integers(0, 31, (2, 6))), jnp.full((2, 1), 1)
    weights, run = random_params(cfg), jitted_forward(cfg)
    rows = [source[0].tolist(), source[1, :4].tolist()]
    actual = generate(cfg, weights, start, max_new_tokens=4, source=rows)
    for row in range(2):
        logits = run(weights, actual[row, :-1], source=jnp.asarray(rows[row]))
        np.testing.assert_array_equal(actual[row, 1:], np.argmax(logits, axis=-1))
    whole = generate(cfg, weights, start, max_new_tokens=4, source=source)
    logits = run(weights, whole[:, :-1], source=source)
    np.testing.assert_array_equal(whole[:, 1:], np.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(prompt=[[3], []]), "prompt is empty; pass at least one"),
        (dict(prompt=[]), "prompt is empty; pass at least one"),
        (
            dict(prompt=np.ones((1, 2), np.float32)),
            "prompt must have an integer dtype; got float32",
        ),
        (dict(prompt=np.ones((1, 2), int), lengths=[3]), "lengths must be at most .* 2; got 3"),
        (dict(source=[[3]]), "A Decoder has no source"),
        (dict(sampler=None), r"sampler must be Greedy\(\), Sample\(...\) or Beam\(...\); got None"),
        (dict(params={"params": {}}), "must be variables"),
    ],
)
def test_more_that_cannot_be_generated_is_refused(config, params, arguments, message):
    arguments = {"params": params, "prompt": ROWS, "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(config, **arguments)
