"""Differential attention: the difference of two attentions, and its learned factor."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.dot_product import dot_product_attention


@typechecked
def differential_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    factor: float | Float[Array, ""],
    *,
    attention: Callable[..., Array] = dot_product_attention,
) -> Float[Array, "*batch T N//2 2*H"]:
    """Differential attention: of two heads with the same values, one minus a multiple of the other.

        output[t, p] = sum over s of (first[p, t, s] - factor * second[p, t, s]) * values[s]
        values[s] = the value of the pair's first key head, then that of its second

    Key heads 2 k and 2 k + 1 are a pair. Each serves N / K query heads, as in grouped-query
    attention, and query head i of the first is paired with query head i of the second. So noise
    that both attend to cancels.

    Args:
        query: Queries of N heads.
        key: Keys of K heads, an even number.
        value: Values of K heads.
        factor: Factor of the second weights, lambda; see `differential_factor`.
        attention: Attention of all N heads, a function of queries, keys and values: for example
            `dot_product_attention` with a mask.

    Returns:
        The outputs of N / 2 pairs, of width 2 H.

    Raises:
        ValueError: K is odd, or N is no multiple of K.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> query, key = jnp.zeros((1, 2, 3)), jnp.ones((4, 2, 3))  # equal weights
        >>> value = jnp.broadcast_to(jnp.arange(8.0).reshape(4, 2, 1), key.shape)
        >>> F.differential_attention(query, key, value, 0.25)  # 3/4 of the means 3 and 4
        Array([[[2.25, 2.25, 2.25, 3.  , 3.  , 3.  ]]], dtype=float32)

    References:
        Ye et al., Differential Transformer, 2024. arXiv:2410.05258, section 2.1
    """
    (N, H), K = query.shape[-2:], key.shape[-2]
    if K % 2 or N % K:
        raise ValueError(
            "Differential attention needs pairs of key heads, and query heads that are a multiple "
            f"of them; got {N} query heads and {K} key heads."
        )
    pairs = value.reshape(*value.shape[:-2], K // 2, 1, 2 * H)
    pairs = jnp.broadcast_to(pairs, (*value.shape[:-2], K // 2, 2, 2 * H))
    heads = attention(query, key, pairs.reshape(*value.shape[:-1], 2 * H))
    by_pair = heads.reshape(*heads.shape[:-2], K // 2, 2, N // K, 2 * H)
    first, second = by_pair[..., 0, :, :], by_pair[..., 1, :, :]
    difference = first - jnp.asarray(factor, heads.dtype) * second
    return difference.reshape(*heads.shape[:-2], N // 2, 2 * H)


@typechecked
def differential_factor(
    queries: Float[Array, "2 H"], keys: Float[Array, "2 H"], initial: Float[Array, ""]
) -> Float32[Array, ""]:
    """Return the factor of `differential_attention` from learned vectors and its initial value.

        factor = exp(queries[0] @ keys[0]) - exp(queries[1] @ keys[1]) + initial

    Args:
        queries: Two learned vectors.
        keys: Two further learned vectors.
        initial: The factor where the vectors are zero; see `initial_differential_factor`.

    Returns:
        The factor in float32.

    References:
        Ye et al., Differential Transformer, 2024. arXiv:2410.05258, section 2.1
    """
    first, second = jnp.exp(jnp.sum((queries * keys).astype(jnp.float32), axis=-1))
    return first - second + initial.astype(jnp.float32)


@typechecked
def initial_differential_factor(layer: int | Integer[Array, ""]) -> Float32[Array, ""]:
    """Return the initial factor of a layer: from 0.2 in the first to 0.8 in deep ones.

        initial = 0.8 - 0.6 * exp(-0.3 * layer)

    Args:
        layer: Number of the layer, from 0.

    Returns:
        The factor in float32.

    Example:
        >>> from jaxformer import functional as F
        >>> [round(float(F.initial_differential_factor(layer)), 3) for layer in (0, 1, 9)]
        [0.2, 0.356, 0.76]

    References:
        Ye et al., Differential Transformer, 2024. arXiv:2410.05258, section 2.1
    """
    return 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(layer, jnp.float32))
