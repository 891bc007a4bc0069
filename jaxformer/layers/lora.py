"""Low-rank adapters: their parameters beside a kernel, their outputs, and merging them into it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.initializers import zeros
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import parse_logical_axes
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

    Raises:
        ValueError: The rank is larger than the kernel's inputs or outputs.
    """
    dtype = module.runtime.dtype
    inputs, outputs = logical_axes.split(" -> ")
    split = len(inputs.split())
    stacks = int(inputs.startswith("experts"))
    fan_in, fan_out = (int(np.prod(x)) for x in (shape[stacks:split], shape[split:]))
    if lora.rank > min(fan_in, fan_out):
        path = "/".join(module.path)
        raise ValueError(
            f"LoRA.rank must be at most the width of every target; got {lora.rank}, and {path} has "
            f"{fan_in} inputs and {fan_out} outputs."
        )

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


def adapt_kernel(
    module: nn.Module,
    lora: c.LoRA,
    kernel: Float[Array, "..."],
    shape: tuple[int, ...],
    logical_axes: str,
) -> Float[Array, "..."]:
    """Add the adapter's update to a kernel of which rows or statistics are used."""
    factors = low_rank_parameters(module, lora, shape, logical_axes)
    return kernel + factors.product() * jnp.asarray(lora.scale, kernel.dtype)


def adapt_output(
    module: nn.Module,
    lora: c.LoRA,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    shape: tuple[int, ...],
    logical_axes: str,
) -> Float[Array, "..."]:
    """Return x times the adapted kernel; x and the kernel have the same dtype."""
    parsed = parse_logical_axes(logical_axes)
    axes, is_sharded = parsed.num_input_axes, parsed.names[0] in SHARDED_OVER_TENSOR
    tensor = module.runtime.mesh_axes.tensor if is_sharded else None
    factors = low_rank_parameters(module, lora, shape, logical_axes)
    inputs = apply_dropout(module, x, lora.dropout, axis_name=tensor)
    update = F.linear(F.linear(inputs, factors.a, axes=axes), factors.b)
    y = F.linear(x, kernel, axes=axes) + update * jnp.asarray(lora.scale, x.dtype)
    if not lora.dora:
        return y
    merged = kernel.astype(jnp.float32) + lora.scale * factors.product().astype(jnp.float32)
    square = jnp.sum(jnp.square(merged), axis=tuple(range(axes)))
    length = jnp.sqrt(F.reduce_from_tensor_parallel(square, tensor))
    init_fn = lambda key, shape, dtype: length  # noqa: E731
    magnitude = sharded_parameter(module, MAGNITUDE, init_fn, shape[axes:], parsed.bias_axes)
    divisor = jax.lax.stop_gradient(jnp.where(length == 0, 1, length))
    ratio = F.copy_to_tensor_parallel(magnitude, tensor) / divisor
    return y * jnp.broadcast_to(ratio.astype(y.dtype), y.shape)


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
        raise ValueError(
            f"No parameter has {', '.join(missing)} of LoRA.trained in its path; there are "
            f"{', '.join(parts)}."
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

    Trained parameters are float32, frozen ones `LoRA.base_dtype`, but for those that
    `storage_dtype` keeps in float32.
    """
    split = split_parameters(lora, params)
    frozen, trained = (flatten_dict(tree, sep="/") for tree in split)
    dtype = "float32" if lora is None else lora.base_dtype
    frozen = {path: x.astype(storage_dtype(path, dtype)) for path, x in frozen.items()}
    trained = {path: x.astype(jnp.float32) for path, x in trained.items()}
    return unflatten_dict({**frozen, **trained}, sep="/")
