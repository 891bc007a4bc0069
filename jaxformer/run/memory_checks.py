"""Checks before training that parameters and train step fit in the memory of a device."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxformer import costs
from jaxformer.parallel.memory import estimate_memory
from jaxformer.parallel.plan_report import format_bytes
from jaxformer.run.memory_advice import TooLargeError, memory_advice
from jaxformer.run.run_config import RunConfig
from jaxformer.training.progress import format_count

ESTIMATE_ERROR = 1.5  # factor within which `estimate_memory` is right
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


def check_memory(
    run: RunConfig, mesh: Mesh, *, length: int, source_length: int, exact: bool = True
) -> None:
    """Print the estimated memory per device before allocation.

    Args:
        run: The run.
        mesh: The mesh.
        length: Row length in tokens; with an encoder, of the targets.
        source_length: Source length in tokens.
        exact: Whether length and batch size are final; else they may become smaller.

    Raises:
        TooLargeError: Parameters, optimizer state and gradients do not fit, or all that is
            estimated by far not; `check_compiled_memory` has the compiler's number.
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
    sizes = needed._asdict().items()
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(x)}" for name, x in sizes if x)
    print(
        f"Estimated memory per device: {format_bytes(needed.total)} ({parts}); "
        f"{format_count(costs.num_parameters(run.model))} parameters."
    )
    limit = device_memory_limit()
    persistent_bytes = needed.parameters + needed.optimizer + needed.gradients
    if limit is not None and persistent_bytes > limit:
        raise TooLargeError(
            f"Parameters, optimizer state and gradients need {format_bytes(persistent_bytes)} per "
            f"device, but a device has {format_bytes(limit)}.\n{memory_advice(run)}"
        )
    if exact and limit is not None and needed.total > ESTIMATE_ERROR * limit:
        raise TooLargeError(
            f"A step of {run.batch_size} rows of {length} tokens needs about "
            f"{format_bytes(needed.total)} per device, but a device has {format_bytes(limit)}.\n"
            f"{memory_advice(run)}"
        )


def check_compiled_memory(compiled: jax.stages.Compiled, advice: Callable[[], str]) -> None:
    """Raise TooLargeError, with the advice, if the train step needs more than a device has."""
    memory, limit = compiled.memory_analysis(), device_memory_limit()
    if memory is None or limit is None:
        return
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    if arguments + temporary > limit:
        raise TooLargeError(
            f"The train step needs {format_bytes(arguments + temporary)} per device "
            f"({format_bytes(arguments)} for parameters, optimizer state and batch, "
            f"{format_bytes(temporary)} temporary), but a device has {format_bytes(limit)}.\n"
            f"{advice()}"
        )
