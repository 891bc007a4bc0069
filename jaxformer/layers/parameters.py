"""Declare parameters with logical axes, which decide sharding, optimizers and memory.

The axes are words. "model -> heads features" is a matrix from inputs to outputs, "heads features"
without an arrow a vector. What stands for many of its kind, "layers" and "experts", counts
matrices. Optimizers, meshes and estimates of memory read nothing else; names of modules and of
parameters decide nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.runtime import MeshAxes, RuntimeConfig


class AnnotatedParameter(nn.Partitioned):
    """Flax's box for a parameter and its `config.parameter.LogicalAxes`."""

    num_output_axes: int = struct.field(default=0, pytree_node=False)


LISTED = 8  # parameters of a message before the rest is only counted


def raise_misfits(complaints: Sequence[str]) -> None:
    """Refuse parameters of which there is something to complain."""
    if complaints:
        count = len(complaints)
        more = f"; and {count - LISTED} more" if count > LISTED else ""
        raise ValueError(
            f"{count} parameter{'s do' if count > 1 else ' does'} not fit the configuration: "
            f"{'; '.join(complaints[:LISTED])}{more}."
        )


def logical_to_mesh_axis(
    logical_axis: str, size: int, mesh_axes: MeshAxes, mesh_shape: Mapping[str, int] | None = None
) -> str | None:
    """Return the mesh axis that a logical axis is sharded over, or None.

    Args:
        logical_axis: What the axis counts.
        size: Of the axis, on all devices together.
        mesh_axes: Those of the devices.
        mesh_shape: Devices along each; None asks the mesh, inside `jax.shard_map`.

    Returns:
        Its name. Key-value heads that are fewer than the devices of "tensor" stay whole.
    """
    match logical_axis:
        case "model":
            return mesh_axes.fsdp
        case "experts":
            return mesh_axes.expert
        case "kv_heads":
            devices = (
                axis_size(mesh_axes.tensor) if mesh_shape is None else mesh_shape.get("tensor", 1)
            )
            return mesh_axes.tensor if size % devices == 0 else None
        case "heads" | "hidden" | "vocabulary":
            return mesh_axes.tensor
    return None


def mesh_axes(
    names: Sequence[str],
    shape: Sequence[int],
    axes: MeshAxes,
    sizes: Mapping[str, int] | None = None,
) -> tuple[str | None, ...]:
    """The device axes of a parameter; of several axes that count the model, fsdp has the first."""
    over: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        axis = logical_to_mesh_axis(name, size, axes, sizes)
        over.append(None if axis == axes.fsdp and axis in over else axis)
    return tuple(over)


def axis_size(axis_name: str | None) -> int:
    """Number of devices along a mesh axis; 1 for None."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def sharded_parameter(
    module: nn.Module,
    name: str,
    init_fn: Callable[..., Array],
    shape: tuple[int, ...],
    logical_axes: str,
    runtime: RuntimeConfig,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Declare a parameter; return this device's shard, all-gathered over fsdp, in `dtype`.

    That is its share along the axes of `tensor` and `expert`. Over `fsdp` it is gathered here, so
    inside a loop over layers one layer at a time; the gradient is scattered in turn.

    Args:
        module: Whose it is.
        name: Its name.
        init_fn: The initialiser.
        shape: On all devices together.
        logical_axes: What each of its axes counts, as `parse_logical_axes` reads it.
        runtime: How the model runs.
        dtype: Of the result.

    Returns:
        The numbers; what is learned are float32.

    Raises:
        ValueError: The axes are not those of the shape, or the parameter that was passed in has
            another shape.
    """
    names, num_output_axes = parse_logical_axes(logical_axes)
    if len(names) != len(shape):
        raise ValueError(
            f"The parameter {'/'.join((*module.path, name))} {shape} has {len(shape)} axes; "
            f"{logical_axes!r} names {len(names)}."
        )

    runtime.read.add((*module.path, name))

    def boxed_init(*args: Any) -> Any:
        return (
            AnnotatedParameter(init_fn(*args), names, None, num_output_axes)
            if runtime.annotate_axes
            else init_fn(*args)
        )

    axes = mesh_axes(names, shape, runtime.mesh_axes)
    local_shape = tuple(n // axis_size(axis) for n, axis in zip(shape, axes, strict=True))
    if module.has_variable("params", name):  # `module.param` would trace the initialiser again
        value = nn.meta.unbox(module.get_variable("params", name))
        if jnp.shape(value) != local_shape:
            path = "/".join((*module.path, name))
            raise ValueError(
                f"The parameter {path} has the shape {jnp.shape(value)}, but the model's is "
                f"{local_shape}. Were the parameters made for another configuration?"
            )
    else:
        value = module.param(name, boxed_init, local_shape, jnp.float32)
    if (
        "kv_heads" in names and runtime.mesh_axes.tensor not in axes
    ):  # copies, of which each reads a part
        value = F.copy_to_tensor_parallel(value, runtime.mesh_axes.tensor)
    for i, axis in enumerate(axes):
        if axis is not None and names[i] == "model":
            value = F.fsdp_all_gather(value, axis, i, dtype)
    return value.astype(dtype)


def local_shard(x: Array, axis_name: str | None, *, axis: int) -> Array:
    """Slice this device's equal share of a replicated array along an axis."""
    if axis_name is None:
        return x
    length = x.shape[axis] // jax.lax.axis_size(axis_name)
    start = jax.lax.axis_index(axis_name) * length
    return jax.lax.dynamic_slice_in_dim(x, start, length, axis=axis)
