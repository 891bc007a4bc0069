"""Several residual streams: what a branch reads of them, and the weights of its output."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.norms import rms_norm

Weights = Mapping[str, Float[Array, "..."]]


@typechecked
def sinkhorn(
    logits: Float[Array, "*batch n n"], *, iterations: int = 20, eps: float = 1e-6
) -> Float32[Array, "*batch n n"]:
    """Return matrices whose rows and columns sum to nearly one, from the softmax of the logits.

        C = softmax(logits) + eps;  C = C / (column sums + eps)
        C = C / (row sums + eps);   C = C / (column sums + eps)         iterations - 1 times

    Args:
        logits: Matrices; the softmax is over the last axis.
        iterations: Divisions by the sums of the columns.
        eps: Added to the softmax and to sums.

    Returns:
        The matrices. Their columns sum to one up to eps, their rows up to what iterations leave.

    References:
        Sinkhorn and Knopp, Concerning nonnegative matrices and doubly stochastic matrices, 1967
    """

    def divide(matrix: Array, axis: int) -> Array:
        return matrix / (jnp.sum(matrix, axis, keepdims=True) + eps)

    matrix = divide(jax.nn.softmax(logits.astype(jnp.float32)) + eps, -2)
    both = lambda _, c: divide(divide(c, -1), -2)  # noqa: E731
    return jax.lax.fori_loop(0, iterations - 1, both, matrix)


def _stream_logits(streams: Array, weights: Weights, norm_eps: float) -> list[Array]:
    """Scale * (rms_norm(all streams) @ kernel) + base: for each scale, a number for each weight."""
    n = streams.shape[-2]
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    w = {name: x.astype(jnp.float32) for name, x in weights.items()}
    products = rms_norm(flat, eps=norm_eps) @ w["kernel"].reshape(flat.shape[-1], -1)
    ends = np.cumsum((n, n, n * n))[: w["scale"].size - 1]
    parts = zip(jnp.split(products, ends, axis=-1), jnp.split(w["base"], ends), strict=True)
    return [w["scale"][i] * x + jnp.broadcast_to(b, x.shape) for i, (x, b) in enumerate(parts)]


def _weighted_sum(weights: Array, streams: Array) -> Array:
    """Sum of the streams by float32 weights, in the dtype of the streams."""
    total = jnp.einsum("...n,...nd->...d", weights, streams.astype(jnp.float32))
    return total.astype(streams.dtype)


@typechecked
def weighted_streams(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Float[Array, "*batch T D"]:
    """Return the sum of the streams h by weights that depend on them.

        x = sum over i of (sigmoid(scale * (N kernel) + base) + eps)[i] h[i],  N = rms_norm(h)

    Args:
        streams: The streams of each token; the norm is over the features of all.
        weights: "kernel" [n, D, n], "scale" [1] and "base" [n].
        eps: Added to the weights.
        norm_eps: Epsilon of the norm, which has no scale.

    Returns:
        The sum, computed in float32, in the dtype of the streams.

    References:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025. arXiv:2512.24880; DeepSeek
        V4's released code
    """
    (read,) = _stream_logits(streams, weights, norm_eps)
    return _weighted_sum(jax.nn.sigmoid(read) + eps, streams)


@typechecked
def manifold_hyper_connections(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> tuple[Float[Array, "*batch T D"], tuple[Array, Array]]:
    """Return what a branch reads, the mixed streams, and the weights of its output.

        [p | q | C] = scale * (N kernel) + base,  N = rms_norm(h)
        x = sum over i of (sigmoid(p) + eps)[i] h[i]
        mixed[k] = sum over i of sinkhorn(C)[i, k] h[i]
        weights = 2 sigmoid(q)

    A mixture by `sinkhorn` keeps the sum of the streams, and makes no stream longer than the
    longest. Weights are computed in float32.

    Args:
        streams: The streams h of each token; the norm is over the features of all.
        weights: "kernel" [n, D, n (2 + n)], "scale" [3], and "base" [n (2 + n)].
        iterations: As in `sinkhorn`.
        eps: Added to the weights of reading, and as in `sinkhorn`.
        norm_eps: Epsilon of the norm, which has no scale.

    Returns:
        x, and the pair of the mixed streams ``[*batch, T, n, D]`` and weights ``[*batch, T, n]``.

    References:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025. arXiv:2512.24880, section 4
    """
    n, dtype = streams.shape[-2], streams.dtype
    read, write, mix = _stream_logits(streams, weights, norm_eps)
    logits = mix.reshape(*mix.shape[:-1], n, n)
    matrix = sinkhorn(logits, iterations=iterations, eps=eps).astype(dtype)
    mixed = jnp.einsum("...ik,...id->...kd", matrix, streams)
    x = _weighted_sum(jax.nn.sigmoid(read) + eps, streams)
    return x, (mixed, (2 * jax.nn.sigmoid(write)).astype(dtype))


@typechecked
def identity_hyper_connections(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    magnitude: float = 2.0,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> tuple[Float[Array, "*batch T D"], tuple[Array, Float32[Array, "*batch T n"]]]:
    """Return what a branch reads, the streams, and the weights of its output.

        [p | q] = scale * (N kernel) + base,  N = rms_norm(h)
        x = sum over i of (sigmoid(p) + eps)[i] h[i];  weights = magnitude * sigmoid(q) + eps

    Args:
        streams: The streams h of each token; the norm is over the features of all.
        weights: "kernel" [n, D, 2 n], "scale" [2], and "base" [2 n].
        magnitude: Largest weight of an output.
        eps: Added to all weights.
        norm_eps: Epsilon of the norm, which has no scale.

    Returns:
        x, and the pair of the streams and the weights ``[*batch, T, n]``, in float32.

    References:
        Tencent, Hunyuan 4, 2026 (released code)
    """
    read, write = _stream_logits(streams, weights, norm_eps)
    x = _weighted_sum(jax.nn.sigmoid(read) + eps, streams)
    return x, (streams, magnitude * jax.nn.sigmoid(write) + eps)


@typechecked
def gated_streams(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    eps: float = 1e-6,
) -> tuple[Float[Array, "*batch T D"], Float[Array, "*batch T n"]]:
    """Return a gated mean of the normalised streams, and the weights of a branch's output.

        N[i] = (1 + norm[i]) * rms_norm(h[i])
        A = sigmoid(silu(N down / n) up)                    of each stream and feature
        x = mean over i of A[i] * N[i];  weights = 2 sigmoid(N write / n)

    Args:
        streams: The streams h of each token.
        weights: "norm" [n, D], "down" [n, D, R], "up" [R, n, D] and "write" [n, D, n]; without
            "write" the weights are ones.
        eps: Epsilon of the norm.

    Returns:
        x and the weights ``[*batch, T, n]``.

    References:
        Qwen, Qwen 4 (experimental), 2026 (released code)
    """
    n, dtype = streams.shape[-2], streams.dtype
    w = {name: x.astype(dtype) for name, x in weights.items()}
    normed = rms_norm(streams, 1 + w["norm"].astype(jnp.float32), eps=eps)
    hidden = jax.nn.silu(jnp.einsum("...nd,ndr->...r", normed, w["down"]) / n)
    each = jnp.broadcast_to(hidden[..., None, :], (*streams.shape[:-1], hidden.shape[-1]))
    gate = jax.nn.sigmoid(jnp.einsum("...nr,rnd->...nd", each, w["up"]))  # remat "dots" saves none
    x = jnp.mean(gate * normed, axis=-2)
    if "write" not in w:
        return x, jnp.ones(streams.shape[:-1], dtype)
    return x, 2 * jax.nn.sigmoid(jnp.einsum("...nd,ndk->...k", normed, w["write"]) / n)


@typechecked
def altup_predict(
    streams: Float[Array, "*batch T n D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    eps: float = 1e-6,
) -> Float[Array, "*batch T n D"]:
    """Return the streams that AltUp predicts after a layer, which runs on the first of them.

        P[i] = h[i] + sum over j of (r(h[0]) predict)[i, j] h[j]
        r(x) = tanh(rms_norm(x) * norm / D @ router)

    Args:
        streams: The streams h of each token.
        weights: "norm" [D], "router" [D, n] and "predict" [n, n, n].
        eps: Epsilon of the norm.

    Returns:
        The predicted streams P.

    References:
        Baykal et al., Alternating Updates for Efficient Transformers, 2023. arXiv:2301.13310,
        section 3; weights that depend on the token are Gemma 3n's (released code)
    """
    routed = _altup_router(streams[..., 0, :], weights, eps)
    mix = jnp.einsum("...k,kij->...ij", routed, weights["predict"].astype(streams.dtype))
    return streams + jnp.einsum("...ij,...jd->...id", mix, streams)


@typechecked
def altup_correct(
    predicted: Float[Array, "*batch T n D"],
    output: Float[Array, "*batch T D"],
    weights: Mapping[str, Float[Array, "..."]],
    *,
    eps: float = 1e-6,
) -> Float[Array, "*batch T n D"]:
    """Return the streams after a layer: each moves by a share of what was not predicted.

        h[i] = P[i] + (1 + r(output) correct)[i] (output - P[0])

    with r as in `altup_predict`.

    Args:
        predicted: The streams P that were predicted.
        output: Output of the layer that ran on P[0].
        weights: "norm" [D], "router" [D, n] and "correct" [n, n].
        eps: Epsilon of the norm.

    Returns:
        The streams, ``[*batch, T, n, D]``.

    References:
        As of `altup_predict`.
    """
    routed = _altup_router(output, weights, eps)
    share = 1 + routed @ weights["correct"].astype(output.dtype)
    return predicted + share[..., None] * (output - predicted[..., 0, :])[..., None, :]


def _altup_router(x: Array, weights: Weights, eps: float) -> Array:
    """A number from -1 to 1 for each stream."""
    normed = rms_norm(x, weights["norm"], eps=eps) / x.shape[-1]
    return jnp.tanh(normed @ weights["router"].astype(x.dtype))


@typechecked
def match_length(
    x: Float[Array, "*batch D"], like: Float[Array, "*batch D"], *, eps: float = 1e-5
) -> Float[Array, "*batch D"]:
    """Rescale vectors to the lengths of others: x * rms(like) / sqrt(max(mean(x ** 2), eps)).

    Args:
        x: Vectors.
        like: Vectors of the lengths to have.
        eps: Least mean square of x that is divided by.

    Returns:
        The vectors, in the dtype of x.
    """
    mean = lambda y: jnp.mean(jnp.square(y.astype(jnp.float32)), -1, keepdims=True)  # noqa: E731
    length = jnp.sqrt(mean(like)) * jax.lax.rsqrt(jnp.maximum(mean(x), eps))
    return (x.astype(jnp.float32) * length).astype(x.dtype)
