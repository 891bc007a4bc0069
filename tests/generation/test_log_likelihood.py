"""What a model makes of given texts: as the softmax of its logits says, token by token."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.config import Encoder
from jaxformer.generation import log_likelihoods, rolling_windows
from jaxformer.parallel import MeshConfig, make_mesh
from tests.small_models import TINY_LLAMA, float64_log_probs, random_params

CONTEXTS = [[5, 1, 9], [7], [2, 8, 6, 4, 5, 3, 7, 1, 2], [3, 3]]
CONTINUATIONS = [[4, 4], [1, 2, 3, 4, 5, 6, 7], [9], [8, 1, 1]]


def by_hand(params, context, continuation, length):
    """Of one text at a time, and whether each token is the likeliest."""
    tokens = [*context, *continuation][-length - 1 :]
    log_probs = float64_log_probs(TINY_LLAMA, params, tokens[:-1])[-len(continuation) :]
    value = log_probs[np.arange(len(continuation)), continuation].sum()
    return value, (log_probs.argmax(axis=-1) == continuation).all()


@pytest.mark.parametrize("length", [7, 64])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.slow
def test_likelihoods_are_those_of_the_softmax(length, batch_size):
    params = random_params(TINY_LLAMA)
    best = int(float64_log_probs(TINY_LLAMA, params, [7])[0].argmax())
    requests = [*zip(CONTEXTS, CONTINUATIONS, strict=True), ([7], [best]), ([7], [])]
    scores = list(
        log_likelihoods(TINY_LLAMA, params, requests, max_length=length, batch_size=batch_size)
    )
    for (context, continuation), (value, greedy) in zip(requests[:-1], scores, strict=False):
        expected = by_hand(params, context, continuation, length)
        np.testing.assert_allclose(value, expected[0], rtol=2e-5)
        assert greedy == expected[1]
    assert scores[-2].is_greedy and scores[-1] == (0.0, True)
    assert not any(score.is_greedy for score in scores[:-2])


def test_more_texts_than_are_looked_at_together_keep_their_order(monkeypatch):
    monkeypatch.setattr("jaxformer.generation.log_likelihood.SORT_BUFFER_BATCHES", 2)
    params = random_params(TINY_LLAMA)
    requests = [([1 + i % 5] * (1 + i % 11), [i % 13, 4]) for i in range(23)]
    scores = list(log_likelihoods(TINY_LLAMA, params, iter(requests), max_length=64, batch_size=4))
    expected = [by_hand(params, *request, 64)[0] for request in requests]
    np.testing.assert_allclose([score.log_probability for score in scores], expected, rtol=2e-5)


@pytest.mark.parametrize(
    "sizes", [dict(tensor=4), dict(fsdp=2, context=2, tensor=2), dict(data=2, fsdp=4)], ids=str
)
@pytest.mark.slow
def test_likelihoods_on_many_devices_are_those_on_one(sizes):
    params, requests = random_params(TINY_LLAMA), list(zip(CONTEXTS, CONTINUATIONS, strict=True))
    requests += [(context, [c]) for context in CONTEXTS for c in range(40)]
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod([*sizes.values()]))])
    one, many = (
        list(log_likelihoods(TINY_LLAMA, params, requests, max_length=32, mesh=m))
        for m in (None, mesh)
    )
    np.testing.assert_allclose([x[0] for x in many], [x[0] for x in one], rtol=2e-5)
    assert [x[1] for x in many] == [x[1] for x in one] and any(x[1] for x in one)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (50, 7)])
@pytest.mark.parametrize("begin", [1, 7, 12])
@pytest.mark.parametrize("count", [1, 2, 8, 9, 10, 31])
def test_windows_say_each_token_once_with_all_that_can_be_read_before(count, begin, length, stride):
    tokens, targets = list(range(count)), []
    windows = rolling_windows(tokens, max_length=length, stride=stride, start=begin)
    for i, (context, continuation) in enumerate(windows):
        assert len(continuation) <= (max(stride, length + 1 - begin) if i == 0 else stride)
        first = continuation[0]
        assert list(context) == tokens[max(0, continuation[-1] - length) : first] and context
        targets += continuation
    assert targets == tokens[begin:]


def test_what_has_no_likelihood_is_refused():
    params = random_params(TINY_LLAMA)
    encoder = replace(TINY_LLAMA, topology=Encoder())
    for message, config, request, options in (
        ("need a Decoder; got Encoder", encoder, ([1], [2]), {}),
        ("A context must have at least one token", TINY_LLAMA, ([], [2]), {}),
        ("has 5 tokens, more than max_length=4", TINY_LLAMA, ([1], [2] * 5), {"max_length": 4}),
        (
            r"max_length must be an integer of at least 1; got 0",
            TINY_LLAMA,
            ([1], [2]),
            {"max_length": 0},
        ),
    ):
        with pytest.raises(ValueError, match=message):
            list(log_likelihoods(config, params, [request], **{"max_length": 9, **options}))
    with pytest.raises(ValueError, match=r"stride must be an integer in \[1, 8\]; got 9"):
        list(rolling_windows([1, 2], max_length=8, stride=9))
