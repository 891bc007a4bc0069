"""Roofline estimate of one training step on a mesh: memory and time, without a device."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxformer import config as c
from jaxformer import costs
from jaxformer.checks import AtLeastOne, Checked, Count, Size
from jaxformer.layers.runtime import Remat
from jaxformer.parallel.chips import Chip
from jaxformer.parallel.memory import MemoryEstimate, OptimizerKind, estimate_memory, expert_slots
from jaxformer.parallel.mesh import MESH_AXES, num_batch_shards

USABLE_MEMORY_FRACTION = 0.9  # of a chip's memory, as a margin for the error of the estimate
MAX_DEVICES = 2**14  # of the search for a mesh
MAX_BATCH_TOKENS = 2**22  # of the search for the largest batch
ADAPTER_FLAGS = "--adapter 'LoRA(rank=16, base_dtype=\"bfloat16\")'"
DOUBLINGS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Workload(Checked):
    """Settings of one training step: batch, length, remat, dtype, optimizer.

    Attributes:
        batch_size: Global batch size in rows; None is one row per batch shard and microbatch.
        length: Row length in tokens; of the targets, for an encoder-decoder.
        source_length: Source length in tokens.
        gradient_accumulation_steps: Number of microbatches of a step.
        remat: What the backward pass recomputes: "none", "dots" or "full".
        dtype: Dtype of the computation.
        expert_capacity_factor: As `capacity_factor` of `F.mixture_of_experts`.
        optimizer: Kind of optimizer.
    """

    batch_size: Size | None = None
    length: Size = 4096
    source_length: Count = 0
    gradient_accumulation_steps: Size = 1
    remat: Remat = "full"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    expert_capacity_factor: AtLeastOne | None = None
    optimizer: OptimizerKind = "adamw"

    def global_batch_size(self, mesh_shape: Mapping[str, int]) -> int:
        """Global batch size."""
        default_rows = num_batch_shards(mesh_shape) * self.gradient_accumulation_steps
        return default_rows if self.batch_size is None else self.batch_size

    def memory(
        self, config: c.TransformerConfig, mesh_shape: Mapping[str, int], chip: Chip
    ) -> MemoryEstimate:
        """Estimated memory of one device."""
        options = {**vars(self), "batch_size": self.global_batch_size(mesh_shape)}
        return estimate_memory(config, mesh_shape, **options, platform=chip.platform)


class Plan(NamedTuple):
    """Estimated memory, FLOPs and time of one training step.

    `model_flops` and `hardware_flops` are without and with recomputation and empty expert slots.
    """

    mesh_shape: dict[str, int]
    chip: Chip
    workload: Workload
    memory: MemoryEstimate
    model_flops: float
    hardware_flops: float

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh_shape.values())

    @property
    def batch_size(self) -> int:
        """Global batch size."""
        return self.workload.global_batch_size(self.mesh_shape)

    @property
    def fits(self) -> bool:
        """Whether the estimated memory is at most 90% of the chip's."""
        return self.memory.total <= USABLE_MEMORY_FRACTION * self.chip.memory

    @property
    def compute_seconds(self) -> float:
        """Seconds of the matmuls at the chip's peak FLOP/s."""
        return self.hardware_flops / (self.num_devices * self.chip.peak_flops)

    @property
    def optimizer_seconds(self) -> float:
        """Seconds to read and write parameters, gradients and optimizer state."""
        m = self.memory
        return (2 * (m.parameters + m.optimizer) + m.gradients) / self.chip.bandwidth

    @property
    def step_seconds(self) -> float:
        """Lower bound of the step time."""
        return self.compute_seconds + self.optimizer_seconds

    @property
    def mfu(self) -> float:
        """Upper bound of the model FLOPs utilization (MFU)."""
        return self.model_flops / (self.step_seconds * self.num_devices * self.chip.peak_flops)


def plan(
    config: c.TransformerConfig, mesh_shape: Mapping[str, int], chip: Chip, workload: Workload
) -> Plan:
    """Estimate memory and time of one training step by a roofline model.

        compute = training FLOPs / (devices * peak)
        update = (2 * (parameters + state) + gradients) / bandwidth of memory
        time = compute + update
        MFU = the model's FLOPs / (time * devices * peak)

    Matmuls are assumed to run at the peak, and nothing else takes time, including communication. So
    MFU is an upper bound. `training.aot_compile` compiles the step with XLA and reports its
    collectives.

    The second forward pass of remat "full" counts as time but not as model FLOPs; attention scores
    that blockwise attention recomputes count as neither; experts on several devices compute all of
    their slots, including empty ones.

    Args:
        config: Model configuration.
        mesh_shape: Devices along each axis.
        chip: Kind of chip.
        workload: Settings of the step.

    Returns:
        The plan.

    Raises:
        ValueError: Model or batch do not divide evenly over the mesh.

    References:
        Williams, Waterman and Patterson, Roofline: An Insightful Visual Performance Model, 2009
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311,
        appendix B (MFU)
    """
    axis_sizes = {name: mesh_shape.get(name, 1) for name in MESH_AXES}
    rows = workload.global_batch_size(axis_sizes)
    forward_flops = rows * costs.forward_flops(config, workload.length, workload.source_length)
    expert_flops = rows * costs.expert_flops(config, workload.length, workload.source_length)
    slots = expert_slots(axis_sizes["expert"], workload.expert_capacity_factor)
    num_passes = costs.training_factor(config) + (workload.remat == "full")
    hardware_flops = num_passes * (forward_flops + expert_flops * (slots - 1))
    num_parts = num_batch_shards(axis_sizes) * workload.gradient_accumulation_steps
    tokens = rows * workload.length // (num_parts * axis_sizes["context"])
    tensor = axis_sizes["tensor"]
    is_chunked = costs.recomputes_logits(config, tokens, tensor=tensor, platform=chip.platform)
    if is_chunked and workload.remat != "full":
        hardware_flops += rows * costs.logit_flops(config, workload.length)
    return Plan(
        mesh_shape=axis_sizes,
        chip=chip,
        workload=workload,
        memory=workload.memory(config, axis_sizes, chip),
        model_flops=float(costs.training_factor(config) * forward_flops),
        hardware_flops=float(hardware_flops),
    )


def smallest_fitting_mesh(
    config: c.TransformerConfig, chip: Chip, workload: Workload, *, devices: int | None = None
) -> dict[str, int]:
    """Smallest (data, fsdp, tensor) mesh on which the model fits.

    Args:
        config: Model configuration.
        chip: Kind of chip.
        workload: Settings of the step.
        devices: Number of devices; None searches for the fewest.

    Returns:
        The mesh with the fewest devices, then the smallest `tensor`, as every layer waits for its
        all-reduces, then the largest `fsdp`, which saves memory. If none fits, the mesh that needs
        the least memory per device.

    Raises:
        ValueError: Model and batch do not divide evenly over any mesh.
    """
    if devices is not None and devices < 1:
        raise ValueError(f"devices must be at least 1; got {devices}.")
    candidates: list[tuple[int, dict[str, int]]] = []
    for mesh_shape in _candidate_meshes(chip, devices):
        with contextlib.suppress(ValueError):
            candidates.append((workload.memory(config, mesh_shape, chip).total, mesh_shape))
    if not candidates:
        count = "any number of" if devices is None else f"{devices}"
        raise ValueError(
            f"No mesh of {count} devices along data, fsdp and tensor divides the model and a batch "
            f"of {workload.batch_size} rows of {workload.length} tokens in "
            f"{workload.gradient_accumulation_steps} accumulation steps."
        )
    fitting = [n for needed, n in candidates if needed <= USABLE_MEMORY_FRACTION * chip.memory]
    if not fitting:
        return min(candidates, key=lambda pair: pair[0])[1]
    return min(fitting, key=lambda n: (math.prod(n.values()), n["tensor"], -n["fsdp"]))


def with_largest_batch(
    config: c.TransformerConfig, mesh_shape: Mapping[str, int], chip: Chip, workload: Workload
) -> Workload:
    """The workload with the largest batch (powers of two) that fits, up to MAX_BATCH_TOKENS."""
    while workload.global_batch_size(mesh_shape) * 2 * workload.length <= MAX_BATCH_TOKENS:
        doubled = replace(workload, batch_size=2 * workload.global_batch_size(mesh_shape))
        if doubled.memory(config, mesh_shape, chip).total > USABLE_MEMORY_FRACTION * chip.memory:
            break
        workload = doubled
    return workload


def _candidate_meshes(chip: Chip, devices: int | None) -> Iterator[dict[str, int]]:
    tensor = 1
    while tensor <= min(chip.link_domain_size, 8):
        fsdp = 1
        while tensor * fsdp <= (devices or MAX_DEVICES):
            data, rest = divmod(devices or tensor * fsdp, tensor * fsdp)
            if not rest:
                yield {"data": data, "fsdp": fsdp, "tensor": tensor}
            fsdp *= 2
        tensor *= 2


def with_adapter(config: c.TransformerConfig) -> c.TransformerConfig:
    """The model with the adapters of `ADAPTER_FLAGS`, to fine-tune it in less memory."""
    return replace(config, adapter=c.LoRA(rank=16, base_dtype="bfloat16"))


def memory_saving_changes(config: c.TransformerConfig, current: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield single changes that save memory, as (flags, plan with them)."""
    workload, mesh_shape = current.workload, current.mesh_shape
    if config.adapter is None:
        yield ADAPTER_FLAGS, plan(with_adapter(config), mesh_shape, current.chip, workload)
    changes: list[tuple[str, dict[str, Any]]] = []  # flags, and sizes of axes or fields
    if workload.remat != "full":
        changes.append(("--remat full", {"remat": "full"}))
    for parts in DOUBLINGS:
        steps = workload.gradient_accumulation_steps * parts
        flags = f"--gradient-accumulation-steps {steps}"
        changes.append((flags, {"gradient_accumulation_steps": steps}))
    for axis in ("fsdp", "tensor", "context"):
        for factor in DOUBLINGS:
            size = mesh_shape[axis] * factor
            if axis != "tensor" or size <= current.chip.link_domain_size:
                changes.append((f"--mesh.{axis} {size}", {axis: size}))
    if workload.optimizer == "adamw":
        changes.append(("--optimizer lion", {"optimizer": "lion"}))
    for flags, change in changes:
        axes = {name: value for name, value in change.items() if name in MESH_AXES}
        work = workload if axes else replace(workload, **change)
        try:
            yield flags, plan(config, {**mesh_shape, **axes}, current.chip, work)
        except ValueError:
            continue
