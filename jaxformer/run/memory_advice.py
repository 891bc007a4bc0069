"""Flags that make a run fit in the memory of a device."""

from collections.abc import Iterator
from dataclasses import replace

from jaxformer.parallel import check_divisible
from jaxformer.parallel.plan import ADAPTER_FLAGS, with_adapter
from jaxformer.run.run_config import RunConfig, select_devices


class TooLargeError(ValueError):
    """The run needs more memory than a device has."""


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
    if run.init is not None and run.model.adapter is None:
        changed = replace(run, model=with_adapter(run.model))
        yield f"--model.{ADAPTER_FLAGS[2:]}", "train low-rank adapters, not the model", changed
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
