"""Low-rank adapters: their parameters beside a kernel, their outputs, and merging them into it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.parameters import sharded_parameter, storage_dtype
from jaxformer.layers.runtime import apply_dropout

SHARDED_OVER_TENSOR = {"heads", "kv_heads", "hidden", "vocabulary"}
LORA_A, LORA_B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"


class LowRank(NamedTuple):
    """This device's factors of an update: A ``[*in, r]`` and B ``[r, *out]``, experts first."""

    a: Float[Array, "..."]
    b: Float[Array, "..."]

    def product(self, num_stacks: int = 0) -> Float[Array, "..."]:
        """The update without its scale; the first `num_stacks` axes stack kernels."""
        stacks, rank = self.a.shape[:num_stacks], self.b.shape[num_stacks]
        product = self.a.reshape(*stacks, -1, rank) @ self.b.reshape(*stacks, rank, -1)
        return product.reshape(*self.a.shape[:-1], *self.b.shape[num_stacks + 1 :])


def low_rank_parameters(
    module: nn.Module, lora: c.LoRA, shape: tuple[int, ...], logical_axes: str
) -> LowRank:
    """Declare A and B beside a module's kernel.

    Args:
        module: The module that owns the kernel.
        lora: The adapters.
        shape: Global shape of the kernel.
        logical_axes: Names of its axes.

    Returns:
        The factors on this device, in the dtype of the computation.
    """
    dtype = module.runtime.dtype
    inputs, outputs = logical_axes.split(" -> ")
    split = len(inputs.split())
    stacks = int(inputs.startswith("experts"))
    fan_in = math.prod(shape[stacks:split])

    def draw_a(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -1.0, 1.0) / math.sqrt(fan_in)

    a_shape, a_axes = (*shape[:split], lora.rank), f"{inputs} -> rank"
    a = sharded_parameter(module, LORA_A, draw_a, a_shape, a_axes, dtype=dtype)
    b_shape = (*shape[:stacks], lora.rank, *shape[split:])
    b_axes = f"{'experts ' * stacks}rank -> {outputs}"
    b = sharded_parameter(module, LORA_B, zeros, b_shape, b_axes, dtype=dtype)
    # Each device has a part of the outputs, or of the inputs: gradients of A, or of B, are summed.
    tensor = module.runtime.mesh_axes.tensor
    if SHARDED_OVER_TENSOR & set(outputs.split()):
        a = F.copy_to_tensor_parallel(a, tensor)
    if SHARDED_OVER_TENSOR & set(inputs.split()):
        b = F.copy_to_tensor_parallel(b, tensor)
    return LowRank(a, b)


class AdaptedKernel(NamedTuple):
    """A kernel and the update beside it, which has its scale; no update without an adapter."""

    kernel: Float[Array, "*in out"]
    update: LowRank | None = None

    def merged(self) -> Float[Array, "*in out"]:
        """The kernel with its update."""
        return self.kernel if self.update is None else self.kernel + self.update.product()

    def add_update(self, y: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Add x times the update to y, the kernel's outputs, which further features may follow."""
        if self.update is None:
            return y
        update = F.linear(F.linear(x, self.update.a), self.update.b)
        return y + jnp.pad(update, [(0, n - m) for n, m in zip(y.shape, update.shape, strict=True)])


def adapt_kernel(
    module: nn.Module,
    lora: c.LoRA,
    kernel: Float[Array, "..."],
    shape: tuple[int, ...],
    logical_axes: str,
) -> AdaptedKernel:
    """Return a kernel and its update for functions that do the products themselves."""
    factors = low_rank_parameters(module, lora, shape, logical_axes)
    a, b = (x.astype(kernel.dtype) for x in factors)
    b = b * jnp.asarray(lora.scale, b.dtype)
    if lora.dora:
        ratio = _column_ratio(module, lora, kernel, factors, shape, logical_axes)
        kernel, b = (x * jnp.broadcast_to(ratio.astype(x.dtype), x.shape) for x in (kernel, b))
    return AdaptedKernel(kernel, LowRank(a, b))


def adapt_output(
    module: nn.Module,
    lora: c.LoRA,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    shape: tuple[int, ...],
    logical_axes: str,
) -> Float[Array, "..."]:
    """Return x times the adapted kernel; x and the kernel have the same dtype."""
    axes = parse_logical_axes(logical_axes).num_input_axes
    tensor = _tensor_of_inputs(module, logical_axes)
    factors = low_rank_parameters(module, lora, shape, logical_axes)
    inputs = apply_dropout(module, x, lora.dropout, axis_name=tensor)
    update = F.linear(F.linear(inputs, factors.a, axes=axes), factors.b)
    y = F.linear(x, kernel, axes=axes) + update * jnp.asarray(lora.scale, x.dtype)
    if not lora.dora:
        return y
    ratio = _column_ratio(module, lora, kernel, factors, shape, logical_axes)
    return y * jnp.broadcast_to(ratio.astype(y.dtype), y.shape)


def _column_ratio(
    module: nn.Module,
    lora: c.LoRA,
    kernel: Float[Array, "..."],
    factors: LowRank,
    shape: tuple[int, ...],
    logical_axes: str,
) -> Float[Array, "..."]:
    """DoRA's trained length of each column of the adapted kernel, divided by its own."""
    parsed, tensor = parse_logical_axes(logical_axes), _tensor_of_inputs(module, logical_axes)
    axes = parsed.num_input_axes
    merged = kernel.astype(jnp.float32) + lora.scale * factors.product().astype(jnp.float32)
    square = jnp.sum(jnp.square(merged), axis=tuple(range(axes)))
    length = jnp.sqrt(F.reduce_from_tensor_parallel(square, tensor))
    init_fn = lambda key, shape, dtype: length  # noqa: E731
    magnitude = sharded_parameter(module, MAGNITUDE, init_fn, shape[axes:], parsed.bias_axes)
    divisor = jax.lax.stop_gradient(jnp.where(length == 0, 1, length))
    return F.copy_to_tensor_parallel(magnitude, tensor) / divisor


def _tensor_of_inputs(module: nn.Module, logical_axes: str) -> str | None:
    """Mesh axis over which the inputs of a kernel are sharded."""
    is_sharded = parse_logical_axes(logical_axes).names[0] in SHARDED_OVER_TENSOR
    return module.runtime.mesh_axes.tensor if is_sharded else None


def is_adapter(path: str) -> bool:
    """Whether the parameter at this path is an adapter's."""
    return path.rpartition("/")[2] in (LORA_A, LORA_B, MAGNITUDE)


class SplitParameters(NamedTuple):
    """A tree of parameters in two: what training leaves as it is, and what it changes."""

    frozen: Any
    trained: Any


def split_parameters(lora: c.LoRA | None, tree: Any) -> SplitParameters:
    """Split a tree of parameters by what training changes: all of it without an adapter.

    Args:
        lora: The adapters of the model, `TransformerConfig.adapter`.
        tree: A tree with the structure of the parameters, such as their `parameter_metadata`.

    Returns:
        The frozen parameters, {} without an adapter, and the trained ones: all without an adapter,
        else the adapters and the parameters that `LoRA.trained` names.

    Raises:
        ValueError: No parameter has a name of `LoRA.trained`.
    """
    if lora is None:
        return SplitParameters({}, tree)
    leaves, names = flatten_dict(tree, sep="/"), lora.trained
    paths = {name: [path for path in leaves if f"/{name}/" in f"/{path}/"] for name in names}
    if missing := [name for name in names if not paths[name]]:
        parts = sorted({part for path in leaves for part in path.split("/")})
        hint = ""
        if layout_of(tree) == "by_layer":
            hint = " Here each layer has its own; layers.layouts.arrange_layers stacks them."
        raise ValueError(
            f"No parameter has {', '.join(missing)} of LoRA.trained in its path; there are "
            f"{', '.join(parts)}.{hint}"
        )
    named = {path for listed in paths.values() for path in listed}
    trained = {path: leaves.pop(path) for path in [*leaves] if path in named or is_adapter(path)}
    return SplitParameters(*(unflatten_dict(x, sep="/") for x in (leaves, trained)))


def join_parameters(frozen: Any, trained: Any) -> Any:
    """Join the two trees of `split_parameters`.

    Args:
        frozen: Parameters that training leaves as they are; {} for none.
        trained: Parameters that it changes.

    Returns:
        The one tree of the model's parameters.
    """
    return unflatten_dict(flatten_dict(frozen) | flatten_dict(trained)) if frozen else trained


def cast_frozen(lora: c.LoRA | None, params: Any) -> Any:
    """Return parameters in the dtypes of training.

    Trained parameters are float32, frozen ones `LoRA.base_dtype`, unless `storage_dtype` keeps them
    in float32.
    """
    split = split_parameters(lora, params)
    frozen, trained = (flatten_dict(tree, sep="/") for tree in split)
    dtype = "float32" if lora is None else lora.base_dtype
    frozen = {path: x.astype(storage_dtype(path, dtype)) for path, x in frozen.items()}
    trained = {path: x.astype(jnp.float32) for path, x in trained.items()}
    return unflatten_dict({**frozen, **trained}, sep="/")
