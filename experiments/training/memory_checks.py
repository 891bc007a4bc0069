"""Checks memory before training, and suggests flags where it does not fit."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from experiments.training.run_config import RunConfig, select_devices
from jaxformer import costs
from jaxformer.parallel import check_divisible
from jaxformer.parallel.memory import estimate_memory
from jaxformer.training.progress import format_count

CGROUP_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


class TooLargeError(ValueError):
    """The run needs more memory than a device has."""


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
        fused_attention=mesh.devices.flat[0].platform != "cpu",
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


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception means that the device ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def memory_advice(run: RunConfig) -> str:
    """Up to three flags that reduce memory enough to fit."""
    suggestions = [
        f"  {flags}: {why}"
        for flags, why, changed in memory_saving_changes(run)
        if mesh_fits(changed)
    ][:3]
    return "To reduce memory:\n" + ";\n".join([*suggestions, "  more devices"][:3]) + "."


def memory_saving_changes(run: RunConfig) -> Iterator[tuple[str, str, RunConfig]]:
    """Memory-saving changes: flags, description, and the run with them."""
    if run.remat != "full" or not run.scan:
        why = f"recompute activations in the backward pass (now {run.remat})"
        yield "--remat full --scan", why, replace(run, remat="full", scan=True)
    steps = run.gradient_accumulation_steps
    changed = replace(run, gradient_accumulation_steps=2 * steps)
    why = f"smaller microbatches (now {steps} accumulation steps)"
    yield f"--gradient-accumulation-steps {2 * steps}", why, changed
    for axis, what in (("fsdp", "parameters and optimizer"), ("tensor", "heads and hidden width")):
        now = getattr(run.mesh, axis)
        data = run.mesh.data and max(1, run.mesh.data // 2)
        mesh = replace(run.mesh, data=data, **{axis: 2 * now})
        flags = f"--mesh.{axis} {2 * now}" + (f" --mesh.data {data}" if data else "")
        yield flags, f"shard {what} (now over {now})", replace(run, mesh=mesh)
    fewer = max(1, run.batch_size // 2)
    why = f"smaller batch (now {run.batch_size})"
    yield f"--batch-size {fewer}", why, replace(run, batch_size=fewer)


def mesh_fits(run: RunConfig) -> bool:
    """Whether the batch and the model divide evenly over the mesh of the run."""
    try:
        sizes = run.mesh.shape(len(select_devices(run.devices)))
        check_divisible(
            run.model,
            sizes,
            batch_size=run.batch_size,
            gradient_accumulation_steps=run.gradient_accumulation_steps,
        )
    except ValueError:
        return False
    return True


def format_gib(size: int) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"
