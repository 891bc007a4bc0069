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
from jaxformer.config.parameter import read_axes
from jaxformer.layers.mode import Axes, Mode


class Declared(nn.Partitioned):
    """Flax's box for a parameter and its `config.parameter.ParameterAxes`."""

    outputs: int = struct.field(default=0, pytree_node=False)


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


def mesh_axis(
    logical: str, size: int, axes: Axes, sizes: Mapping[str, int] | None = None
) -> str | None:
    """Return the mesh axis that a logical axis is sharded over, or None.

    Args:
        logical: What the axis counts.
        size: Of the axis, on all devices together.
        axes: Those of the devices.
        sizes: Devices along each; None asks the mesh, inside `jax.shard_map`.

    Returns:
        Its name. Key-value heads that are fewer than the devices of "tensor" stay whole.
    """
    match logical:
        case "model":
            return axes.fsdp
        case "experts":
            return axes.expert
        case "kv_heads":
            devices = shards(axes.tensor) if sizes is None else sizes.get("tensor", 1)
            return axes.tensor if size % devices == 0 else None
        case "heads" | "hidden" | "vocabulary":
            return axes.tensor
    return None


def mesh_axes(
    names: Sequence[str], shape: Sequence[int], axes: Axes, sizes: Mapping[str, int] | None = None
) -> tuple[str | None, ...]:
    """The device axes of a parameter; of several axes that count the model, fsdp has the first."""
    over: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        axis = mesh_axis(name, size, axes, sizes)
        over.append(None if axis == axes.fsdp and axis in over else axis)
    return tuple(over)


def shards(axis_name: str | None) -> int:
    """Number of devices along a mesh axis; 1 for None."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def parameter(
    module: nn.Module,
    name: str,
    start: Callable[..., Array],
    shape: tuple[int, ...],
    axes: str,
    mode: Mode,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Declare a parameter; return this device's shard, all-gathered over fsdp, in `dtype`.

    That is its share along the axes of `tensor` and `expert`. Over `fsdp` it is gathered here, so
    inside a loop over layers one layer at a time; the gradient is scattered in turn.

    Args:
        module: Whose it is.
        name: Its name.
        start: The initialiser.
        shape: On all devices together.
        axes: What each of its axes counts, as `read_axes` reads it.
        mode: How the model runs.
        dtype: Of the result.

    Returns:
        The numbers; what is learned are float32.

    Raises:
        ValueError: The axes are not those of the shape, or the parameter that was passed in has
            another shape.
    """
    names, outputs = read_axes(axes)
    if len(names) != len(shape):
        raise ValueError(
            f"The parameter {'/'.join((*module.path, name))} {shape} has {len(shape)} axes; "
            f"{axes!r} names {len(names)}."
        )

    mode.read.add((*module.path, name))

    def draw(*args: Any) -> Any:
        return Declared(start(*args), names, None, outputs) if mode.annotate else start(*args)

    over = mesh_axes(names, shape, mode.axes)
    local = tuple(n // shards(axis) for n, axis in zip(shape, over, strict=True))
    if module.has_variable("params", name):  # `module.param` would trace the initialiser again
        value = nn.meta.unbox(module.get_variable("params", name))
        if jnp.shape(value) != local:
            path = "/".join((*module.path, name))
            raise ValueError(
                f"The parameter {path} has the shape {jnp.shape(value)}, but the model's is "
                f"{local}. Were the parameters made for another configuration?"
            )
    else:
        value = module.param(name, draw, local, jnp.float32)
    if "kv_heads" in names and mode.axes.tensor not in over:  # copies, of which each reads a part
        value = F.to_parts(value, mode.axes.tensor)
    for i, axis in enumerate(over):
        if axis is not None and names[i] == "model":
            value = F.gather_shares(value, axis, i, dtype)
    return value.astype(dtype)


def my_share(x: Array, axis_name: str | None, *, axis: int) -> Array:
    """Slice this device's equal share of a replicated array along an axis."""
    if axis_name is None:
        return x
    length = x.shape[axis] // jax.lax.axis_size(axis_name)
    start = jax.lax.axis_index(axis_name) * length
    return jax.lax.dynamic_slice_in_dim(x, start, length, axis=axis)
