"""Matrix products of bfloat16 that accumulate in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxformer.functional.platforms import target_platform


def matmul(rows: Float[Array, "B D"], matrix: Float[Array, "D F"]) -> Float[Array, "B F"]:
    """Matrix product, accumulated in float32 and rounded to the dtype of the operands.

        y = rows @ matrix

    On a CPU, XLA multiplies bfloat16 only with a float32 result and two or more rows; otherwise it
    copies the matrix as float32 first, which takes ten times as long for one row. On a GPU it
    stores all products of one row, for a matrix of up to 1e7 numbers, before it sums them.

    Args:
        rows: In any float dtype.
        matrix: In the same dtype.

    Returns:
        The product in the same dtype.
    """
    # A plan in float32 asks for no device.
    in_bfloat16_on_cpu = rows.dtype == jnp.bfloat16 and target_platform() == "cpu"
    num_rows = len(rows)
    if num_rows == 1 and (in_bfloat16_on_cpu or target_platform() == "gpu"):
        rows = jnp.pad(rows, [(0, 1), (0, 0)])
    # Not elsewhere: the transpose of a float32 result multiplies float32 cotangents with bfloat16
    # operands, so the backward pass could not use bfloat16 matrix units.
    dtype = jnp.float32 if in_bfloat16_on_cpu else None
    operands = float32_matmul_operands(rows, matrix) if in_bfloat16_on_cpu else (rows, matrix)
    return jnp.matmul(*operands, preferred_element_type=dtype)[:num_rows].astype(matrix.dtype)


def float32_matmul(
    x: Float[Array, "... T D"], y: Float[Array, "... D F"]
) -> Float32[Array, "... T F"]:
    """Matrix product of numbers in any float dtype, accumulated and returned in float32."""
    return jnp.matmul(*float32_matmul_operands(x, y), preferred_element_type=jnp.float32)


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
