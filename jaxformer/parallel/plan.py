"""Roofline estimate of one training step on a mesh: memory and time, without a device."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from jaxformer import config as c
from jaxformer import costs
from jaxformer.checks import check_fields
from jaxformer.layers.mode import Remat
from jaxformer.parallel.chips import Chip
from jaxformer.parallel.memory import Memory, OptimizerKind, memory, slots
from jaxformer.parallel.mesh import AXES, ROWS

ROOM = 0.9  # of a chip's memory: what may be planned with, since estimates are estimates
LARGEST = 2**14  # devices that a mesh is looked for with
TOKENS = 2**22  # of a batch that is filled with as many rows as have room
DOUBLINGS = (2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings of one training step: batch, length, remat, dtype, optimizer.

    Attributes:
        batch_size: Rows, over all devices and parts; None is one for each device that has its own
            rows, in each part.
        length: Tokens of a row (of its target, for an encoder-decoder).
        source_length: Tokens of its source.
        accumulation: In how many parts a device works through its rows.
        remat: What the backward pass recomputes: "none", "dots" or "full".
        dtype: Of the computation.
        expert_room: As `room` of `F.mix_experts`.
        optimizer: What it keeps of each parameter.
    """

    batch_size: int | None = None
    length: int = 4096
    source_length: int = 0
    accumulation: int = 1
    remat: Remat = "full"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    expert_room: float | None = None
    optimizer: OptimizerKind = "adamw"

    def __post_init__(self):
        check_fields(self)
        for name in ("batch_size", "length", "accumulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}.")
        if self.expert_room is not None and not self.expert_room >= 1:
            raise ValueError(f"expert_room must be at least 1, or None; got {self.expert_room}.")
        if self.source_length < 0:
            raise ValueError(f"source_length must not be negative; got {self.source_length}.")

    def rows(self, sizes: Mapping[str, int]) -> int:
        """Global batch size."""
        default_rows = math.prod(sizes.get(name, 1) for name in ROWS) * self.accumulation
        return default_rows if self.batch_size is None else self.batch_size

    def on(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What `memory` wants to know."""
        return {**vars(self), "batch_size": self.rows(sizes)}


class Plan(NamedTuple):
    """Estimated memory, FLOPs and time of one training step.

    `flops` are those of the model, on all devices; `computed` are those that are spent.
    """

    sizes: dict[str, int]
    chip: Chip
    work: Work
    memory: Memory
    flops: float
    computed: float

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    @property
    def rows(self) -> int:
        """Global batch size."""
        return self.work.rows(self.sizes)

    @property
    def fits(self) -> bool:
        """Whether the estimated memory is below 90 % of the chip's."""
        return self.memory.total <= ROOM * self.chip.memory

    @property
    def computing(self) -> float:
        """Seconds for the matrix products at the chip's peak FLOP/s."""
        return self.computed / (self.devices * self.chip.peak_flops)

    @property
    def updating(self) -> float:
        """Seconds to read and write parameters, gradients and optimizer state."""
        m = self.memory
        return (2 * (m.parameters + m.optimizer) + m.gradients) / self.chip.bandwidth

    @property
    def seconds(self) -> float:
        """Lower bound of the step time."""
        return self.computing + self.updating

    @property
    def utilisation(self) -> float:
        """Upper bound of the model FLOPs utilization (MFU)."""
        return self.flops / (self.seconds * self.devices * self.chip.peak_flops)


def plan(config: c.TransformerConfig, sizes: Mapping[str, int], chip: Chip, work: Work) -> Plan:
    """Estimate memory and time of one training step by a roofline model.

        compute = training FLOPs / (devices * peak)
        update = (2 * (parameters + state) + gradients) / bandwidth of memory
        time = compute + update
        utilisation = the model's FLOPs / (time * devices * peak)

    Products run at the peak here and nothing else takes time, messages between devices neither. So
    the utilisation is a bound: what is reached is less. `training.compiled` has XLA compile the
    update, and tells which messages it waits for.

    "full" computes the forward pass twice, which counts as time and not as the model's FLOPs;
    scores that attention by blocks computes again backwards count as neither; experts on several
    devices compute on all slots that they have room for, empty or not.

    Args:
        config: The model.
        sizes: Devices along each axis.
        chip: What they are.
        work: What they do.

    Returns:
        The plan.

    Raises:
        ValueError: The model or the batch cannot be shared out over the mesh.

    References:
        Williams, Waterman and Patterson, Roofline: An Insightful Visual Performance Model, 2009
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311,
        appendix B (utilisation)
    """
    axis_sizes = {name: sizes.get(name, 1) for name in AXES}
    rows = work.rows(axis_sizes)
    forward_flops = rows * costs.forward_flops(config, work.length, work.source_length)
    expert_flops = rows * costs.expert_flops(config, work.length, work.source_length)
    empty_slot_flops = expert_flops * (slots(axis_sizes["expert"], work.expert_room) - 1)
    num_passes = costs.TRAINING_FACTOR + (work.remat == "full")
    hardware_flops = num_passes * (forward_flops + empty_slot_flops)
    num_shards = (
        math.prod(axis_sizes[name] for name in ROWS) * work.accumulation * axis_sizes["context"]
    )
    tokens = rows * work.length // num_shards
    recomputes_logits = costs.recomputes_logits(
        config, tokens, tensor=axis_sizes["tensor"], platform="gpu"
    )
    if recomputes_logits and work.remat != "full":
        hardware_flops += rows * costs.head_flops(config, work.length)
    return Plan(
        sizes=axis_sizes,
        chip=chip,
        work=work,
        memory=memory(config, axis_sizes, **work.on(axis_sizes), kernels=True),
        flops=float(costs.TRAINING_FACTOR * forward_flops),
        computed=float(hardware_flops),
    )


def sensible_mesh(
    config: c.TransformerConfig, chip: Chip, work: Work, *, devices: int | None = None
) -> dict[str, int]:
    """Smallest (data, fsdp, tensor) mesh on which the model fits.

    Args:
        config: The model.
        chip: What the devices are.
        work: What they do.
        devices: How many there are; None looks for the fewest.

    Returns:
        Of several meshes of as many devices that of the least `tensor`, along which every layer
        waits for sums, and then of the most `fsdp`, which leaves the most room; where none has
        room, that which needs the least.

    Raises:
        ValueError: No mesh fits the model and the batch at all.
    """
    if devices is not None and devices < 1:
        raise ValueError(f"A mesh has at least 1 device; got devices={devices}.")
    candidates: list[tuple[int, dict[str, int]]] = []
    for mesh_shape in _meshes(chip, devices):
        try:
            bytes_needed = memory(config, mesh_shape, **work.on(mesh_shape), kernels=True).total
        except ValueError:
            continue
        candidates.append((bytes_needed, mesh_shape))
    if not candidates:
        count = "any number of" if devices is None else f"{devices}"
        raise ValueError(
            f"No mesh of {count} devices along data, fsdp and tensor fits the model and a batch of "
            f"{work.batch_size} rows of {work.length} tokens in {work.accumulation} parts."
        )
    fitting = [
        mesh_shape for bytes_needed, mesh_shape in candidates if bytes_needed <= ROOM * chip.memory
    ]
    if not fitting:
        return min(candidates, key=lambda pair: pair[0])[1]
    fewest = min(math.prod(mesh_shape.values()) for mesh_shape in fitting)
    small = [mesh_shape for mesh_shape in fitting if math.prod(mesh_shape.values()) == fewest]
    return min(small, key=lambda sizes: (sizes["tensor"], -sizes["fsdp"]))


def filled(config: c.TransformerConfig, sizes: Mapping[str, int], chip: Chip, work: Work) -> Work:
    """With as many rows a device as have room, a power of two, up to `TOKENS` in the batch."""
    while work.rows(sizes) * 2 * work.length <= TOKENS:
        doubled = replace(work, batch_size=2 * work.rows(sizes))
        bytes_needed = memory(config, sizes, **doubled.on(sizes), kernels=True).total
        if bytes_needed > ROOM * chip.memory:
            break
        work = doubled
    return work


def _meshes(chip: Chip, devices: int | None) -> Iterator[dict[str, int]]:
    tensor = 1
    while tensor <= min(chip.domain, 8):
        fsdp = 1
        while tensor * fsdp <= (devices or LARGEST):
            data, rest = divmod(devices or tensor * fsdp, tensor * fsdp)
            if not rest:
                yield {"data": data, "fsdp": fsdp, "tensor": tensor}
            fsdp *= 2
        tensor *= 2


def changes(config: c.TransformerConfig, before: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield single changes that save memory, as (flags, plan with them)."""
    workload, mesh_shape = before.work, before.sizes
    candidates: list[tuple[str, dict[str, int], Work]] = []
    if workload.remat != "full":
        candidates.append(("--remat full", mesh_shape, replace(workload, remat="full")))
    for parts in DOUBLINGS:
        steps = workload.accumulation * parts
        candidates.append(
            (f"--accumulation {steps}", mesh_shape, replace(workload, accumulation=steps))
        )
    for axis in ("fsdp", "tensor", "context"):
        for factor in DOUBLINGS:
            size = mesh_shape[axis] * factor
            if axis != "tensor" or size <= before.chip.domain:
                candidates.append((f"--mesh.{axis} {size}", {**mesh_shape, axis: size}, workload))
    if workload.optimizer == "adamw":
        candidates.append(("--optimizer lion", mesh_shape, replace(workload, optimizer="lion")))
    for flags, candidate_shape, candidate_workload in candidates:
        try:
            yield flags, plan(config, candidate_shape, before.chip, candidate_workload)
        except ValueError:
            continue
