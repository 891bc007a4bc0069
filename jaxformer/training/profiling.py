"""Kernel time by module path, from a trace of JAX's profiler."""

import contextlib
import itertools
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax

from jaxformer.training.aot_compile import HloInstruction, HloModule

# An instruction that runs others, whose events are inside its own.
CONTROL_FLOW = frozenset({"while", "call", "conditional", "async-start", "async-done"})
UNNAMED = "without a module"
NO_MODULE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|shard_map"
    r"|custom_[jv]+p_call\w*|pjit|remat\d*|eval_jaxpr"
)
Program: TypeAlias = tuple[str, int]  # name of the HLO module ("" if unknown) and its number
PassName = Literal["forward", "recomputation", "backward", "other"]
# The first mark in the name of an operation says its pass.
PASS_MARKS: dict[str, PassName] = {
    "rematted_computation": "recomputation",
    "transpose(": "backward",
    "jvp(": "forward",
}
PASSES = get_args(PassName)


class KernelTime(NamedTuple):
    """Time of the kernels of one name, module and pass, per device.

    Attributes:
        kernel: Name of the kernel without its number.
        module: Module path, such as ``Transformer/decoder/layers/layer_*/attention/query``.
        pass_name: The pass that the kernel belongs to; "other" is all outside a gradient.
        seconds: Summed duration.
        num_executions: Number of executions.
    """

    kernel: str
    module: str
    pass_name: PassName
    seconds: float
    num_executions: float


class Profile(NamedTuple):
    """What ran between the start and the end of a trace.

    Attributes:
        seconds: Wall-clock time.
        kernels: Time of each kernel, the longest first.
    """

    seconds: float
    kernels: tuple[KernelTime, ...]


@contextlib.contextmanager
def profile(folder: str | Path) -> Iterator[list[Profile]]:
    """Trace the programs that run inside the block, and sum the time of their kernels.

    The folder gets the trace: ``*.trace.json.gz`` for Perfetto, ``*.xplane.pb`` for XProf. Wait for
    the results inside the block: the trace has only kernels that have finished.

    Args:
        folder: Folder of the trace; created if it is missing.

    Yields:
        A list that gets one `Profile` when the block ends.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jaxformer.training.profiling import profile
        >>> square = jax.jit(lambda x: x @ x)
        >>> x = square(jnp.ones((64, 64))).block_until_ready()  # compiled before it is timed
        >>> with profile("build/profile") as profiles:
        ...     y = square(x).block_until_ready()
        >>> {kernel.num_executions for kernel in profiles[0].kernels}
        {1.0}
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its events would slow the host down
    profiles: list[Profile] = []
    jax.profiler.start_trace(str(folder), profiler_options=options)
    started_at = time.monotonic()
    try:
        yield profiles
    finally:
        seconds = time.monotonic() - started_at
        jax.profiler.stop_trace()
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    profiles.append(Profile(seconds, _kernel_times(newest)))


def profile_tables(profile: Profile, num_steps: int, max_rows: int = 20) -> str:
    """Two tables in Markdown: milliseconds of a step by module and pass, and by kernel.

    Args:
        profile: From `profile`.
        num_steps: Number of steps in it.
        max_rows: Rows of each table; further modules and kernels are one row.

    Returns:
        The tables. On a CPU, times are summed over threads, so they may add up to more than the
        wall-clock time.
    """
    by_module, by_kernel = defaultdict[str, float](float), defaultdict[str, float](float)
    by_pass, counts = defaultdict[tuple[str, str], float](float), defaultdict[str, float](float)
    for one in profile.kernels:
        milliseconds = 1e3 * one.seconds / num_steps
        by_module[one.module] += milliseconds
        by_kernel[one.kernel] += milliseconds
        by_pass[one.module, one.pass_name] += milliseconds
        counts[one.kernel] += one.num_executions / num_steps
    total = sum(by_module.values())
    lines = [
        f"A step took {1e3 * profile.seconds / num_steps:,.1f} ms; its kernels {total:,.1f} ms on "
        f"each device (mean of {num_steps} step{'s' * (num_steps > 1)}).",
        "",
        f"| module | {' | '.join(PASSES)} | ms a step | share |",
        f"|:---|{'---:|' * (len(PASSES) + 2)}",
    ]
    for module, milliseconds in _longest(by_module, max_rows):
        passes = (by_pass[module, name] for name in PASSES)
        cells = (f"{x:,.2f}" if x else "" for x in (*passes, milliseconds))
        lines.append(f"| {module} | {' | '.join(cells)} | {milliseconds / total:.1%} |")
    lines += ["", "| kernel | executions a step | ms a step | share |", "|:---|---:|---:|---:|"]
    for kernel, milliseconds in _longest(by_kernel, max_rows):
        executions = f"{counts[kernel]:,.4g}" if kernel in counts else ""
        lines.append(
            f"| {kernel} | {executions} | {milliseconds:,.2f} | {milliseconds / total:.1%} |"
        )
    return "\n".join(lines) + "\n"


def _longest(times: dict[str, float], max_rows: int) -> list[tuple[str, float]]:
    """The longest times, and the sum of the others as the last row."""
    rows = sorted(times.items(), key=lambda row: -row[1])[:max_rows]
    if rest := len(times) - len(rows):
        rows.append((f"{rest} more", sum(times.values()) - sum(x for _, x in rows)))
    return rows


def _kernel_times(file: Path) -> tuple[KernelTime, ...]:
    with warnings.catch_warnings():  # of JAX's bindings, whose types have no module
        warnings.simplefilter("ignore", DeprecationWarning)
        events = list(_kernel_events(file))
    kernels = defaultdict[Program, set[str]](set)
    for _, name, program, _ in events:
        kernels[program].add(_identifier(name))
    instructions = _instructions(kernels)
    devices = len({device for device, *_ in events})
    durations = defaultdict[tuple[str, str, PassName], list[float]](list)
    for _, name, program, duration in events:
        operation, op_name = instructions[program].get(_identifier(name), ("", ""))
        if operation not in CONTROL_FLOW:
            key = (re.sub(r"([._]\d+)+(?=_|$)", "", name), *module_and_pass(op_name))
            durations[key].append(duration)
    times = (
        KernelTime(*key, sum(seconds) / devices, len(seconds) / devices)
        for key, seconds in durations.items()
    )
    return tuple(sorted(times, key=lambda one: -one.seconds))


def _kernel_events(file: Path) -> Iterator[tuple[Any, str, Program, float]]:
    """Yield device, kernel, program and seconds of each executed kernel."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        is_cpu = plane.name == "/host:CPU"
        if not is_cpu and not re.match(r"/device:(GPU|TPU):\d+$", plane.name):
            continue
        for line in plane.lines:
            if not is_cpu and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                stats = dict(iter(event.stats))
                if is_cpu and "hlo_op" not in stats:
                    continue  # of the host
                name = str(stats.get("hlo_op", event.name)).partition(" = ")[0].lstrip("%")
                device = stats.get("device_ordinal", 0) if is_cpu else plane.name
                program = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0))
                yield device, name, program, event.duration_ns / 1e9


def _instructions(kernels: Mapping[Program, set[str]]) -> dict[Program, dict[str, tuple[str, str]]]:
    """Operation and op_name of the instructions of each program, by their identifiers.

    Among the loaded programs with the name of a module, it is the program with most of the module's
    kernels, the newest of several; for a kernel without a module, any. JAX lists the newest first.
    """
    names = {module for module, _ in kernels}
    tables: list[tuple[str, dict[str, tuple[str, str]]]] = [("", {})]
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            if module.name in names or "" in names:
                hlo = HloModule(module.to_string())
                parts = itertools.chain(*hlo.computations.values())
                table = {_identifier(x.name): (x.operation, _op_name(hlo, x)) for x in parts}
                tables[0][1].update(table)
                tables.append((module.name, table))
    return {
        program: max(
            (table for name, table in tables if name == program[0]),
            key=lambda table: len(own & table.keys()),
            default={},
        )
        for program, own in kernels.items()
    }


def _op_name(hlo: HloModule, instruction: HloInstruction) -> str:
    """The name that JAX gave an operation; a fusion without one has its last operation's name."""
    fused = itertools.chain(
        *(reversed(hlo.computations[name]) for name in instruction.called_computations("calls"))
    )
    names = (re.search(r'op_name="(jit[^"]*)"', one.rest) for one in (instruction, *fused))
    return next((name[1] for name in names if name), "")


def _identifier(name: str) -> str:
    """Name of an instruction, spelled as its kernel on a GPU is."""
    return re.sub(r"\W", "_", name)


def module_and_pass(op_name: str) -> tuple[str, PassName]:
    """Module path and pass of an operation, from the name that JAX gives it.

    Args:
        op_name: Such as ``jit(f)/transpose(jvp(Transformer))/decoder/while/body/layer_0/mul``.

    Returns:
        Module path and pass. Transformations, control flow and the operation itself are left out,
        and layers are counted together: ``Transformer/decoder/layer_*``, "backward".
    """
    path: list[str] = []
    for part in op_name.split("/")[:-1]:
        while transformed := re.fullmatch(r"(?:transpose|jvp|vmap)\((.*)\)", part):
            part = transformed[1]
        name = re.sub(r"^layer_\d+$", "layer_*", part)
        if re.fullmatch(r"[a-zA-Z]\w*\*?", name) and not NO_MODULE.fullmatch(name):
            path += [name] * (path[-1:] != [name])
    marked: list[PassName] = [name for mark, name in PASS_MARKS.items() if mark in op_name]
    return "/".join(path) or UNNAMED, marked[0] if marked else "other"
