"""Checks before training that parameters and train step fit in the memory of a device."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from experiments.training.memory_advice import TooLargeError, memory_advice
from experiments.training.run_config import RunConfig
from jaxformer import costs
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training.progress import format_count

CGROUP_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


def device_memory_limit() -> int | None:
    """Memory limit of each device of this process in bytes; None if unknown."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None:
        return stats.get("bytes_limit")
    if device.platform != "cpu":
        return None
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit_text = CGROUP_LIMIT_FILE.read_text().strip() if CGROUP_LIMIT_FILE.is_file() else ""
    if limit_text.isdigit():
        total_bytes = min(total_bytes, int(limit_text))
    return total_bytes // len(jax.local_devices())


def check_memory(run: RunConfig, mesh: Mesh, *, length: int, source_length: int) -> None:
    """Print the estimated memory per device before allocation.

    The size of the activations is only printed; `check_compiled_memory` has the compiler's number.

    Raises:
        TooLargeError: Parameters, optimizer state and gradients alone do not fit.
    """
    needed = estimate_memory(
        run.model,
        mesh.shape,
        batch_size=run.batch_size,
        length=length,
        source_length=source_length,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        remat=run.remat,
        dtype=run.dtype,
        expert_capacity_factor=run.expert_capacity_factor,
        optimizer=type(run.optimizer.optimizer).__name__.lower(),
        platform=mesh.devices.flat[0].platform,
    )
    parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in needed._asdict().items())
    print(
        f"Estimated memory per device: {needed.total / 2**20:.0f} MiB ({parts}); "
        f"{format_count(costs.num_parameters(run.model))} parameters."
    )
    limit = device_memory_limit()
    persistent_bytes = needed.parameters + needed.optimizer + needed.gradients
    if limit is not None and persistent_bytes > limit:
        raise TooLargeError(
            f"Parameters, optimizer state and gradients need {format_gib(persistent_bytes)} per "
            f"device, but a device has {format_gib(limit)}.\n{memory_advice(run)}"
        )


def check_compiled_memory(compiled: jax.stages.Compiled, advice: Callable[[], str]) -> None:
    """Raise TooLargeError, with the advice, if the train step needs more than a device has."""
    memory, limit = compiled.memory_analysis(), device_memory_limit()
    if memory is None or limit is None:
        return
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    if arguments + temporary > limit:
        raise TooLargeError(
            f"The train step needs {format_gib(arguments + temporary)} per device "
            f"({format_gib(arguments)} for parameters, optimizer state and batch, "
            f"{format_gib(temporary)} temporary), but a device has {format_gib(limit)}.\n{advice()}"
        )


def format_gib(size: int) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"
