"""Formats a plan as plain text."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import costs
from jaxformer.parallel.mesh import AXES
from jaxformer.parallel.plan import ROOM, Plan, changes, plan, sensible_mesh

WIDTH = 118


def shown(name: str, config: c.TransformerConfig, found: Plan) -> str:
    """The plan as text: memory and time of one step."""
    title = f"{name} on {found.devices:,} x {found.chip.name}: {_mesh(found)}"
    parts = [f"{title}\n{'=' * len(title)}", _work(config, found), _memory(found), _time(found)]
    if not found.fits:
        parts.append(_remedies(config, found))
    return "\n\n".join(parts)


def compiled(found: Plan, made: Any) -> str:
    """The compiler's figures as text, beside the plan's."""

    def sizes_text(sizes: Mapping[str, int]) -> str:
        order = sorted(sizes.items(), key=lambda pair: -pair[1])
        return ", ".join(f"{kind} {_bytes(size)}" for kind, size in order) or "none"

    kernels = ", ".join(f"{name} {n}" for name, n in sorted(made.kernels.items())) or "none"
    lines = [
        f"as XLA compiles it, of a device (JAX {jax.__version__})",
        "-" * 48,
        f"{'memory at the peak':40}{_giga(made.peak)} of {found.chip.memory / 1e9:,.0f} GB; "
        f"planned {found.memory.total / 1e9:,.2f}",
        textwrap.fill(f"{'kernels in its text':40}{kernels}", WIDTH, subsequent_indent=" " * 40),
        f"{'messages waited for':40}{sizes_text(made.waiting)}",
        f"{'messages begun and ended apart':40}{sizes_text(made.meanwhile)}",
    ]
    if made.seconds:
        share = found.flops / (made.seconds * found.devices * found.chip.peak_flops)
        lines += [
            f"{'time, as it estimates':40}{_seconds(made.seconds)}; {share:.0%} of the peak",
            "Neither messages nor the time of kernels are in this estimate. Nothing was run.",
        ]
    return "\n".join(lines)


def _mesh(found: Plan) -> str:
    several = [f"{axis} {found.sizes[axis]:,}" for axis in AXES if found.sizes[axis] > 1]
    return " x ".join(several or ["one device"])


def _work(config: c.TransformerConfig, found: Plan) -> str:
    workload, num_parameters = found.work, costs.parameters(config)
    rows = found.rows
    source = f" and sources of {workload.source_length:,}" if workload.source_length else ""
    batch = f"{rows:,} row{'s' * (rows > 1)}"
    parts = f" in {workload.accumulation:,} parts" if workload.accumulation > 1 else ""
    return (
        f"{num_parameters:,} parameters; an update of {batch} of {workload.length:,} tokens{source}"
        f"{parts}, {rows * workload.length:,} tokens;\n"
        f"{workload.dtype}, remat {workload.remat}, {workload.optimizer}"
    )


def _memory(found: Plan) -> str:
    words = {
        "parameters": "parameters",
        "optimizer": "the optimizer's state",
        "gradients": "gradients",
        "kernels": "kernels put together for use",
        "activations": "activations, about",
        "logits": "logits and their gradient",
    }
    lines = [f"{'memory of a device':40}{'GB':>8}", "-" * 48]
    lines += [
        f"{words[field]:40}{_giga(size)}" for field, size in found.memory._asdict().items() if size
    ]
    total = found.memory.total
    verdict = "fits" if found.fits else f"does not fit into {ROOM:.0%} of it"
    lines.append(f"{'together':40}{_giga(total)} of {found.chip.memory / 1e9:,.0f} GB; {verdict}")
    return "\n".join(lines)


def _time(found: Plan) -> str:
    flops_ratio = found.computed / found.flops
    recompute_note = (
        ""
        if flops_ratio == 1
        else f", with what is computed again or for nothing ({flops_ratio:.2f} x)"
    )
    lines = [
        "time of an update",
        "-" * 48,
        f"{'products at ' + _flops(found.chip.peak_flops):40}"
        f"{_seconds(found.computing)}{recompute_note}",
        f"{'parameters and state, read and written':40}{_seconds(found.updating)}",
        f"{'together':40}{_seconds(found.seconds)}",
        f"{'utilisation':40}{found.utilisation:.0%} at most",
    ]
    closing = (
        f"{_flops(found.flops, 'FLOP')} of the model an update, "
        f"{found.work.length * found.rows / found.seconds:,.0f} tokens a second at most: products "
        "run at the published peak of bfloat16, and nothing else takes time, messages between "
        "devices neither. What XLA makes of those --compile tells."
    )
    return "\n".join([*lines, "", textwrap.fill(closing, WIDTH)])


def _remedies(config: c.TransformerConfig, found: Plan) -> str:
    """Changes that would make it fit, or else the nearest mesh."""
    lines = list(_helpful(config, found))
    if lines:
        return "\n".join(["It would fit with one of", *lines])
    for workload in (found.work, replace(found.work, remat="full")):
        other = plan(config, sensible_mesh(config, found.chip, workload), found.chip, workload)
        if other.fits:
            break
    flags = [f"--mesh.{axis} {n}" for axis, n in other.sizes.items() if n > 1]
    flags += ["--remat full"] if workload != found.work else []
    heading = "It would fit with" if other.fits else "The nearest to it is"
    return f"No one change suffices. {heading}\n{_remedy(' '.join(flags), other)}"


def _helpful(config: c.TransformerConfig, found: Plan) -> Iterator[str]:
    flags_seen: set[str] = set()
    for flags, other in changes(config, found):
        kind = flags.split()[0]
        if other.fits and kind not in flags_seen:
            flags_seen.add(kind)
            yield _remedy(flags, other)


def _remedy(flags: str, other: Plan) -> str:
    return (
        f"  {flags:36}{_giga(other.memory.total)} GB, {other.devices:,} devices, utilisation "
        f"{other.utilisation:.0%} at most"
    )


def _giga(size: int) -> str:
    return f"{size / 1e9:8,.2f}"


def _bytes(size: int | float) -> str:
    return _unit(size, ("B", "kB", "MB", "GB", "TB", "PB"))


def _flops(number: float, unit: str = "FLOP/s") -> str:
    return _unit(number, tuple(f"{letter}{unit}" for letter in (" ", "k", "M", "G", "T", "P", "E")))


def _seconds(seconds: float) -> str:
    return _unit(1e9 * seconds, ("ns", "us", "ms", "s")) if seconds < 1 else f"{seconds:,.2f} s"


def _unit(number: int | float, units: tuple[str, ...]) -> str:
    """The number with about three digits and the largest fitting unit."""
    power = max(i for i in range(len(units)) if number >= 1000**i or i == 0)
    scaled = number / 1000**power
    digits = 0 if scaled >= 100 or power == 0 else 1 if scaled >= 10 else 2
    return f"{scaled:,.{digits}f} {units[power]}"
