"""Scaled dot-product attention: one head, and all heads with a choice of implementation."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.blockwise import blockwise_attention
from jaxformer.functional.attention.dispatch import Implementation, choose_implementation
from jaxformer.functional.attention.heads import vectorize_heads, weights_shape
from jaxformer.functional.attention.kernels import (
    AttentionRequest,
    cudnn_attention,
    splash_attention,
)
from jaxformer.functional.attention.lazy_masks import (
    AttentionBias,
    AttentionMask,
    check_arrays,
    materialize,
)
from jaxformer.functional.attention.scores import (
    Normalizer,
    attention_scores,
    check_score_options,
    resolve_scale,
)
from jaxformer.functional.linear import dropout
from jaxformer.functional.matmul_precision import float32_matmul
from jaxformer.functional.platforms import target_platform


@typechecked
def attend(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    value: Float[Array, "S Hv"],
    mask: Bool[Array, "T S"] | None = None,
    bias: Float[Array, "T S"] | None = None,
    dropout_multipliers: Float[Array, "T S"] | None = None,
    sink: Float[Array, ""] | None = None,
    *,
    scale: float | Float[Array, ""],
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
) -> Float[Array, "T Hv"]:
    """Attention of one head: the weighted mean of the values for each query.

        scores = scale * query @ key.T
        scores = c * tanh(scores / c)                        c = logit_softcap, if any
        weights = softmax(scores + bias over the keys that mask allows)
        output = (weights * multipliers) @ value

    Args:
        query: Queries of T positions.
        key: Keys of S positions.
        value: Values of S positions.
        mask: True where the query may attend to the key. None allows every pair.
        bias: Added to the capped scores.
        dropout_multipliers: Factors of the weights, from dropout.
        sink: Score of a further key whose value is zero.
        scale: Multiplies the dot products, usually ``H ** -0.5``.
        logit_softcap: Bound on the absolute score.
        normalizer: How scores become weights; see `dot_product_attention`.

    Returns:
        The mean values, in the dtype of ``query``. Zero for a query that may attend to nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> query = jnp.array([[0.0, 0.0], [100.0, 0.0]])
        >>> key = jnp.array([[1.0, 0.0], [0.0, 1.0]])
        >>> value = jnp.array([[10.0], [20.0]])
        >>> F.attend(query, key, value, scale=2**-0.5)  # the mean; the first value
        Array([[15.],
               [10.]], dtype=float32)

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3.2.1
    """
    check_score_options(normalizer, logit_softcap, sinks=sink)
    options: Any = dict(scale=scale, logit_softcap=logit_softcap, normalizer=normalizer)
    weights = _head_weights(query, key, mask, bias, sink, **options)
    if dropout_multipliers is not None:
        weights = weights * dropout_multipliers.astype(jnp.float32)
    return float32_matmul(weights.astype(value.dtype), value).astype(query.dtype)


@typechecked
def dot_product_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: Bool[Array, "..."] | AttentionMask | None = None,
    bias: Float[Array, "..."] | AttentionBias | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch T N Hv"]:
    """Multi-head, grouped-query or multi-query attention; picks an implementation.

        output[t, n] = sum over s of weights[n, t, s] * value[s, n // (N // K)]

    Multi-head attention has K = N, multi-query attention K = 1, grouped-query attention any K
    between that divides N. Keys and values are never repeated.

    Scores and softmax are float32; the product of weights and values has the values' dtype, with
    float32 accumulation. A query without visible keys gives zero and no gradient. Masked keys and
    values may be any finite number, but not infinity or NaN.

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads. Their width may differ from the keys'.
        mask: True where the query may attend to the key. None allows every pair. With as many axes
            as ``query`` it broadcasts to ``[*batch, N, T, S]``; with fewer it has no axis for heads
            and broadcasts to ``[*batch, T, S]``. (So ``[N, T, S]`` for a batch is ``mask[None]``.)
            Or an `AttentionMask`, so that no such array need exist.
        bias: Added to the scores after scale and cap; broadcasts to ``[*batch, N, T, S]``. Must be
            finite: to forbid a pair use ``mask``. Or an `attention_bias`.
        scale: Multiplies the dot products. None is ``H ** -0.5``; T5 uses 1. It may be a
            scalar array, such as a learned one, which multiplies the queries first.
        logit_softcap: Keep scores inside ``(-c, c)`` by ``c * tanh(scores / c)``, as Gemma 2 does.
        normalizer: "softmax", or "relu": positive scores divided by their sum, so that a query
            with no positive score gives zero.
        dropout_rate: Probability of a weight being set to zero; the others are scaled up.
        dropout_key: Random key of dropout.
        sinks: A score per query head, of a key whose value is zero and that every query meets:
            ``weights[n, t, s] = exp(scores[s]) / (exp(sinks[n]) + sum(exp(scores)))``. It is
            neither scaled nor capped. Needs a softmax.
        implementation: "xla" multiplies whole matrices of scores; "blockwise" is
            `blockwise_attention`; "cudnn" and "splash" are kernels of NVIDIA GPUs and of TPUs.
            These take an `AttentionMask` and an `attention_bias`, not arrays. "auto" picks the
            platform's kernel if it supports the call, else "blockwise" if there are many scores,
            else "xla". Only "xla" supports `jax.jvp`.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, an option is out of range, or the implementation does not
            support the call.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> query = jnp.ones((2, 4, 6, 8))  # [batch, time, heads, width]
        >>> key = jnp.ones((2, 4, 3, 8))  # two query heads share each key head
        >>> value = jnp.broadcast_to(jnp.arange(4.0)[:, None, None], key.shape)
        >>> mask = F.causal_mask(jnp.arange(4), jnp.arange(4))
        >>> output = F.dot_product_attention(query, key, value, mask)
        >>> output.shape
        (2, 4, 6, 8)
        >>> output[0, :, 0, 0]  # equal scores: the mean of the values so far
        Array([0. , 0.5, 1. , 1.5], dtype=float32)

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3.2
        Shazeer, Fast Transformer Decoding: One Write-Head is All You Need, 2019. arXiv:1911.02150
        Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
        Checkpoints, 2023. arXiv:2305.13245, section 2.2
        Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024.
        arXiv:2408.00118, section 2 (the soft cap)
        Zhang, Titov and Sennrich, Sparse Attention with Linear Units, 2021. arXiv:2104.07012
        (ReLU for softmax, there with a norm in place of the division)
        Agarwal et al., gpt-oss-120b & gpt-oss-20b Model Card, 2025. arXiv:2508.10925, section 2.2
        (sinks)
    """
    check_arrays(query, key, mask, bias)
    check_score_options(normalizer, logit_softcap, dropout_rate, dropout_key, sinks)
    query, scale = resolve_scale(query, scale)
    request = AttentionRequest(mask, bias, logit_softcap, normalizer, dropout_rate)
    options: Any = dict(scale=scale, logit_softcap=logit_softcap)
    lazy_mask, lazy_bias = cast(Any, mask), cast(Any, bias)
    match choose_implementation(query, key, value, implementation, request):
        case "blockwise":
            options |= dict(normalizer=normalizer, sinks=sinks)
            options |= dict(dropout_rate=dropout_rate, dropout_key=dropout_key)
            return blockwise_attention(query, key, value, lazy_mask, lazy_bias, **options)
        case "cudnn":
            return cudnn_attention(query, key, value, lazy_mask, scale=scale, sinks=sinks)
        case "splash":
            return splash_attention(query, key, value, lazy_mask, sinks=sinks, **options)
    one_head = partial(attend, normalizer=normalizer, **options)
    arrays: dict[str, Array | None] = {"value": value, "bias": materialize(bias), "sink": sinks}
    arrays["mask"] = materialize(mask, num_axes=query.ndim)
    if dropout_rate != 0.0:
        ones = jnp.ones(weights_shape(query, key), jnp.float32)
        arrays["dropout_multipliers"] = dropout(ones, dropout_rate, dropout_key)
    num_queries, copies = query.shape[-3], num_query_copies(query, key)
    queries = jnp.broadcast_to(query, (*query.shape[:-3], copies, *query.shape[-2:]))
    output = vectorize_heads(one_head, "(t,v)", queries, key, **arrays)[..., :num_queries, :]
    return jnp.moveaxis(output, -2, -4).reshape(*query.shape[:-1], value.shape[-1])


def num_query_copies(query: Array, key: Array) -> int:
    """Copies of a single query, on a TPU: at least 8 query rows per key head; otherwise T.

    With fewer rows, XLA uses the vector unit, in float32, and pads keys to twice their size.
    """
    (T, N), K = query.shape[-3:-1], key.shape[-2]
    return -(-8 * K // N) if T == 1 and target_platform() == "tpu" else T


@typechecked
def attention_weights(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    mask: Bool[Array, "..."] | AttentionMask | None = None,
    bias: Float[Array, "..."] | AttentionBias | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    sinks: Float[Array, " N"] | None = None,
) -> Float32[Array, "*batch N T S"]:
    """Return the attention weights of all heads, float32.

        weights[n, t] = softmax(scale * query[t, n] @ key[:, n // (N // K)].T + bias[n, t])

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        mask: As in `dot_product_attention`.
        bias: As in `dot_product_attention`.
        scale: As in `dot_product_attention`.
        logit_softcap: As in `dot_product_attention`.
        normalizer: As in `dot_product_attention`.
        sinks: As in `dot_product_attention`.

    Returns:
        Weights in float32, whatever the inputs' dtype, so that rows sum to 1; with sinks to less.

    Raises:
        ValueError: Shapes do not fit, or an option is out of its range.
    """
    check_arrays(query, key, mask, bias)
    check_score_options(normalizer, logit_softcap, sinks=sinks)
    query, scale = resolve_scale(query, scale)
    one_head = partial(
        _head_weights, scale=scale, logit_softcap=logit_softcap, normalizer=normalizer
    )
    arrays = {"mask": materialize(mask, num_axes=query.ndim), "bias": materialize(bias)}
    arrays["sink"] = sinks
    weights = vectorize_heads(one_head, "(t,s)", query, key, **arrays)
    return weights.reshape(weights_shape(query, key))


def _head_weights(
    query: Float[Array, "T H"],
    key: Float[Array, "S H"],
    mask: Bool[Array, "T S"] | None = None,
    bias: Float[Array, "T S"] | None = None,
    sink: Float[Array, ""] | None = None,
    *,
    scale: float | Float[Array, ""],
    logit_softcap: float | None,
    normalizer: Normalizer,
) -> Float32[Array, "T S"]:
    scores = attention_scores(query, key, bias, scale=scale, logit_softcap=logit_softcap)
    mask = jnp.ones(scores.shape, bool) if mask is None else mask
    match normalizer:
        case "softmax":
            # A finite stand-in for minus infinity keeps NaN out of rows without any key, backwards
            # too; the outer selection removes the equal weights that softmax gives such rows.
            scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
            weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
            if sink is None:
                return weights
            lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            return weights * jax.nn.sigmoid(lse - sink.astype(jnp.float32))
        case "relu":
            positive = jnp.where(mask, jax.nn.relu(scores), 0.0)
            total = jnp.sum(positive, axis=-1, keepdims=True)
            return positive / jnp.where(total > 0, total, 1.0)
