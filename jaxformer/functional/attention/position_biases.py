"""Attention biases from relative positions: ALiBi, T5, FIRE, Transformer-XL."""

import bisect
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.masks import broadcast_pairs
from jaxformer.functional.embeddings import embed
from jaxformer.functional.sinusoidal import sinusoidal_positions


@typechecked
def alibi_slopes(num_heads: int) -> Float[Array, " {num_heads}"]:
    """ALiBi slope of each head, a geometric series.

        slopes[h] = 2 ** (-8 * (h + 1) / n),    n the largest power of two up to num_heads

    Heads beyond ``n`` take every other slope of the series for ``2 * n``, from its first.

    Args:
        num_heads: Any positive number.

    Returns:
        Score lost per position of distance, float32.

    Raises:
        ValueError: If ``num_heads`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.alibi_slopes(4)
        Array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
        >>> F.alibi_slopes(6)  # the last two stand between the slopes of a larger power of two
        Array([0.25      , 0.0625    , 0.015625  , 0.00390625, 0.5       ,
               0.125     ], dtype=float32)

    References:
        Press et al., Train Short, Test Long: Attention with Linear Biases Enables Input Length
        Extrapolation, 2021. arXiv:2108.12409, section 3; other head counts are as in BLOOM
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be positive; got {num_heads}.")
    n = 2 ** math.floor(math.log2(num_heads))
    series = np.arange(1, n + 1) / n
    between = np.arange(1, 2 * n, 2) / (2 * n)
    exponents = np.concatenate([series, between[: num_heads - n]])
    return jnp.asarray(2.0 ** (-8 * exponents), jnp.float32)


@typechecked
def alibi_bias(
    slopes: Float[Array, " N"],
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
) -> Float[Array, "*batch N T S"]:
    """ALiBi bias: -slope * distance.

        bias[h, i, j] = -slopes[h] * abs(query_positions[i] - key_positions[j])

    Under a causal mask this is the paper's ``-(i - j)``. Add it to the scores after their scale,
    1 / sqrt(head_dim). It holds T * S numbers per head.

    Args:
        slopes: From `alibi_slopes`.
        query_positions: Absolute positions of the queries.
        key_positions: Absolute positions of the keys.

    Returns:
        Terms to add to the scores, float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> slopes = F.alibi_slopes(8)[:2]  # of the first two heads
        >>> F.alibi_bias(slopes, jnp.array([3]), jnp.arange(4))[:, 0]  # of a query at 3
        Array([[-1.5 , -1.  , -0.5 , -0.  ],
               [-0.75, -0.5 , -0.25, -0.  ]], dtype=float32)

    References:
        Press et al., Train Short, Test Long: Attention with Linear Biases Enables Input Length
        Extrapolation, 2021. arXiv:2108.12409, section 3
    """
    queries, keys = broadcast_pairs(query_positions, key_positions)
    distance = jnp.abs(queries - keys)
    distance = distance[..., None, :, :].astype(jnp.float32)
    # Not einsum: some accelerators would round the distance to bfloat16.
    slopes = slopes.astype(jnp.float32)[:, None, None]
    return -jnp.broadcast_to(slopes, (*distance.shape[:-3], *slopes.shape)) * distance


@typechecked
def relative_position_buckets(
    relative_positions: Int[Array, "*batch"],
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Array, "*batch"]:
    """T5 bucket of each relative position: exact for small distances, logarithmic above.

        n = num_buckets, or half of it for each sign if bidirectional;  exact = n // 2
        bucket = distance                                               if distance < exact
               = exact + floor((n - exact) * log_ratio), at most n - 1  otherwise
        log_ratio = log(distance / exact) / log(max_distance / exact)

    Computed in integers: the bucket edges are found once, exactly, so that all devices agree.

    Args:
        relative_positions: Key position minus query position, signed.
        bidirectional: True for encoders: keys to the right have the upper half of the buckets.
            False for decoders: all keys to the right share bucket zero.
        num_buckets: Rows of the bias table.
        max_distance: From here on, all distances share the last bucket.

    Returns:
        Row numbers of the bias table, int32.

    Raises:
        ValueError: There are too few buckets, or ``max_distance`` is too small for them.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> distances = jnp.array([0, -1, -15, -16, -17, -50, -127, -1000])
        >>> F.relative_position_buckets(distances, bidirectional=False)
        Array([ 0,  1, 15, 16, 16, 24, 31, 31], dtype=int32)
        >>> F.relative_position_buckets(jnp.array([-1, 0, 1]), bidirectional=True)
        Array([ 1,  0, 17], dtype=int32)

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer, 2019. arXiv:1910.10683, section 2.1
    """
    n = num_buckets // 2 if bidirectional else num_buckets
    num_exact_buckets = n // 2
    if num_exact_buckets < 1:
        least = 4 if bidirectional else 2
        raise ValueError(f"num_buckets must be at least {least}; got {num_buckets}.")
    if max_distance <= num_exact_buckets:
        raise ValueError(
            f"max_distance must exceed the {num_exact_buckets} distances that have a bucket of "
            f"their own; got {max_distance}."
        )
    num_log_buckets = n - num_exact_buckets
    relative_positions = relative_positions.astype(jnp.int32)
    distance = jnp.abs(relative_positions) if bidirectional else -jnp.minimum(relative_positions, 0)
    bucket = jnp.minimum(distance, num_exact_buckets)
    for k in range(1, num_log_buckets):
        # The first distance d with (d / exact) ** wide >= (max_distance / exact) ** k.
        power = num_exact_buckets ** (num_log_buckets - k) * max_distance**k
        edge = bisect.bisect_left(range(max_distance), power, key=lambda d: d**num_log_buckets)
        bucket += (distance >= edge).astype(jnp.int32)
    return bucket + n * (relative_positions > 0).astype(jnp.int32) if bidirectional else bucket


@typechecked
def relative_position_bias(
    table: Float[Array, "buckets N"], buckets: Integer[Array, "*batch T S"]
) -> Float[Array, "*batch N T S"]:
    """Look up the learned bias of each head and bucket.

        bias[h, i, j] = table[buckets[i, j], h]

    T5 adds it to unscaled scores and shares one table among the layers of a stack.

    Args:
        table: Learned; one row per bucket.
        buckets: From `relative_position_buckets`.

    Returns:
        Terms to add to the scores, in the dtype of the table; NaN where the table has no such row.

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer, 2019. arXiv:1910.10683, section 2.1
    """
    return jnp.moveaxis(embed(table, buckets), -1, -3)


@typechecked
def t5_bias(
    table: Float[Array, "buckets N"],
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    *,
    bidirectional: bool,
    max_distance: int = 128,
) -> Float[Array, "*batch N T S"]:
    """T5 relative position bias between queries and keys.

    Args:
        table: Learned; one row per bucket.
        query_positions: Absolute positions of the queries.
        key_positions: Absolute positions of the keys.
        bidirectional: As in `relative_position_buckets`.
        max_distance: As in `relative_position_buckets`.

    Returns:
        Terms to add to the scores, in the dtype of the table.

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer, 2019. arXiv:1910.10683, section 2.1
    """
    queries, keys = broadcast_pairs(query_positions, key_positions)
    buckets = relative_position_buckets(
        keys - queries,
        bidirectional=bidirectional,
        num_buckets=table.shape[0],
        max_distance=max_distance,
    )
    return relative_position_bias(table, buckets)


@typechecked
def fire_bias(
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    *,
    hidden_kernel: Float[Array, "1 F"],
    hidden_bias: Float[Array, " F"],
    out_kernel: Float[Array, "F N"],
    out_bias: Float[Array, " N"],
    c: Float[Array, ""],
    length: Float[Array, ""],
) -> Float[Array, "*batch N T S"]:
    """FIRE bias: a small MLP of the normalised log-distance, for each head.

        bias[:, i, j] = relu(x[i, j] @ hidden_kernel + hidden_bias) @ out_kernel + out_bias
        x[i, j] = log(abs(c d) + 1) / (log(abs(c p) + 1) + 1e-6)
        d = query_positions[i] - key_positions[j];    p = max(query_positions[i], abs(length))

    Under a causal mask x stays between 0 and 1 however long the text: from position `length` on,
    distances are taken relative to the query's position. It holds T * S * F numbers.

    Args:
        query_positions: Absolute positions of the queries.
        key_positions: Absolute positions of the keys.
        hidden_kernel: Kernel of the hidden layer.
        hidden_bias: Bias of the hidden layer.
        out_kernel: Kernel from the hidden layer to heads.
        out_bias: Bias of each head.
        c: Compression of the logarithm, initially 0.1.
        length: Positions before this share one scale, initially 512.

    Returns:
        Terms to add to the scores, float32.

    References:
        Li et al., Functional Interpolation for Relative Positions Improves Long Context
        Transformers, 2023. arXiv:2310.04418, section 3 and the code of appendix E
    """
    queries, keys = broadcast_pairs(query_positions, key_positions)
    distance = (queries - keys).astype(jnp.float32)
    normalizer_distance = jnp.maximum(queries.astype(jnp.float32), jnp.abs(length))

    def compressed(x: Array) -> Array:
        return jnp.log1p(jnp.abs(c * x))

    x = compressed(distance) / (compressed(normalizer_distance) + 1e-6)
    shape = (*x.shape, hidden_bias.shape[0])
    kernel, bias = (jnp.broadcast_to(p, shape) for p in (hidden_kernel[0], hidden_bias))
    hidden = jax.nn.relu(x[..., None] * kernel + bias)
    highest = jax.lax.Precision.HIGHEST
    network_output = jnp.einsum("...tsf,fn->...nts", hidden, out_kernel, precision=highest)
    return network_output + jnp.broadcast_to(out_bias[:, None, None], network_output.shape)


@typechecked
def transformer_xl_bias(
    query: Float[Array, "*batch T N H"],
    kernel: Float[Array, "D N H"],
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    *,
    base: float = 10_000.0,
    bidirectional: bool = False,
) -> Float[Array, "*batch N T S"]:
    """Transformer-XL position scores: query times projected sinusoid of the distance.

        bias[n, i, j] = sum over h of query[i, n, h] * (kernel.T @ s)[n, h]
        s = sinusoidal_positions(query_positions[i] - key_positions[j], layout="halves")

    Transformer-XL adds a learned vector v to the queries before, and the scale of the scores
    multiplies this term too. There are no more distances than keys, so every distance is projected
    once, or the query is, whichever takes fewer operations.

    Args:
        query: Queries of N heads.
        kernel: Kernel from D sinusoids to the features of each head.
        query_positions: Absolute positions of the queries.
        key_positions: Absolute positions of the keys. Positions of a sequence follow each other
            without gaps, so that no distance within it reaches S.
        base: Ratio of the longest wavelength of the sinusoids to the shortest, nearly.
        bidirectional: Whether keys after the query have a distance too (encoders); otherwise they
            must be masked, and get an arbitrary finite number.

    Returns:
        Terms to add to the scores, float32. NaN for a distance of S or more.

    References:
        Dai et al., Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, 2019.
        arXiv:1901.02860, section 3.3
    """
    *batch, _, _, _ = query.shape
    length = key_positions.shape[-1]
    least = 1 - length if bidirectional else 0
    distances = jnp.arange(least, length)
    waves = sinusoidal_positions(distances, kernel.shape[0], base=base, layout="halves")
    query, kernel = (x.astype(jnp.float32) for x in (query, kernel))
    by_distance = jnp.einsum("...tnh,dnh,cd->...ntc", query, kernel, waves, optimize="optimal")
    queries, keys = broadcast_pairs(query_positions, key_positions)
    distance = queries - keys
    distance = jnp.broadcast_to(distance, (*batch, *distance.shape[-2:]))[..., None, :, :]
    row = jnp.clip(distance, least, length - 1) - least
    row = jnp.broadcast_to(row, (*by_distance.shape[:-1], length))
    bias = jnp.take_along_axis(by_distance, row, axis=-1)
    in_range = distance < length
    if bidirectional:
        in_range &= distance > -length
    return jnp.where(in_range, bias, jnp.nan)
