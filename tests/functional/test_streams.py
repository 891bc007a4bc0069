"""Residual streams, against sums of NumPy's in float64, token after token."""

import numpy as np
import pytest

from tests.functional.jitted_functions import F

B, T, N, D, R = 2, 3, 3, 5, 7


def made(**shapes):
    rng = np.random.default_rng(1)
    return rng.normal(size=(B, T, N, D)), {k: rng.normal(size=s) for k, s in shapes.items()}


def rms(x, eps=1e-3):
    return x / np.sqrt((x**2).mean() + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logits(h, w, group, size):
    """One token's numbers of a group of weights."""
    start = [0, N, 2 * N][group]
    kernel, base = w["kernel"][..., start : start + size], w["base"][start : start + size]
    return w["scale"][group] * np.einsum("nd,ndk->k", rms(h), kernel) + base


def divided(matrix, iterations, eps):
    matrix = matrix / (matrix.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdims=True) + eps)
        matrix = matrix / (matrix.sum(0, keepdims=True) + eps)
    return matrix


def as_float32(weights):
    return {name: np.float32(x) for name, x in weights.items()}


@pytest.mark.parametrize("iterations", [1, 4])
@pytest.mark.slow(but=["4"])
def test_manifold_hyper_connections(iterations):
    h, w = made(kernel=(N, D, N * (2 + N)), scale=(3,), base=(N * (2 + N),))
    options = dict(iterations=iterations, eps=0.01, norm_eps=1e-3)
    x, (mixed, out) = F.manifold_hyper_connections(np.float32(h), as_float32(w), **options)
    for at in np.ndindex(B, T):
        token = h[at]
        read, write = (sigmoid(logits(token, w, g, N)) for g in (0, 1))
        mix = np.exp(logits(token, w, 2, N * N).reshape(N, N))
        mix = divided(mix / mix.sum(1, keepdims=True) + 0.01, iterations, 0.01)
        np.testing.assert_allclose(x[at], (read + 0.01) @ token, atol=1e-5)
        np.testing.assert_allclose(mixed[at], mix.T @ token, atol=1e-5)
        np.testing.assert_allclose(out[at], 2 * write, atol=1e-5)


@pytest.mark.slow
def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    matrix = F.sinkhorn(2 * made()[0][..., :N], iterations=100, eps=0.0)
    assert (matrix > 0).all()
    np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(-2), 1, atol=1e-5)


def test_identity_hyper_connections_and_the_sum_at_the_end():
    h, w = made(kernel=(N, D, 2 * N), scale=(2,), base=(2 * N,))
    options = dict(magnitude=1.5, eps=0.01, norm_eps=1e-3)
    x, (streams, out) = F.identity_hyper_connections(np.float32(h), as_float32(w), **options)
    last = {"kernel": w["kernel"][..., :N], "scale": w["scale"][:1], "base": w["base"][:N]}
    end = F.weighted_streams(np.float32(h), as_float32(last), eps=0.01, norm_eps=1e-3)
    np.testing.assert_array_equal(streams, np.float32(h))
    for at in np.ndindex(B, T):
        read, write = (sigmoid(logits(h[at], w, g, N)) for g in (0, 1))
        np.testing.assert_allclose(x[at], (read + 0.01) @ h[at], atol=1e-5)
        np.testing.assert_allclose(out[at], 1.5 * write + 0.01, atol=1e-5)
        np.testing.assert_allclose(end[at], x[at], atol=1e-6)


def test_gated_streams():
    h, w = made(norm=(N, D), down=(N, D, R), up=(R, N, D), write=(N, D, N))
    x, out = F.gated_streams(np.float32(h), as_float32(w), eps=1e-3)
    for at in np.ndindex(B, T):
        normed = np.stack([rms(h[at][i]) * (1 + w["norm"][i]) for i in range(N)])
        down = np.einsum("nd,ndr->r", normed, w["down"]) / N
        gate = sigmoid(np.einsum("r,rnd->nd", down * sigmoid(down), w["up"]))
        np.testing.assert_allclose(x[at], (gate * normed).mean(0), atol=1e-5)
        write = 2 * sigmoid(np.einsum("nd,ndk->k", normed, w["write"]) / N)
        np.testing.assert_allclose(out[at], write, atol=1e-5)


def test_altup_predicts_and_corrects():
    h, w = made(norm=(D,), router=(D, N), predict=(N, N, N), correct=(N, N), output=(B, T, D))
    output = w.pop("output")
    predicted = F.altup_predict(np.float32(h), as_float32(w), eps=1e-3)
    corrected = F.altup_correct(predicted, np.float32(output), as_float32(w), eps=1e-3)

    def router(x):
        return np.tanh(rms(x) * w["norm"] / D @ w["router"])

    for at in np.ndindex(B, T):
        mix = np.einsum("k,kij->ij", router(h[at][0]), w["predict"])
        expected = h[at] + mix @ h[at]
        np.testing.assert_allclose(predicted[at], expected, atol=1e-5)
        share = 1 + router(output[at]) @ w["correct"]
        expected = expected + share[:, None] * (output[at] - expected[0])
        np.testing.assert_allclose(corrected[at], expected, atol=1e-5)


@pytest.mark.slow
def test_vectors_of_one_length():
    x, like = made()[0][:, 0], 3 * made()[0][:, 1]
    y = F.match_length(np.float32(x), np.float32(like))
    np.testing.assert_allclose((y**2).mean(-1), (like**2).mean(-1), rtol=1e-5)
    np.testing.assert_allclose(y / x, (y / x)[..., :1] * np.ones(D), rtol=1e-5)
    tiny = F.match_length(np.full(D, 1e-4, np.float32), np.ones(D, np.float32), eps=1e-2)
    np.testing.assert_allclose(tiny, 1e-3, rtol=1e-5)  # from below, by the root of eps
