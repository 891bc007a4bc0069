"""Estimated training memory of one device, from the configuration and the mesh shape."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, tree_leaves_with_path
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer import costs
from jaxformer.layers.layouts import LAYER_GROUPS
from jaxformer.layers.lora import split_parameters
from jaxformer.layers.parameter_metadata import ParameterMetadata, parameter_metadata
from jaxformer.parallel.mesh import MESH_AXES, check_divisible, num_batch_shards
from jaxformer.parallel.sharding import abstract_parameters

OptimizerKind = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
PARAM_BYTES = 4  # float32


class MemoryEstimate(NamedTuple):
    """Estimated bytes on one device, by use."""

    parameters: int
    optimizer: int
    gradients: int
    gathered_kernels: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def estimate_memory(
    config: c.TransformerConfig,
    mesh_shape: Mapping[str, int],
    *,
    batch_size: int,
    length: int,
    source_length: int = 0,
    gradient_accumulation_steps: int = 1,
    remat: str = "none",
    dtype: DTypeLike = "float32",
    expert_capacity_factor: float | None = None,
    optimizer: str = "adamw",
    platform: str = "cpu",
) -> MemoryEstimate:
    """Estimate the training memory of one device.

        parameters   4 * P       P: elements of its shards, exactly
        optimizer    4 * k * P   k: AdamW 2, Lion and SGD 1, Muon 1 for kernels and 2 for others,
                                 Adafactor almost 0
        gradients    4 * P       twice with accumulation: the sum, and a microbatch's gradients
        kernels      w * W       W: elements of a layer's kernels, the embedding and the head that
                                 are all-gathered, or cast to w bytes each; of all layers if they
                                 are cast but not sharded, and remat is "none"
        activations              `costs.activation_bytes`
        logits                   `costs.logit_bytes`

    Args:
        config: Model configuration.
        mesh_shape: Devices along each mesh axis.
        batch_size: Global batch size in rows.
        length: Row length in tokens; of the targets, for an encoder-decoder.
        source_length: Source length in tokens.
        gradient_accumulation_steps: Number of microbatches of a step.
        remat: As in `layers.RuntimeConfig`.
        dtype: Dtype of the computation.
        expert_capacity_factor: As `capacity_factor` of `F.mixture_of_experts`.
        optimizer: Kind of optimizer.
        platform: As in `costs.activation_bytes`.

    Returns:
        Bytes. Parameters are exact, the rest is an estimate: in our tests the total is within a
        factor of 1.5 of the memory that the compiler allocates.

    Raises:
        ValueError: Model or batch do not divide evenly over the mesh, or there is no such
            optimizer.
    """
    if optimizer not in get_args(OptimizerKind):
        raise ValueError(f"optimizer must be one of {get_args(OptimizerKind)}; got {optimizer!r}.")
    check_divisible(
        config,
        mesh_shape,
        batch_size=batch_size,
        lengths=[length, source_length] if source_length else [length],
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    axis_sizes = {name: mesh_shape.get(name, 1) for name in MESH_AXES}
    rows = batch_size // (num_batch_shards(axis_sizes) * gradient_accumulation_steps)
    compute_bytes = jnp.dtype(dtype).itemsize
    tensor, context = axis_sizes["tensor"], axis_sizes["context"]
    logits = costs.logit_bytes(config, rows * length // context, tensor=tensor, platform=platform)
    activations = costs.activation_bytes(
        config,
        rows,
        length,
        source_length=source_length,
        remat=remat,
        bytes_per_number=compute_bytes,
        tensor=tensor,
        context=context,
        expert_capacity_factor=expert_slots(axis_sizes["expert"], expert_capacity_factor),
        platform=platform,
    )
    parameters, gradients, optimizer_bytes = _parameter_bytes(config, axis_sizes, optimizer)
    gathered = _gathered_size(config, axis_sizes, cast=compute_bytes < PARAM_BYTES, remat=remat)
    return MemoryEstimate(
        parameters=parameters,
        optimizer=optimizer_bytes,
        gradients=gradients * min(gradient_accumulation_steps, 2),
        gathered_kernels=compute_bytes * gathered,
        activations=activations - logits,
        logits=logits,
    )


def _parameter_bytes(
    config: c.TransformerConfig, axis_sizes: Mapping[str, int], optimizer: str
) -> tuple[int, int, int]:
    """Bytes on one device of parameters, of their gradients and of the optimizer's state."""
    metadata = parameter_metadata(config)
    stored = jax.tree.leaves(abstract_parameters(config, None))
    pairs = zip(jax.tree.leaves(metadata), stored, strict=True)
    parameters = sum(_local_size(x, axis_sizes) * y.dtype.itemsize for x, y in pairs)
    trained = jax.tree.leaves(split_parameters(config.adapter, metadata).trained)
    local_sizes = [(x, _local_size(x, axis_sizes)) for x in trained]
    gradients = sum(n for _, n in local_sizes)
    values = sum(_optimizer_values_per_element(x, optimizer) * n for x, n in local_sizes)
    return parameters, PARAM_BYTES * gradients, PARAM_BYTES * values


def expert_slots(devices: int, expert_capacity_factor: float | None) -> float:
    """Expert slots on a device per row that it sends."""
    return float(min(devices, expert_capacity_factor or devices))


def _local_size(x: ParameterMetadata, n: Mapping[str, int]) -> int:
    """Elements of a parameter stored on one device."""
    return math.prod(x.shape) // math.prod(n[axis] for axis in x.partition_spec(n) if axis)


def _gathered_size(
    config: c.TransformerConfig, n: Mapping[str, int], *, cast: bool, remat: str
) -> int:
    """Elements of all-gathered or cast weights held beside the shards."""
    if n["fsdp"] == 1 and not cast:
        return 0
    all_layers_at_once = n["fsdp"] == 1 and remat == "none"
    layers: dict[Any, int] = defaultdict(int)
    outside_layers = 0
    for path, x in tree_leaves_with_path(parameter_metadata(config)):
        if "buckets" in x.logical_axes:  # never gathered, nor cast but for the rows that are read
            continue
        gathered_size = _local_size(x, {**n, "fsdp": 1})
        if path[1] not in map(DictKey, LAYER_GROUPS):
            outside_layers += gathered_size
        elif all_layers_at_once:
            layers["all"] += gathered_size
        else:
            layers[path[:3]] += gathered_size // (x.shape[0] if "layers" in x.logical_axes else 1)
    return outside_layers + max(layers.values())


def _optimizer_values_per_element(x: ParameterMetadata, optimizer: str) -> int:
    """Optimizer-state values per parameter element."""
    match optimizer:
        case "adafactor":  # a matrix has one row and one column, counted as 0
            return 0 if x.num_output_axes else 1
        case "muon":
            return 1 if x.role == "kernel" else 2
        case "lion" | "sgd":
            return 1
    return 2
