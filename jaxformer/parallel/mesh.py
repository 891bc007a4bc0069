"""Builds the device mesh and checks that the model divides evenly over its axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh

from jaxformer import config as c
from jaxformer.checks import Checked, Size
from jaxformer.config.parameter import parse_logical_axes
from jaxformer.layers.parameters import logical_to_mesh_axis
from jaxformer.layers.runtime import active_mesh_axes

# From the outermost to the innermost. Neighbours along the innermost axis have the fastest links,
# since the collectives of tensor parallelism cannot overlap with compute.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")  # axes that shard the rows of a batch


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked):
    """Number of devices along each mesh axis; their product is the number of devices.

    Attributes:
        data: Data parallelism: the model is replicated, rows are sharded. None is all devices
            divided by the other axes.
        fsdp: Fully sharded data parallelism: rows and parameters are sharded, and kernels are
            all-gathered at use.
        tensor: Tensor parallelism: heads, hidden width and vocabulary are sharded.
        context: Context parallelism: every sequence is sharded.
        expert: Expert parallelism: rows and experts are sharded.
    """

    data: Size | None = None
    fsdp: Size = 1
    tensor: Size = 1
    context: Size = 1
    expert: Size = 1

    def shape(self, num_devices: int) -> dict[str, int]:
        """Mesh shape for a number of devices, outermost axis first.

        Args:
            num_devices: Number of devices.

        Raises:
            ValueError: The product of the axes cannot be this number.
        """
        axis_sizes = {name: getattr(self, name) for name in MESH_AXES}
        shown = " x ".join(f"{name} {n}" for name, n in axis_sizes.items() if n and n > 1)
        fixed_size = math.prod(n for n in axis_sizes.values() if n is not None)
        data = num_devices // fixed_size if self.data is None else 1
        if data * fixed_size != num_devices:
            fitting = "a multiple of " if self.data is None else ""
            raise ValueError(
                f"The mesh {shown or 'data 1'} needs {fitting}{fixed_size} devices; there are "
                f"{num_devices}."
            )
        return axis_sizes | {"data": self.data or data}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a `jax.sharding.Mesh` with the axis "data" and every axis larger than 1.

    Args:
        config: Devices along each axis.
        devices: Devices to use; None is all devices of all processes.

    Returns:
        The mesh, its axes in the order of `MESH_AXES`.

    Raises:
        ValueError: The product of the axes is not the number of devices, or the axes that shard
            rows do not divide over the TPU slices.
    """
    devices = jax.devices() if devices is None else devices
    mesh_shape = config.shape(len(devices))
    used_axes = {name: n for name, n in mesh_shape.items() if n > 1 or name == "data"}
    grid, automatic = arrange_devices(used_axes, devices), (AxisType.Auto,) * len(used_axes)
    return Mesh(grid, tuple(used_axes), axis_types=automatic)


def arrange_devices(mesh_shape: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices as a grid; neighbours on the innermost axis have the fastest links.

    A TPU slice is a torus: each mesh axis gets whole physical axes if possible, else parts of them.
    Slices are connected by a slower network (DCN), which is used along "data", then "fsdp", then
    "expert", and never along other axes. Other devices keep their order, which follows the hosts.

    Args:
        mesh_shape: Devices along each axis, from the outermost to the innermost.
        devices: The devices, as many as the product.

    Raises:
        ValueError: The axes that may use the DCN do not divide over the slices.
    """
    shape = tuple(mesh_shape.values())
    if devices[0].platform != "tpu":
        return np.asarray(devices, object).reshape(shape)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    dcn_shape = slices_per_axis(mesh_shape, num_slices)
    ici_shape = tuple(n // m for n, m in zip(shape, dcn_shape, strict=True))

    make_grid: Any = partial(create_hybrid_device_mesh, ici_shape, dcn_shape, devices)
    if num_slices == 1:
        make_grid = partial(create_device_mesh, shape, devices)
    try:
        return make_grid()
    except NotImplementedError:  # a mesh axis needs a part of a physical axis
        return make_grid(allow_split_physical_axes=True)
    except AssertionError:
        raise ValueError(
            f"The first {len(devices)} TPU chips do not form a rectangle of their slice; use "
            "another number of devices."
        ) from None


def slices_per_axis(mesh_shape: Mapping[str, int], num_slices: int) -> tuple[int, ...]:
    """Number of TPU slices along each mesh axis (the DCN mesh shape).

    Args:
        mesh_shape: Devices along each axis.
        num_slices: Number of slices.

    Raises:
        ValueError: The product of the axes that may use the DCN is not a multiple of it.
    """
    remaining, per_axis = num_slices, dict.fromkeys(mesh_shape, 1)
    batch_axes = {name: mesh_shape[name] for name in BATCH_AXES if name in mesh_shape}
    for name, size in batch_axes.items():
        per_axis[name] = math.gcd(remaining, size)
        remaining //= per_axis[name]
    if remaining > 1:
        axes_text = " x ".join(f"{name} {size}" for name, size in batch_axes.items())
        raise ValueError(
            f"{num_slices} slices are connected by a slow network (DCN), which only data, fsdp and "
            f"expert may use, but {axes_text} is not a multiple of {num_slices}. Make data a "
            "multiple of it."
        )
    return tuple(per_axis.values())


def token_axes(mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes over which a batch's tokens are sharded; sums over tokens psum over these.

    Args:
        mesh_shape: Devices along each axis of the mesh.

    Returns:
        The axes among "data", "fsdp", "expert" and "context" that the mesh has, in this order.
    """
    return tuple(name for name in (*BATCH_AXES, "context") if name in mesh_shape)


def num_batch_shards(mesh_shape: Mapping[str, int]) -> int:
    """Number of shards of the batch: devices along data, fsdp and expert.

    Args:
        mesh_shape: Devices along each axis; an axis that is missing counts as 1.

    Returns:
        The product of the sizes of "data", "fsdp" and "expert".
    """
    return math.prod(mesh_shape.get(name, 1) for name in BATCH_AXES)


def check_divisible(
    config: c.TransformerConfig,
    mesh_shape: Mapping[str, int],
    *,
    batch_size: int | None = None,
    lengths: Sequence[int] = (),
    gradient_accumulation_steps: int = 1,
) -> None:
    """Raise if model or batch do not divide evenly over the mesh.

    Args:
        config: Model configuration.
        mesh_shape: Devices along each axis.
        batch_size: Global batch size in rows; None checks the model only.
        lengths: Lengths of rows in tokens, and of sources.
        gradient_accumulation_steps: Number of microbatches of a step.

    Raises:
        ValueError: The message has every problem, with both numbers.
    """
    axis_sizes = {name: mesh_shape.get(name, 1) for name in MESH_AXES}
    num_parts = num_batch_shards(axis_sizes) * gradient_accumulation_steps
    problems = []
    if batch_size is not None and batch_size % num_parts:
        batch_axes = [name for name in BATCH_AXES if axis_sizes[name] > 1 or name == "data"]
        axes_text = " x ".join(f"{name} {axis_sizes[name]}" for name in batch_axes)
        problems.append(
            f"batch_size {batch_size} must be a multiple of {axes_text} x "
            f"gradient_accumulation_steps {gradient_accumulation_steps} = {num_parts}"
        )
    context = axis_sizes["context"]
    for length in lengths:
        if context > 1 and length % (2 * context):
            problems.append(
                f"length {length} must be a multiple of 2 x context {context} = {2 * context}: "
                "each device has one early and one late chunk of a sequence"
            )
    problems += _indivisible_sizes(config, axis_sizes)
    if problems:
        raise ValueError(
            "Model or batch do not divide over the mesh:\n" + "\n".join(f"  {p}." for p in problems)
        )


def _indivisible_sizes(config: c.TransformerConfig, n: Mapping[str, int]) -> Iterator[str]:
    """Messages for each size of the model that its mesh axis does not divide."""
    source_vocab_size = config.topology.source_vocab_size or 0
    vocabularies = {"vocab_size": config.vocab_size, "source_vocab_size": source_vocab_size}

    def uneven(name: str, size: int, axis: str) -> Iterator[str]:
        if size % n[axis]:
            yield f"{name} {size} is not divisible by {axis} {n[axis]}"

    yield from uneven("model_dim", config.model_dim, "fsdp")
    for name, size in vocabularies.items():
        padded = -(-size // n["tensor"]) * n["tensor"]
        for problem in uneven(name, size, "tensor"):
            yield f"{problem} (pad it to {padded}; the additional rows are unused)"
    for option in dict.fromkeys(layer.ngram_embedding for layer in config.layers):
        if option is not None:
            yield from uneven("NgramEmbedding's features of a row", option.head_dim, "tensor")
            yield from uneven("NgramEmbedding's rows", option.num_rows, "fsdp")
    num_moe_layers = 0
    for stack_name, layers in reversed(config.stacks.items()):
        prefix = "encoder's " if len(config.stacks) == 2 and stack_name == "encoder" else ""
        for attention in dict.fromkeys(x for layer in layers for x in layer.attention.parts):
            yield from uneven(f"{prefix}num_heads", attention.num_heads, "tensor")
            if indivisible_heads := attention.indivisible_heads(n["tensor"]):
                yield f"{prefix}{indivisible_heads}"
            if n["context"] > 1 and not attention.shards_sequence:
                yield (
                    f"context {n['context']}, but {type(attention).__name__} is recurrent over "
                    "the sequence, which cannot be sharded"
                )
        feed_forward: Any
        for feed_forward in dict.fromkeys(layer.feed_forward for layer in layers):
            num_moe_layers += feed_forward.is_moe
            for name, size, axis in _feed_forward_sizes(feed_forward, config.model_dim, n):
                yield from uneven(f"{prefix}{name}", size, axis)
            capacity = feed_forward.router.capacity if feed_forward.is_moe else None
            if n["context"] > 1 and capacity is not None:
                yield (
                    f"context {n['context']}, but Router.capacity {capacity} counts the tokens "
                    "of whole rows, which cannot be sharded"
                )
    if n["expert"] > 1 and not num_moe_layers:
        yield f"expert {n['expert']}, but the model has no experts"


def _feed_forward_sizes(
    feed_forward: Any, model_dim: int, n: Mapping[str, int]
) -> Iterator[tuple[str, int, str]]:
    """Name, size and mesh axis of each size of a feed-forward that is sharded."""
    if feed_forward.is_moe:
        yield "num_experts", feed_forward.num_experts, "expert"
        if feed_forward.shared is not None:
            width = feed_forward.shared.expert.hidden_dim
            yield "hidden_dim of the shared expert", width, "tensor"
        if feed_forward.latent is not None:
            yield "latent_dim", feed_forward.latent.latent_dim, "tensor"
        feed_forward = feed_forward.expert
    if feed_forward.input_projections:
        yield "hidden_dim", feed_forward.hidden_dim, "tensor"
        return
    declared = feed_forward.parameters(model_dim).values()
    sizes = [zip(parse_logical_axes(x.axes).names, x.shape, strict=True) for x in declared]
    for name, size in dict.fromkeys(chain(*sizes)):
        if logical_to_mesh_axis(name, size, active_mesh_axes(n), n) == "tensor":
            yield f"{type(feed_forward).__name__}'s {name}", size, "tensor"
