"""Linear maps over one or several axes, and dropout."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.matmul_precision import matmul


@typechecked
def linear(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None = None,
    *,
    axes: int = 1,
) -> Float[Array, "..."]:
    """Affine map over the last `axes` axes of x.

        y[*batch, *out] = sum over *in of x[*batch, *in] * kernel[*in, *out] + bias[*out]

    A kernel into heads is ``[D, N, H]``; a kernel out of heads is ``[N, H, D]`` with ``axes=2``.
    All batch axes are flattened into one, because the gradient of a product with two batch axes
    takes twice as long on a CPU.

    Args:
        x: ``[*batch, *in]``, in any float dtype.
        kernel: ``[*in, *out]``, in the dtype of `x`.
        bias: ``[*out]``, in any float dtype.
        axes: Number of axes ``*in``.

    Returns:
        ``[*batch, *out]``, accumulated in float32 by the hardware, in the dtype of `x`.

    Raises:
        ValueError: If the shapes do not match, or the dtypes of `x` and `kernel` differ: promotion
            would run the product in the wider one.
    """
    check_linear(x, kernel, bias, axes=axes)
    out = kernel.shape[axes:]
    batch, features = x.shape[:-axes], math.prod(x.shape[-axes:])
    rows, matrix = x.reshape(math.prod(batch), features), kernel.reshape(features, math.prod(out))
    y = matmul(rows, matrix)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.reshape(-1).astype(x.dtype), y.shape)
    return y.reshape(*batch, *out)


def check_linear(x: Any, kernel: Any, bias: Any = None, *, axes: int = 1) -> None:
    """Check shapes and dtypes of the arguments of `linear`."""
    out = kernel.shape[axes:]
    if not 1 <= axes <= x.ndim or x.shape[-axes:] != kernel.shape[:axes]:
        raise ValueError(
            f"The last {axes} axes of x {x.shape} must equal the first {axes} of kernel "
            f"{kernel.shape}; got {x.shape[x.ndim - axes :]} and {kernel.shape[:axes]}."
        )
    if bias is not None and bias.shape != out:
        raise ValueError(f"bias {bias.shape} must have the output axes {out} of {kernel.shape}.")
    if x.dtype != kernel.dtype:
        raise ValueError(f"Cast kernel to the dtype of x; got {kernel.dtype} and {x.dtype}.")


def check_static(name: str, value: Any) -> None:
    """Check that a number is static, not traced."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} must be a static number, not a traced value: pass it through "
            "static_argnames under jax.jit (it has no gradient)."
        )


def check_dropout(rate: float, key: PRNGKeyArray | None) -> None:
    """Check the dropout rate, and that a nonzero rate has a key."""
    check_static("The dropout rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"Dropout rate must be in [0, 1); got {rate}.")
    if rate != 0 and key is None:
        raise ValueError(f"Dropout at rate {rate} needs a random key.")


@typechecked
def dropout(
    x: Float[Array, "*batch"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "*batch"]:
    """Dropout: zero each number with probability `rate`, divide the others by ``1 - rate``.

    The expectation is `x`, so evaluation, at `rate` 0, needs no rescaling.

    Args:
        x: Any float dtype.
        rate: Probability of dropping, in [0, 1).
        key: Random key, a different one per device under data parallelism; unused, and may be None,
            if `rate` is 0.

    Returns:
        The result in the dtype of `x`; `x` itself if `rate` is 0.

    Raises:
        ValueError: If `rate` is outside [0, 1), or `key` is missing.

    References:
        Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from Overfitting, 2014,
        section 10 (the scaled form)
    """
    check_dropout(rate, key)
    if rate == 0 or key is None:
        return x
    keep_mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    # float32: 1 - rate rounded to bfloat16 would shift the expectation by up to 0.4 %.
    scaled = (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype)
    return jnp.where(keep_mask, scaled, jnp.zeros_like(x))
