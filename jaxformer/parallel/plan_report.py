"""Formats a plan as plain text."""

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import costs
from jaxformer.parallel.mesh import MESH_AXES
from jaxformer.parallel.plan import (
    ADAPTER_FLAGS,
    USABLE_MEMORY_FRACTION,
    Plan,
    memory_saving_changes,
    plan,
    smallest_fitting_mesh,
    with_adapter,
)

LINE_WIDTH = 118


def format_plan(name: str, config: c.TransformerConfig, estimate: Plan) -> str:
    """The plan as text: memory and time of one step."""
    title = f"{name} on {estimate.num_devices:,} x {estimate.chip.name}: {_format_mesh(estimate)}"
    parts = [
        f"{title}\n{'=' * len(title)}",
        _format_workload(config, estimate),
        _format_memory(estimate),
        _format_time(estimate),
    ]
    if not estimate.fits:
        parts.append(_format_remedies(config, estimate))
    return "\n\n".join(parts)


def format_compiled(estimate: Plan, report: Any) -> str:
    """The compiler's figures as text, compared with the plan."""

    def sizes_text(sizes: Mapping[str, int]) -> str:
        order = sorted(sizes.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in order) or "none"

    kernels = ", ".join(f"{name} {n}" for name, n in sorted(report.custom_kernels.items()))
    lines = [
        f"compiled by XLA, per device (JAX {jax.__version__})",
        "-" * 48,
        f"{'peak memory':40}{_format_gigabytes(report.peak_bytes)} of "
        f"{estimate.chip.memory / 1e9:,.0f} GB; "
        f"estimated {estimate.memory.total / 1e9:,.2f}",
        textwrap.fill(
            f"{'custom kernels':40}{kernels or 'none'}", LINE_WIDTH, subsequent_indent=" " * 40
        ),
        f"{'blocking collectives':40}{sizes_text(report.sync_collective_bytes)}",
        f"{'asynchronous collectives':40}{sizes_text(report.async_collective_bytes)}",
    ]
    if report.estimated_seconds:
        share = estimate.model_flops / (
            report.estimated_seconds * estimate.num_devices * estimate.chip.peak_flops
        )
        lines += [
            f"{'time, estimated by XLA':40}{_format_seconds(report.estimated_seconds)}; "
            f"{share:.0%} of the peak",
            "This time is without collectives and custom kernels. Nothing was executed.",
        ]
    return "\n".join(lines)


def _format_mesh(estimate: Plan) -> str:
    sizes = ((axis, estimate.mesh_shape[axis]) for axis in MESH_AXES)
    return " x ".join(f"{axis} {n:,}" for axis, n in sizes if n > 1) or "one device"


def _format_workload(config: c.TransformerConfig, estimate: Plan) -> str:
    workload, num_parameters = estimate.workload, costs.num_parameters(config)
    rows = estimate.batch_size
    source = f" and sources of {workload.source_length:,}" if workload.source_length else ""
    batch = f"{rows:,} row{'s' * (rows > 1)}"
    steps = workload.gradient_accumulation_steps
    parts = f" in {steps:,} accumulation steps" if steps > 1 else ""
    return (
        f"{num_parameters:,} parameters; a step of {batch} of {workload.length:,} tokens{source}"
        f"{parts}, {rows * workload.length:,} tokens;\n"
        f"{workload.dtype}, remat {workload.remat}, {workload.optimizer}"
    )


def _format_memory(estimate: Plan) -> str:
    words = {
        "parameters": "parameters",
        "optimizer": "optimizer state",
        "gradients": "gradients",
        "gathered_kernels": "copies of kernels (gathered, cast)",
        "activations": "activations, about",
        "logits": "logits and their gradient",
    }
    lines = [f"{'memory per device':40}{'GB':>8}", "-" * 48]
    lines += [
        f"{words[field]:40}{_format_gigabytes(size)}"
        for field, size in estimate.memory._asdict().items()
        if size
    ]
    total = estimate.memory.total
    verdict = "fits" if estimate.fits else f"does not fit into {USABLE_MEMORY_FRACTION:.0%} of it"
    lines.append(
        f"{'total':40}{_format_gigabytes(total)} of {estimate.chip.memory / 1e9:,.0f} GB; {verdict}"
    )
    return "\n".join(lines)


def _format_time(estimate: Plan) -> str:
    flops_ratio = estimate.hardware_flops / estimate.model_flops
    note = f", including recomputation and empty expert slots ({flops_ratio:.2f} x)"
    recompute_note = "" if flops_ratio == 1 else note
    lines = [
        "time per step",
        "-" * 48,
        f"{'matmuls at ' + _format_flops(estimate.chip.peak_flops):40}"
        f"{_format_seconds(estimate.compute_seconds)}{recompute_note}",
        f"{'optimizer: memory reads and writes':40}{_format_seconds(estimate.optimizer_seconds)}",
        f"{'total':40}{_format_seconds(estimate.step_seconds)}",
        f"{'MFU':40}{estimate.mfu:.0%} at most",
    ]
    closing = (
        f"{_format_flops(estimate.model_flops, 'FLOP')} per step without recomputation, "
        f"{estimate.workload.length * estimate.batch_size / estimate.step_seconds:,.0f} tokens/s "
        "at most: matmuls are assumed to run at the published bfloat16 peak, and communication to "
        "take no time. For the collectives of the compiled step pass --compile."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, LINE_WIDTH)])


def _format_remedies(config: c.TransformerConfig, estimate: Plan) -> str:
    """Single changes with which it fits, or else the smallest mesh."""
    fitting: dict[str, str] = {}  # the first of each kind
    for change, other in memory_saving_changes(config, estimate):
        if other.fits:
            fitting.setdefault(change.split()[0], _format_change(change, other))
    text = "\n".join(["It fits with one of", *fitting.values()])
    if not fitting:
        text = f"No single change is enough. {_smallest_mesh(config, estimate)}"
    if config.adapter is None and ADAPTER_FLAGS.split()[0] not in fitting:
        text += f"\nWith {ADAPTER_FLAGS}: {_smallest_mesh(with_adapter(config), estimate)}"
    return text


def _smallest_mesh(config: c.TransformerConfig, estimate: Plan) -> str:
    """The smallest mesh with which it fits, or else that with the least memory."""
    for workload in (estimate.workload, replace(estimate.workload, remat="full")):
        mesh_shape = smallest_fitting_mesh(config, estimate.chip, workload)
        smallest = plan(config, mesh_shape, estimate.chip, workload)
        if smallest.fits:
            break
    flags = [f"--mesh.{axis} {n}" for axis, n in smallest.mesh_shape.items() if n > 1]
    flags += ["--remat full"] if workload != estimate.workload else []
    heading = "It fits with" if smallest.fits else "The mesh with the least memory is"
    return f"{heading}\n{_format_change(' '.join(flags) or 'one device', smallest)}"


def _format_change(flags: str, other: Plan) -> str:
    return (
        f"  {flags:52}{_format_gigabytes(other.memory.total)} GB, {other.num_devices:,} "
        f"device{'s' * (other.num_devices > 1)}, MFU {other.mfu:.0%} at most"
    )


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:8,.2f}"


def format_bytes(size: int | float) -> str:
    """Format bytes with a decimal unit, from B to PB."""
    return _format_with_unit(size, ("B", "kB", "MB", "GB", "TB", "PB"))


def _format_flops(number: float, unit: str = "FLOP/s") -> str:
    return _format_with_unit(number, tuple(letter + unit for letter in " kMGTPE"))


def _format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return _format_with_unit(1e9 * seconds, ("ns", "us", "ms", "s"))


def _format_with_unit(number: int | float, units: tuple[str, ...]) -> str:
    """The number with about three digits and the largest fitting unit."""
    power = max(i for i in range(len(units)) if number >= 1000**i or i == 0)
    scaled = number / 1000**power
    digits = 0 if scaled >= 100 or power == 0 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {units[power]}"
