"""What comes in is checked before anything runs, and its forms mean the same."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import generate
from jaxformer.config import EncoderDecoder
from jaxformer.generation import Beam, Greedy, Sample, stream
from jaxformer.generation.prompts import make_request, pad_rows
from tests.small_models import random_params

ROWS = [[3, 1], [9, 2, 6]]
READS = EncoderDecoder(num_encoder_layers=1)


def request(config, prompt, **options):
    return make_request(config, prompt, **{"max_new_tokens": 2, **options})


def test_forms_of_a_prompt(config):
    alone = request(config, [3, 1, 4])
    assert alone.prompt.shape == (3,) and alone.lengths == 3 and alone.prompt.dtype == jnp.int32
    rows = request(config, [np.asarray([3, 1]), (9, 2, 6)])
    np.testing.assert_array_equal(rows.prompt, [[3, 1, 0], [9, 2, 6]])
    np.testing.assert_array_equal(rows.lengths, [2, 3])
    nested = [[[3, 1], [4, 1]], [[5, 9], [2, 6]]]
    np.testing.assert_array_equal(request(config, nested).lengths, [[2, 2], [2, 2]])


@pytest.mark.parametrize(
    "given, expected",
    [
        ((), np.zeros((2, 0))),
        (3, [[3], [3]]),
        (np.int64(3), [[3], [3]]),
        ((3, 4), [[3, 4], [3, 4]]),
        ([[3, 4], [5]], [[3, 4], [5, -1]]),
        ([[], [5]], [[-1], [5]]),
        (jnp.asarray([[3, -1], [4, 5]]), [[3, -1], [4, 5]]),
        (99, [[99], [99]]),
    ],
)
def test_forms_of_stop_tokens(config, given, expected):
    stop = request(config, ROWS, stop_tokens=given).stop_tokens
    np.testing.assert_array_equal(stop, expected)
    assert stop.dtype == jnp.int32


def test_forms_of_a_source(config):
    reads = replace(config, topology=READS)
    alone = request(reads, [1], source=[5, 6])
    np.testing.assert_array_equal(alone.source, [5, 6])
    assert alone.source_segments is None
    rows = request(reads, [[1], [1]], source=[[5, 6, 7], [8]])
    np.testing.assert_array_equal(rows.source, [[5, 6, 7], [8, 0, 0]])
    np.testing.assert_array_equal(rows.source_segments, [[1, 1, 1], [1, 0, 0]])
    source_config = replace(config, topology=replace(READS, source_vocab_size=50))
    assert request(source_config, [1], source=[49]).source == 49


@pytest.mark.slow
def test_a_flat_source_is_the_row_of_a_batch(config):
    reads = replace(config, topology=READS)
    params = random_params(reads)
    alone = generate(reads, params, [1], max_new_tokens=3, source=[5, 6])
    batch = generate(reads, params, [[1]], max_new_tokens=3, source=[[5, 6]])
    np.testing.assert_array_equal(alone, batch[0])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(source=[[31], [3]]), r"In the source: Token id 31 at position \(0, 0\).* of 31"),
        (dict(source=[[3], [4, -1]]), r"In the source: Token id -1 at position \(1, 1\)"),
        (dict(source=[[3], [2**32]]), "In the source: Token id 4294967296"),
        (dict(source=[[], [3]]), "The source is empty; pass at least one token"),
        (
            dict(source=np.ones((2, 3), np.float32)),
            "source must have an integer dtype; got float32",
        ),
        (
            dict(source=[[3.5], [3]]),
            r"Row 0 of the source must be a list of token ids; got \[3.5\]",
        ),
        (dict(source=[3, [4]]), "Row 0 of the source must be a list of token ids; got 3"),
        (dict(source=7), "The source must have an axis of token ids; got 7"),
        (dict(source=[5, 6]), r"must have the same batch axes; got \(2,\) and \(\)"),
        (dict(source=[[5], [6], [7]]), r"must have the same batch axes; got \(2,\) and \(3,\)"),
        (
            dict(source=np.ones((2, 3), int), source_segments=np.ones((2, 4), int)),
            r"must have the shape of the source, \(2, 3\); got \(2, 4\)",
        ),
        (
            dict(source=[[5], [6, 7]], source_segments=[[1, 0], [1, 1]]),
            r"source_segments must not be passed with a list of rows, .* \[1, 2\]",
        ),
        (dict(source=np.ones((2, 12), int)), "source has 12 tokens, but the model has 11"),
    ],
)
def test_sources_that_cannot_be_read_are_refused(learned, options, message):
    with pytest.raises(ValueError, match=message):
        request(replace(learned, topology=READS), [[1], [1]], **options)


def test_a_source_has_the_vocabulary_of_its_own(config):
    source_config = replace(config, topology=replace(READS, source_vocab_size=7))
    with pytest.raises(ValueError, match="In the source: Token id 7 .* vocabulary of 7"):
        request(source_config, [30], source=[7])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lengths=[2, 3]), r"lengths must not be passed with .* \[2, 3\]; got \[2"),
        (dict(prompt=["hello"]), "The prompt must have an integer dtype; got <U5"),
        (dict(source_segments=[[1]]), "A Decoder has no source"),
        (dict(stop_tokens=[[3], [4], [5]]), r"with \*batch = \(2,\); got \(3, 1\)"),
        (dict(stop_tokens=3.5), "stop_tokens must have an integer dtype; got float32"),
        (dict(stop_tokens=[[3], [4.5]]), r"Row 1 of the stop tokens must be a list .* got \[4.5\]"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(config, options, message):
    options = {"prompt": ROWS, **options}
    with pytest.raises(ValueError, match=message):
        request(config, options.pop("prompt"), **options)


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([2], r"must be integers of shape \(2,\), .* got int64 of shape \(1,\)"),
        (3, r"must be integers of shape \(2,\), .* got int64 of shape \(\)"),
        ([1.5, 2], r"must be integers of shape \(2,\), .* got float64 of shape \(2,\)"),
        ([0, 2], "lengths must be at least 1; got 0"),
        (jnp.asarray([1, 4]), "lengths must be at most the prompt's width of 3; got 4"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(config, lengths, message):
    with pytest.raises(ValueError, match=message):
        request(config, np.ones((2, 3), int), lengths=lengths)


@pytest.mark.parametrize("way", [generate, stream])
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens must be an integer of at least 1; got 0"),
        (dict(max_new_tokens=1.5), "max_new_tokens must be an integer .* got 1.5"),
        (dict(prefill_chunk=0), "prefill_chunk must be an integer of at least 1; got 0"),
        (dict(prefill_chunk=2.5), "prefill_chunk must be an integer .* got 2.5"),
        (dict(vocab_size=0), r"vocab_size must be an integer in \[1, 31\]; got 0"),
        (dict(vocab_size=32), r"vocab_size must be .* \[1, 31\]; got 32"),
        (dict(vocab_size=7.5), r"vocab_size must be .* \[1, 31\]; got 7.5"),
        (dict(sampler=Sample(top_k=3)), r"Sample\(.*top_k=3.* needs a random key: pass key="),
    ],
)
def test_both_ways_refuse_the_same(config, params, way, options, message):
    with pytest.raises(ValueError, match=message):
        way(config, params, ROWS, **{"max_new_tokens": 2, **options})


def test_a_stream_refuses_beams(config, params):
    message = r"Beam search cannot stream; use generate for Beam\(num_beams=3, .*\)"
    with pytest.raises(ValueError, match=message):
        stream(config, params, ROWS, max_new_tokens=2, sampler=Beam(num_beams=3))


@pytest.mark.parametrize("sampler", [Greedy(), Beam(num_beams=2)], ids=repr)
@pytest.mark.parametrize("width", [10, 13])
@pytest.mark.slow
def test_padding_needs_no_learned_positions(learned, learned_params, sampler, width):
    """Five new tokens on eleven positions: rows of seven fit, however wide the array is."""
    rows = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
    options = dict(max_new_tokens=5, sampler=sampler)
    tight = np.asarray(generate(learned, learned_params, rows, **options))
    assert tight.shape == (2, 12)
    padded, lengths = pad_rows(rows)
    wide = np.pad(padded, [(0, 0), (0, width - 7)], constant_values=17)
    actual = generate(learned, learned_params, wide, lengths=lengths, **options)
    np.testing.assert_array_equal(actual, np.pad(tight, [(0, 0), (0, width - 7)], mode="edge"))


@pytest.mark.slow
def test_a_stream_needs_no_positions_for_padding_either(learned, learned_params):
    wide = np.asarray([[3, 1, 4, 1, 17, 17, 17, 17, 17, 17]])
    options = dict(max_new_tokens=8)
    actual = list(stream(learned, learned_params, wide, lengths=[4], **options))
    expected = generate(learned, learned_params, wide[:, :4], **options)
    np.testing.assert_array_equal(np.stack(actual, axis=-1), expected[:, 4:])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "uint32"])
@pytest.mark.parametrize(
    "sampler",
    [
        Greedy(),
        *(
            pytest.param(sampler, marks=pytest.mark.exhaustive)
            for sampler in (Sample(top_k=1), Beam(num_beams=2))
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_prompts_of_any_integer_dtype_are_continued_alike(config, dtype, sampler):
    """Among 300 ids, of which uint8 does not hold all."""
    config = replace(config, vocab_size=300)
    params = random_params(config)
    rows = np.asarray([[3, 1, 4], [100, 2, 6]])
    options = dict(max_new_tokens=6, sampler=sampler, key=jax.random.key(0))
    expected = generate(config, params, rows, **options)
    assert np.max(expected) > 255
    np.testing.assert_array_equal(generate(config, params, rows.astype(dtype), **options), expected)
    device = jnp.asarray(rows, dtype)
    np.testing.assert_array_equal(generate(config, params, device, **options), expected)
    if not isinstance(sampler, Beam):
        options["stop_tokens"] = ()
        one, other = (
            [np.asarray(x).tolist() for x in stream(config, params, prompts, **options)]
            for prompts in (rows, rows.astype(dtype))
        )
        assert one == other
