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
from jaxformer.layers.declarations import Declaration, declarations
from jaxformer.parallel.mesh import AXES, ROWS, check_fits

OptimizerKind = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
WIDE = 4  # bytes of a parameter


class Memory(NamedTuple):
    """Estimated bytes on one device, by use."""

    parameters: int
    optimizer: int
    gradients: int
    kernels: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def memory(
    config: c.TransformerConfig,
    sizes: Mapping[str, int],
    *,
    batch_size: int,
    length: int,
    source_length: int = 0,
    accumulation: int = 1,
    remat: str = "none",
    dtype: DTypeLike = "float32",
    expert_room: float | None = None,
    optimizer: str = "adamw",
    kernels: bool = False,
) -> Memory:
    """Estimate the training memory of one device.

        parameters   4 * P       P: numbers of its share, exactly
        optimizer    4 * k * P   k: AdamW 2, Lion and SGD 1, Muon 1 for kernels and 2 for others,
                                 Adafactor next to 0
        gradients    4 * P       twice with accumulation: the sum, and those of a part
        kernels      w * W       W: numbers of a layer's kernels and of embedding and head that it
                                 puts together from shares, or casts to w bytes each; of all layers
                                 if they are cast but not shared out, and remat is "none"
        activations              `costs.activation_bytes`
        logits                   `costs.logit_bytes`

    Args:
        config: The model.
        sizes: Devices along each axis.
        batch_size: Rows of a batch, over all devices and parts.
        length: Tokens of a row (of its target, for an encoder-decoder).
        source_length: Tokens of its source.
        accumulation: In how many parts a device works through its rows.
        remat: As in `layers.Mode`.
        dtype: Of the computation.
        expert_room: As `room` of `F.mix_experts`.
        optimizer: Which kind.
        kernels: As in `costs.activation_bytes`.

    Returns:
        Bytes. Parameters are exact, the rest is an estimate: in our tests the total is within a
        factor of 1.5 of what the compiler lays out.

    Raises:
        ValueError: The model or the batch cannot be shared out over the mesh, or there is no such
            optimizer.
    """
    if optimizer not in get_args(OptimizerKind):
        raise ValueError(f"optimizer must be one of {get_args(OptimizerKind)}; got {optimizer!r}.")
    lengths = [length, source_length] if source_length else [length]
    check_fits(config, sizes, batch_size=batch_size, lengths=lengths, accumulation=accumulation)
    axis_sizes = {name: sizes.get(name, 1) for name in AXES}
    rows = batch_size // (math.prod(axis_sizes[name] for name in ROWS) * accumulation)
    compute_bytes = jnp.dtype(dtype).itemsize
    tensor, context = axis_sizes["tensor"], axis_sizes["context"]
    platform = "gpu" if kernels else "cpu"
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
        expert=slots(axis_sizes["expert"], expert_room),
        kernels=kernels,
    )
    local_sizes = [(x, _share(x, axis_sizes)) for x in jax.tree.leaves(declarations(config))]
    parameters = sum(share for _, share in local_sizes)
    return Memory(
        parameters=WIDE * parameters,
        optimizer=WIDE * sum(_numbers_kept(x, optimizer) * share for x, share in local_sizes),
        gradients=WIDE * parameters * min(accumulation, 2),
        kernels=compute_bytes
        * _put_together(config, axis_sizes, cast=compute_bytes < WIDE, remat=remat),
        activations=activations - logits,
        logits=logits,
    )


def slots(devices: int, expert_room: float | None) -> float:
    """Expert slots on a device per row that it sends."""
    return float(devices if expert_room is None else min(devices, expert_room))


def _share(x: Declaration, n: Mapping[str, int]) -> int:
    """Elements of a parameter stored on one device."""
    return math.prod(x.shape) // math.prod(n[axis] for axis in x.spec(n) if axis)


def _put_together(
    config: c.TransformerConfig, n: Mapping[str, int], *, cast: bool, remat: str
) -> int:
    """Elements of all-gathered or cast weights held beside the shards."""
    if n["fsdp"] == 1 and not cast:
        return 0
    all_layers_at_once = n["fsdp"] == 1 and remat == "none"
    layers: dict[Any, int] = defaultdict(int)
    outside_layers = 0
    for path, x in tree_leaves_with_path(declarations(config)):
        gathered_size = _share(x, {**n, "fsdp": 1})
        if path[1] not in (DictKey("layers"), DictKey("tail")):
            outside_layers += gathered_size
        elif all_layers_at_once:
            layers["all"] += gathered_size
        else:
            layers[path[:3]] += gathered_size // (x.shape[0] if "layers" in x.names else 1)
    return outside_layers + max(layers.values())


def _numbers_kept(x: Declaration, optimizer: str) -> int:
    """Optimizer-state values per parameter element."""
    match optimizer:
        case "adafactor":  # of a matrix a row and a column
            return 0 if x.outputs else 1
        case "muon":
            return 1 if x.role == "kernel" else 2
        case "lion" | "sgd":
            return 1
    return 2
