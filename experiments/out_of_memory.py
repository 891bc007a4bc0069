"""What to do when a run does not fit: say what it takes, and which flags would help."""

import os
from pathlib import Path

import jax

from experiments.training_run import Run

CGROUP = Path("/sys/fs/cgroup/memory.max")


class TooLargeError(RuntimeError):
    """A run needs more memory than a device has, or had."""


def memory_per_device() -> int | None:
    """Bytes that each device of this process may take; None where nobody says."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None:
        return stats.get("bytes_limit")
    if device.platform != "cpu":
        return None
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if CGROUP.is_file() and (said := CGROUP.read_text().strip()).isdigit():
        whole = min(whole, int(said))
    return whole // len(jax.local_devices())


def refuse_too_large(run: Run, compiled: jax.stages.Compiled) -> None:
    """Refuse an update that needs more than a device has, before anything is lost.

    Raises:
        TooLargeError: With what it needs, what there is, and what would help.
    """
    memory, limit = compiled.memory_analysis(), memory_per_device()
    if memory is None or limit is None:
        return
    kept, working = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    if kept + working > limit:
        raise TooLargeError(
            f"The update needs {gib(kept + working)} on each device ({gib(kept)} of parameters, "
            f"optimizer state and batch, {gib(working)} of working space), which has "
            f"{gib(limit)}.\n{advice(run)}"
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether the runtime says that memory was not enough."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def advice(run: Run) -> str:
    """The flags that would help, as they stand and as they could."""
    keep_less = f"--remat full --scan: less is kept for the backward pass (now {run.remat})"
    if run.remat == "full" and run.scan:
        keep_less = f"--batch-size {max(1, run.batch_size // 2)}: fewer rows (now {run.batch_size})"
    return f"""What would help:
  {keep_less};
  --accumulation {2 * run.accumulation}: fewer rows at a time (now {run.accumulation});
  --mesh.fsdp {2 * run.mesh.fsdp}: parameters and optimizer are shared out (now {run.mesh.fsdp})."""


def gib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.1f} GiB"
