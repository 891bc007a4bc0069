"""Declare parameters: initial values, and logical axes, which decide sharding and optimizers.

Axes are words: "model -> heads features" is a matrix from inputs to outputs, "heads features"
without an arrow a vector. The axes "layers", "experts" and "blocks" stack matrices. Optimizers,
meshes and memory estimates depend only on these names, not on the names of modules and parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config import Initialiser
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.runtime import MeshAxes, RuntimeConfig


class AnnotatedParameter(nn.Partitioned):
    """Flax's box for a parameter, its `config.parameter.LogicalAxes` and the dtype of its use."""

    num_output_axes: int = struct.field(default=0, pytree_node=False)
    dtype: DTypeLike = struct.field(default=jnp.float32, pytree_node=False)  # that layers read
    adaptable: bool = struct.field(default=False, pytree_node=False)  # by `config.LoRA`


FLOAT32 = np.dtype(np.float32)
# Parameters whose rounding changes what a model computes, by the end of their path: a router's
# choices of experts, attention sinks, functions of the distance, and the factors of residual
# streams and of recurrences.
FLOAT32_PARAMETERS = (
    *("/router/kernel", "/router/bias", "/selection_bias", "/expert_scale", "/sinks"),
    *("/rate/bias", "/bonus/bias", "/step_bias/bias", "/skip/bias", "/memory/bias", "/angles/bias"),
    *(f"/relative_bias/{x}" for x in ("c", "length_factor", "hidden_kernel", "hidden_bias")),
    *("/relative_bias/out_kernel", "/relative_bias/out_bias", "/layer_scalar"),
    *(f"_residual/{x}" for x in ("read", "mix", "write", "norm", "weights")),
    *("_residual/input_scale", "_residual/output_scale"),
)


def storage_dtype(path: str, dtype: DTypeLike) -> np.dtype:
    """Dtype in which a parameter is stored where a model's parameters are stored in `dtype`.

    Released models keep `FLOAT32_PARAMETERS` in float32 in files of bfloat16: a router's selection
    biases may all lie in 6.94 ± 0.12, where bfloat16 has nine numbers.

    Args:
        path: Path of the parameter, its parts joined by "/".
        dtype: Dtype of the other parameters.

    Returns:
        `dtype`, or at least float32 for `FLOAT32_PARAMETERS`.
    """
    stays = f"/{path}".endswith(FLOAT32_PARAMETERS)
    is_narrow = jnp.dtype(dtype).itemsize < FLOAT32.itemsize
    return FLOAT32 if stays and is_narrow else jnp.dtype(dtype)


LISTED = 8  # parameters of a message before the rest is only counted


def raise_misfits(complaints: Sequence[str]) -> None:
    """Raise ValueError if there are complaints about parameters."""
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
        logical_axis: Name of the logical axis.
        size: Its global size.
        mesh_axes: Mesh axes of the model.
        mesh_shape: Devices along each; None uses the current mesh, inside `jax.shard_map`.

    Returns:
        The mesh axis. Key-value heads are replicated if there are more devices along "tensor".
    """
    match logical_axis:
        case "model" | "buckets":
            return mesh_axes.fsdp
        case "experts":
            return mesh_axes.expert
        case "kv_heads":
            devices = (
                axis_size(mesh_axes.tensor) if mesh_shape is None else mesh_shape.get("tensor", 1)
            )
            return mesh_axes.tensor if size % devices == 0 else None
        case "heads" | "blocks" | "hidden" | "vocabulary":
            return mesh_axes.tensor
    return None


def mesh_axes(
    names: Sequence[str],
    shape: Sequence[int],
    axes: MeshAxes,
    sizes: Mapping[str, int] | None = None,
) -> tuple[str | None, ...]:
    """Return the mesh axes of a parameter; fsdp shards only the first axis named "model"."""
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
    *,
    dtype: DTypeLike = jnp.float32,
    adaptable: bool = False,
) -> Float[Array, "..."]:
    """Declare a parameter; return this device's shard, all-gathered over fsdp, in `dtype`.

    The result is the shard along `tensor` and `expert`. The all-gather over `fsdp` happens here,
    one layer at a time inside a loop over layers; its transpose scatters the gradient.

    Args:
        module: The module that owns the parameter; it has a field `runtime`.
        name: Its name.
        init_fn: The initialiser.
        shape: Global shape.
        logical_axes: Names of its axes, as `parse_logical_axes` reads them.
        dtype: Dtype of the result.
        adaptable: Whether a low-rank adapter may stand beside it.

    Returns:
        The parameter in `dtype`; it is stored in float32.

    Raises:
        ValueError: The shape has another number of axes, or the given parameter has another shape.
    """
    runtime: RuntimeConfig = module.runtime
    names, num_output_axes = parse_logical_axes(logical_axes)
    if len(names) != len(shape):
        raise ValueError(
            f"The parameter {'/'.join((*module.path, name))} {shape} has {len(shape)} axes; "
            f"{logical_axes!r} names {len(names)}."
        )

    def boxed_init(*args: Any) -> Any:
        x = init_fn(*args)
        box = AnnotatedParameter(x, names, None, num_output_axes, jnp.dtype(dtype), adaptable)
        return box if runtime.annotate_axes else x

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
    if "kv_heads" in names and runtime.mesh_axes.tensor not in axes:
        # Each device uses a part of its copy, so gradients are summed.
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


def initializer(
    initialiser: Initialiser, *, num_input_axes: int = 1, divisor: float = 1.0
) -> Callable:
    """Build a Flax initialiser; the first `num_input_axes` axes count as inputs.

    Args:
        initialiser: The option.
        num_input_axes: Leading axes that a matrix product contracts; their sizes multiply to the
            fan-in.
        divisor: Divisor of every value.
    """
    return partial(_sample, initialiser=initialiser, num_input_axes=num_input_axes, divisor=divisor)


# flax asks every parameter's initialiser for its shape each time a model is traced; behind `jit`
# the answer is kept.
@partial(jax.jit, static_argnames=("shape", "dtype", "initialiser", "num_input_axes", "divisor"))
def _sample(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    initialiser: Initialiser,
    num_input_axes: int,
    divisor: float,
) -> jax.Array:
    return initialiser.sample(key, shape, dtype, num_input_axes, divisor)


def log_spaced_memory_init(min_memory: float, max_memory: float) -> Callable:
    """Initialiser of decay logits with log-spaced memory lengths over the heads.

    Consecutive heads differ by the same factor.
    """

    def init_fn(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jnp.asarray(np.log(np.geomspace(min_memory, max_memory, shape[0]) - 1), dtype)

    return init_fn


def log_uniform_init(low: float, high: float) -> Callable:
    """Initialiser of logarithms of numbers drawn evenly between two limits."""

    def init_fn(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init_fn


def step_bias_init(low: float, high: float) -> Callable:
    """Initialiser whose softplus is spread evenly between two limits on a logarithmic scale."""

    def init_fn(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        logs = jax.random.uniform(key, shape, dtype, np.log(low), np.log(high))
        return jnp.log(jnp.expm1(jnp.exp(logs)))  # the inverse of softplus

    return init_fn


def rope_frequency_init(base: float) -> Callable:
    """Initialiser that gives every head the RoPE frequencies."""

    def init_fn(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        frequencies = F.rope_frequencies(2 * shape[-1], base=base)
        return jnp.broadcast_to(frequencies, shape).astype(dtype)

    return init_fn
