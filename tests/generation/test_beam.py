"""Beam search against exhaustive search over a small table of probabilities."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.generation import Beam, beam_search, generate

VOCAB, STEPS, STOP = 4, 4, 3
RNG = np.random.default_rng(3)
# The next token depends on the last two, and on the row of the batch.
TABLE = 2.0 * RNG.normal(size=(2, VOCAB, VOCAB, VOCAB))
FLAT = 0.5 * RNG.normal(size=(16, VOCAB, VOCAB, VOCAB))  # so that many beginnings are close


def log_p(row, before, last, token, table=TABLE):
    logits = table[row, before, last]
    return logits[token] - np.log(np.exp(logits).sum())


def exhaustive(row, length_penalty, stop=STOP):
    """All texts with their scores, the best first."""
    scored = []
    for length in range(1, STEPS + 1):
        for text in product(range(VOCAB), repeat=length):
            ended = text[-1] == stop
            if stop in text[:-1] or not (ended or length == STEPS):
                continue
            total, before, last = 0.0, 0, 0
            for token in text:
                total += log_p(row, before, last, token)
                before, last = last, token
            scored.append((total / length**length_penalty, text))
    return sorted(scored, reverse=True)


def search(num_beams, length_penalty=1.0, stop=((STOP,), (STOP,)), table=TABLE):
    rows, table = jnp.arange(len(table)), jnp.asarray(np.float32(table))

    def step(state, tokens):
        row, before, last = state.T
        new = jnp.stack([row, last, tokens], axis=-1)
        return table[row, last, tokens], new

    start = jnp.stack([rows, 0 * rows, 0 * rows], axis=-1)
    run = jax.jit(
        lambda: beam_search(
            step,
            lambda state, rows: state[rows],
            start,
            table[rows, 0, 0],
            jnp.asarray(stop, jnp.int32),
            num_beams=num_beams,
            max_new_tokens=STEPS,
            length_penalty=length_penalty,
        )
    )
    return run()


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.slow
def test_enough_beams_find_what_exhaustive_search_finds(length_penalty):
    result = search(VOCAB**STEPS, length_penalty)
    for row in range(2):
        best = exhaustive(row, length_penalty)
        for i in range(5):
            score, text = best[i]
            np.testing.assert_allclose(result.scores[row, i], score, rtol=1e-5)
            assert tuple(result.tokens[row, i, : result.lengths[row, i]].tolist()) == text


def by_hand(row, num_beams, length_penalty):
    """The search as its docstring has it, with lists."""
    going, ended, settled = [(0.0, ())], [], False
    for length in range(1, STEPS + 1):
        candidates = []
        for total, text in going:
            before, last = (0, 0, *text)[-2:]
            candidates += [
                (total + log_p(row, before, last, t, FLAT), (*text, t)) for t in range(VOCAB)
            ]
        candidates = sorted(candidates, reverse=True)[: 2 * num_beams]
        if not settled:
            stops = [candidate for candidate in candidates[:num_beams] if candidate[1][-1] == STOP]
            ended += [(total / length**length_penalty, text) for total, text in stops]
            ended = sorted(ended, reverse=True)[:num_beams]
        going = [candidate for candidate in candidates if candidate[1][-1] != STOP][:num_beams]
        full = len(ended) == num_beams
        settled |= full and going[0][0] / length**length_penalty <= ended[-1][0]
    if not settled:
        ended += [(total / STEPS**length_penalty, text) for total, text in going]
    return sorted(ended, reverse=True)[:num_beams]


@pytest.mark.slow
def test_few_beams_find_what_lists_find():
    result = search(2, 0.6, stop=((STOP,),) * len(FLAT), table=FLAT)
    for row in range(len(FLAT)):
        for i, (score, text) in enumerate(by_hand(row, 2, 0.6)):
            np.testing.assert_allclose(result.scores[row, i], score, rtol=1e-5)
            assert tuple(result.tokens[row, i, : result.lengths[row, i]].tolist()) == text


def test_two_beams_find_what_one_misses():
    narrow, wide = search(1), search(3)
    assert np.all(wide.scores[:, 0] >= narrow.scores[:, 0])
    assert np.any(wide.scores[:, 0] > narrow.scores[:, 0])
    for result in (narrow, wide):  # what it claims to have found has that score
        for row in range(2):
            text = tuple(result.tokens[row, 0, : result.lengths[row, 0]].tolist())
            assert result.scores[row, 0] == pytest.approx(
                dict((t, s) for s, t in exhaustive(row, 1.0))[text], rel=1e-5
            )


def test_one_beam_without_stop_is_greedy():
    result = search(1, stop=((-1,), (-1,)))
    for row in range(2):
        before, last = 0, 0
        for token in result.tokens[row, 0].tolist():
            assert token == TABLE[row, before, last].argmax()
            before, last = last, token
    np.testing.assert_array_equal(result.lengths, [[STEPS], [STEPS]])


@pytest.mark.slow
def test_rows_do_not_see_each_other_and_may_stop_at_their_own_tokens():
    both = search(3, stop=((STOP,), (-1,)))
    swapped = search(3, stop=((-1,), (STOP,)))
    np.testing.assert_array_equal(both.tokens[0], search(3).tokens[0])
    np.testing.assert_array_equal(swapped.tokens[1], search(3).tokens[1])
    assert np.all(both.lengths[1] == STEPS)


@pytest.mark.slow
def test_a_model_searches_too(config, params, prompts, form):
    """One beam is greedy; more never give a less likely text; ragged rows equal rows alone."""
    greedy = generate(config, params, prompts, max_new_tokens=4)
    single_beam = generate(config, params, prompts, max_new_tokens=4, sampler=Beam(num_beams=1))
    np.testing.assert_array_equal(single_beam, greedy)
    rows = [prompts[0, :3].tolist(), prompts[1].tolist()]
    beam = Beam(num_beams=3)
    together = generate(config, params, rows, max_new_tokens=4, sampler=beam, stop_tokens=(7,))
    for row, text in enumerate(rows):
        alone = generate(
            config, params, jnp.asarray(text), max_new_tokens=4, sampler=beam, stop_tokens=(7,)
        )
        np.testing.assert_array_equal(together[row, : len(text) + 4], alone)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_beams=0), "num_beams must be positive; got 0"),
        (dict(num_beams=1.5), "num_beams must be an integer; got 1.5"),
        (
            dict(length_penalty=float("nan")),
            "length_penalty must be a finite float32 number; got nan",
        ),
    ],
)
def test_impossible_beams_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Beam(**fields)
