"""Layer norm, RMS norm and batch norm, with float32 statistics."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.functional.argument_checks import typechecked


def _check_eps(eps: float) -> None:
    if isinstance(eps, float | int) and not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps}.")


def check_trailing_axes(name: str, array: Array, x: Array) -> None:
    """Check that the array's axes equal the last axes of x, without broadcasting."""
    for i in range(1, min(array.ndim, x.ndim) + 1):
        if array.shape[-i] != x.shape[-i]:
            raise ValueError(
                f"{name} has {array.shape[-i]} in axis {array.ndim - i} of its shape "
                f"{array.shape}, but x has {x.shape[-i]} in axis {x.ndim - i} of {x.shape}."
            )
    if array.ndim > x.ndim:
        raise ValueError(f"{name} has more axes, shape {array.shape}, than x, {x.shape}.")


def _affine(
    y: Float[Array, "..."], scale: Float[Array, "..."] | None, bias: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """``scale * y + bias`` with both broadcast over the leading axes of ``y``."""
    for name, parameter in (("scale", scale), ("bias", bias)):
        if parameter is not None:
            check_trailing_axes(name, parameter, y)
    if scale is not None:
        y = y * jnp.broadcast_to(scale.astype(y.dtype), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y


@typechecked
def layer_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, "*heads D"] | None = None,
    bias: Float[Array, "*heads D"] | None = None,
    *,
    eps: float = 1e-5,
    axis_name: str | None = None,
) -> Float[Array, "*batch D"]:
    """Normalise each vector to mean zero and variance one.

        y = scale * (x - mean(x)) / sqrt(var(x) + eps) + bias

    The variance is computed from the centred vector: ``mean(x ** 2) - mean(x) ** 2`` is faster but
    cancels if the mean is large. For the Nemotron form, which stores ``scale - 1``, pass
    ``1 + scale``; OLMo's norm has neither `scale` nor `bias`.

    Args:
        x: Vectors along the last axis, in any float dtype.
        scale: Gain per feature, or per head and feature: ``[N, H]``.
        bias: Offset per feature, shaped like `scale`.
        eps: Added to the (biased) variance, inside the root. PyTorch uses 1e-5, Flax 1e-6.
        axis_name: Mesh axis over which the features are sharded; one number per vector and
            statistic is summed over it.

    Returns:
        The normalised vectors, in the dtype of `x`.

    Raises:
        ValueError: The axes of `scale` or `bias` differ from the last axes of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> x = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
        >>> np.asarray(F.layer_norm(x)).round(3)  # independent of size and mean
        array([[-1.225,  0.   ,  1.225],
               [-1.225,  0.   ,  1.225]], dtype=float32)

    References:
        Ba, Kiros and Hinton, Layer Normalization, 2016. arXiv:1607.06450, section 3
    """
    _check_eps(eps)
    wide = x.astype(jnp.float32)
    centred = wide - feature_mean(wide, axis_name)
    variance = feature_mean(jnp.square(centred), axis_name)
    y = centred * jax.lax.rsqrt(variance + eps)
    return _affine(y, scale, bias).astype(x.dtype)


def feature_mean(x: Float[Array, "*batch D"], axis_name: str | None) -> Float[Array, "*batch 1"]:
    """Mean over the last axis, and over the devices that shard it."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean if axis_name is None else jax.lax.pmean(mean, axis_name)


@typechecked
def rms_norm(
    x: Float[Array, "*batch D"],
    scale: Float[Array, "*heads D"] | None = None,
    bias: Float[Array, "*heads D"] | None = None,
    *,
    eps: float = 1e-6,
    eps_position: Literal["inside", "outside"] = "inside",
    axis_name: str | None = None,
) -> Float[Array, "*batch D"]:
    """Divide each vector by its root mean square.

        y = scale * x / sqrt(mean(x ** 2) + eps) + bias       (inside the root)
        y = scale * x / (sqrt(mean(x ** 2)) + eps) + bias     (outside the root)

    On vectors of mean zero this is `layer_norm`. For the Gemma form, which stores ``scale - 1``,
    pass ``1 + scale``.

    Args:
        x: Vectors along the last axis, in any float dtype.
        scale: Gain per feature, or per head and feature: ``[N, H]``.
        bias: Offset per feature, shaped like `scale`. Few released models have one.
        eps: Makes a zero vector stay zero.
        eps_position: Whether `eps` is inside the root, as in released models, or outside. The
            results differ by ``eps`` at unit root mean square, and by tens of percent if the mean
            square is as small as `eps`.
        axis_name: Mesh axis over which the features are sharded; one number per vector and
            statistic is summed over it.

    Returns:
        The normalised vectors, in the dtype of `x`.

    Raises:
        ValueError: For any other `eps_position`, or as in `layer_norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> x, scale = jnp.array([3.0, 4.0]), jnp.array([1.0, 10.0])
        >>> np.asarray(F.rms_norm(x)).round(3)
        array([0.849, 1.131], dtype=float32)
        >>> np.asarray(F.rms_norm(100 * x, scale)).round(3)  # independent of the size of x
        array([ 0.849, 11.314], dtype=float32)

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. arXiv:1910.07467, section 4
    """
    _check_eps(eps)
    wide = x.astype(jnp.float32)
    mean_square = feature_mean(jnp.square(wide), axis_name)
    if eps_position == "inside":
        y = wide * jax.lax.rsqrt(mean_square + eps)
    else:
        positive = mean_square > 0  # the derivative of the root is infinite at zero
        root = jnp.where(positive, jnp.sqrt(jnp.where(positive, mean_square, 1.0)), 0.0)
        y = wide / (root + eps)
    return _affine(y, scale, bias).astype(x.dtype)


class BatchStatistics(NamedTuple):
    """Mean and unbiased variance of each feature, or of each time step and feature; float32."""

    mean: Float[Array, "*steps D"]
    var: Float[Array, "*steps D"]


@typechecked
def batch_norm(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    running: BatchStatistics | None = None,
    over: Literal["step", "pooled"] = "pooled",
    eps: float = 1e-5,
    momentum: float = 0.1,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], BatchStatistics]:
    """Normalise each feature by its statistics in this batch, as in training.

        y = scale * (x - mean) / sqrt(var + eps) + bias
        running = (1 - momentum) * running + momentum * (mean, var * n / (n - 1))

    `y` uses the biased variance (divided by n), the running statistics the unbiased one, as in
    PyTorch. For evaluation pass the running statistics to `batch_norm_inference`.

    Args:
        x: A batch of sequences, in any float dtype.
        scale: Gain per feature.
        bias: Offset per feature.
        running: Running statistics; PyTorch starts from zeros and ones, None from this batch.
        over: "pooled" has n = B * T values per feature (torch.nn.BatchNorm1d); "step" computes
            statistics of each time step over n = B sequences.
        eps: Added to the variance, inside the root.
        momentum: Weight of this batch, PyTorch's convention (Flax's is one minus this).
        mask: True for tokens to include; n is their number. Where n < 2 the running statistics do
            not change, and are NaN without `running`.

    Returns:
        The normalised batch in the dtype of `x`, and the running statistics in float32.

    Raises:
        ValueError: If n < 2 without a mask, which leaves the variance undefined, or for any other
            `over`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> x = jnp.array([[[1.0], [3.0]], [[5.0], [7.0]]])  # [batch, time, features]
        >>> y, running = F.batch_norm(x)
        >>> np.asarray(y).ravel().round(2)
        array([-1.34, -0.45,  0.45,  1.34], dtype=float32)
        >>> float(running.mean[0]), round(float(running.var[0]), 2)
        (4.0, 6.67)
        >>> F.batch_norm_inference(jnp.array([[4.0]]), running)  # the mean of that batch
        Array([[0.]], dtype=float32)

    References:
        Ioffe and Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
        Internal Covariate Shift, 2015. arXiv:1502.03167, algorithms 1 and 2
    """
    _check_eps(eps)
    axes = (0,) if over == "step" else (0, 1)
    if math.prod(x.shape[axis] for axis in axes) < 2:
        raise ValueError(
            "Batch statistics need at least two values per feature; got a batch of "
            f"{x.shape[0]} and {x.shape[1]} time steps with over={over!r}."
        )
    wide = x.astype(jnp.float32)
    is_counted = jnp.ones(x.shape[:2], bool) if mask is None else mask
    is_counted = jnp.broadcast_to(is_counted[..., None], x.shape)
    n = jnp.sum(is_counted, axis=axes, keepdims=True, dtype=jnp.float32)

    def masked_mean(values):
        return jnp.sum(values, axis=axes, keepdims=True, where=is_counted) / jnp.maximum(n, 1.0)

    mean = masked_mean(wide)
    centred = wide - mean
    variance = masked_mean(jnp.square(centred))
    y = _affine(centred * jax.lax.rsqrt(variance + eps), scale, bias).astype(x.dtype)
    unbiased = variance * n / jnp.maximum(n - 1.0, 1.0)
    batch = BatchStatistics(mean.squeeze(axes), unbiased.squeeze(axes))
    if running is not None and running.mean.shape != batch.mean.shape:
        raise ValueError(
            f"running.mean has shape {running.mean.shape}, but over={over!r} gives statistics of "
            f"shape {batch.mean.shape}."
        )
    has_variance = n.squeeze(axes) >= 2
    if running is None:
        return y, jax.tree.map(lambda new: jnp.where(has_variance, new, jnp.nan), batch)

    def updated(old: Array, new: Array) -> Array:
        return jnp.where(has_variance, (1.0 - momentum) * old + momentum * new, old)

    return y, jax.tree.map(updated, running, batch)


@typechecked
def batch_norm_inference(
    x: Float[Array, "*batch T D"],
    running: BatchStatistics,
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch T D"]:
    """Normalise each feature by running statistics, as in evaluation.

        y = scale * (x - running.mean) / sqrt(running.var + eps) + bias

    Args:
        x: Sequences, in any float dtype.
        running: From `batch_norm`, of shape ``[D]``, or ``[T, D]`` with `over` "step".
        scale: Gain per feature.
        bias: Offset per feature.
        eps: Added to the variance, inside the root.

    Returns:
        The normalised sequences, in the dtype of `x`.

    References:
        Ioffe and Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
        Internal Covariate Shift, 2015. arXiv:1502.03167, algorithm 2
    """
    _check_eps(eps)
    check_trailing_axes("running.mean", running.mean, x)
    check_trailing_axes("running.var", running.var, x)
    inverse = jax.lax.rsqrt(running.var + eps)
    centred = x.astype(jnp.float32) - jnp.broadcast_to(running.mean, x.shape)
    y = centred * jnp.broadcast_to(inverse, x.shape)
    return _affine(y, scale, bias).astype(x.dtype)
