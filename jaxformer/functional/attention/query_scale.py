"""Scales of queries by position."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Integer

from jaxformer.functional.argument_checks import typechecked


@typechecked
def query_scale(
    positions: Integer[Array, "*batch T"], *, beta: float, original_max_length: int
) -> Float32[Array, "*batch T"]:
    """Factor of queries that grows with the position, for contexts longer than in training.

        scale[t] = 1 + beta * ln(1 + floor(positions[t] / original_max_length))

    Scores of many keys would otherwise give ever flatter weights. Positions below 0 have factor 1.

    Args:
        positions: Positions of the queries.
        beta: Growth of the factor with the logarithm.
        original_max_length: Context length in training; up to it the factor is 1.

    Returns:
        The factors in float32.

    Raises:
        ValueError: If ``original_max_length`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> positions = jnp.array([0, 4095, 4096, 8192])
        >>> F.query_scale(positions, beta=0.1, original_max_length=4096).round(3)
        Array([1.   , 1.   , 1.069, 1.11 ], dtype=float32)

    References:
        Nakanishi, Scalable-Softmax Is Superior for Attention, 2025. arXiv:2501.19399, which Llama 4
        cites for a factor of this form
    """
    if original_max_length < 1:
        raise ValueError(f"original_max_length must be positive; got {original_max_length}.")
    periods = jnp.maximum(positions // original_max_length, 0)
    return 1 + beta * jnp.log1p(periods.astype(jnp.float32))


@typechecked
def query_power(
    positions: Integer[Array, "*batch T"], *, exponent: float, length: int
) -> Float32[Array, "*batch T"]:
    """Factor of queries that grows with every key that they may see.

        scale[t] = (1 + (positions[t] + 1) / length) ** exponent

    As `query_scale`, it keeps weights over many keys from flattening, without steps and from the
    first position on. Positions below 0 have factor 1.

    Args:
        positions: Positions of the queries.
        exponent: Growth of the logarithm of the factor with the logarithm of the number of keys.
        length: Number of keys whose factor is 2 ** exponent.

    Returns:
        The factors in float32.

    Raises:
        ValueError: If ``length`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.query_power(jnp.array([2, 14]), exponent=0.5, length=1)
        Array([2., 4.], dtype=float32)

    References:
        Nakanishi, Scalable-Softmax Is Superior for Attention, 2025. arXiv:2501.19399, for factors
        that grow with the number of keys; Reflection AI, Beam 1.0, 2026 (released code)
    """
    if length < 1:
        raise ValueError(f"length must be positive; got {length}.")
    keys = jnp.maximum(positions + 1, 0).astype(jnp.float32)
    return jnp.exp(exponent * jnp.log1p(keys / length))
