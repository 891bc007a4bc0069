"""Collectives with explicit gradients, for tensor parallelism and FSDP inside `jax.shard_map`.

The gradient of each function is its transpose: an all-gather has a reduce-scatter as its gradient,
an all-reduce the identity, and the reverse. All sums are computed in float32.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from jaxformer.functional.argument_checks import typechecked

T = TypeVar("T")
TENSOR_SUM_REMAT_NAME = "sum of parts"  # name of reduced values for policies of `jax.checkpoint`


def varying_axes(x: ArrayLike) -> frozenset[str]:
    """Return the mesh axes over which x varies, by its type inside `jax.shard_map`.

    Args:
        x: Any array.

    Returns:
        Names of mesh axes; empty outside `jax.shard_map`.
    """
    array_type: Any = jax.typeof(x)
    if hasattr(array_type, "manual_axis_type"):
        return frozenset(array_type.manual_axis_type.varying)
    return frozenset(array_type.vma)  # its name up to JAX 0.9


def pvary(x: ArrayLike, *axis_names: str | None) -> Array:
    """Apply `jax.lax.pvary` for axes over which x does not vary; the gradient is summed over them.

    Args:
        x: Any array, inside `jax.shard_map`.
        *axis_names: Mesh axes; None and axes over which x already varies are ignored.

    Returns:
        x with the same values.
    """
    x = jnp.asarray(x)
    missing = {name for name in axis_names if name is not None} - varying_axes(x)
    if not missing:
        return x
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return lax.pcast(x, tuple(sorted(missing)), to="varying")
    return lax.pvary(x, tuple(sorted(missing)))  # its name up to JAX 0.8.0


def pvary_like(tree: T, *like: Any) -> T:
    """`pvary` all arrays over every mesh axis over which some array of `like` varies.

    Initial carries of loops, branches of conditions and arguments of kernels need equal axes.

    Args:
        tree: Arrays, inside `jax.shard_map`.
        *like: Trees of arrays.

    Returns:
        The tree with the same values.
    """
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(like)))
    return jax.tree.map(lambda x: pvary(x, *axes), tree)


@typechecked
def copy_to_tensor_parallel(x: Float[Array, "..."], axis_name: str | None) -> Float[Array, "..."]:
    """Copy a replicated x to tensor-parallel devices: identity forward, sum of gradients backward.

        y = x;    dx = sum over devices of dy

    Apply it once for all consumers of x, so that the gradient needs a single all-reduce.

    Args:
        x: The same on all devices, in any float dtype.
        axis_name: Mesh axis of the devices; None returns x.

    Returns:
        x with the same values.

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019. arXiv:1909.08053, section 3 (f)
    """
    if axis_name is None:
        return x
    return pvary(x.astype(jnp.float32), axis_name).astype(x.dtype)


@typechecked
def reduce_from_tensor_parallel(
    x: Float[Array, "..."], axis_name: str | None
) -> Float[Array, "..."]:
    """Sum partial results over tensor-parallel devices: all-reduce forward, identity backward.

        y = sum over devices of x;    dx = dy

    Args:
        x: This device's summand, in any float dtype.
        axis_name: Mesh axis of the devices; None returns x.

    Returns:
        The sum, computed in float32, in the dtype of x.

    References:
        Shoeybi et al., 2019. arXiv:1909.08053, section 3 (g)
    """
    if axis_name is None:
        return x
    total = jax.lax.psum(pvary(x, axis_name).astype(jnp.float32), axis_name)
    return checkpoint_name(total.astype(x.dtype), TENSOR_SUM_REMAT_NAME)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def fsdp_all_gather(
    x: Float[Array, "..."], axis_name: str, axis: int, dtype: DTypeLike
) -> Float[Array, "..."]:
    """All-gather a sharded parameter in `dtype`; the gradient is reduce-scattered in float32.

        y = concatenate over devices of cast(x);    dx = this device's shard of the sum of dy

    Args:
        x: This device's shard, in float32.
        axis_name: Mesh axis of the devices.
        axis: The sharded axis of x.
        dtype: Dtype of the result. Shards are cast before the all-gather; gradients are reduced in
            float32.

    Returns:
        The full parameter, in `dtype`.

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2019. arXiv:1910.02054, section 5.3
    """
    return jax.lax.all_gather(x.astype(dtype), axis_name, axis=axis, tiled=True)


def _fsdp_all_gather_forward(x: Array, axis_name: str, axis: int, dtype: DTypeLike):
    whole = jax.lax.all_gather(x.astype(dtype), axis_name, axis=axis, tiled=True)
    return whole, x  # not by fsdp_all_gather, a custom_vjp that would hide the gather from `remat`


def _fsdp_all_gather_backward(axis_name: str, axis: int, dtype: DTypeLike, x: Array, dy: Array):
    wide = dy.astype(jnp.float32)
    extra_axes = tuple(sorted(varying_axes(dy) - varying_axes(x)))
    wide = pvary(wide, axis_name)
    dx = jax.lax.psum_scatter(wide, axis_name, scatter_dimension=axis, tiled=True)
    return ((jax.lax.psum(dx, extra_axes) if extra_axes else dx).astype(x.dtype),)


fsdp_all_gather.defvjp(_fsdp_all_gather_forward, _fsdp_all_gather_backward)
