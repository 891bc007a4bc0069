"""Operands for bfloat16 matrix products that accumulate in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.platforms import target_platform


def float32_matmul_operands(
    x: Float[Array, "..."], y: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return operands for `preferred_element_type=float32`; upcasts them where XLA needs it.

    Up to JAX 0.8.2, XLA for CPUs rejects some such products of bfloat16 ("Unsupported element type
    for DotThunk"). Upcast to float32, the operands give the same result.

    Args:
        x: In any float dtype.
        y: In any float dtype.

    Returns:
        The operands, with the same values.
    """
    if jax.__version_info__ >= (0, 8, 3) or target_platform() != "cpu":
        return x, y
    return _upcast_bfloat16(x), _upcast_bfloat16(y)


def _upcast_bfloat16(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
