"""Who is faster: our programs beside others that do the same work, turn by turn.

    python -m experiments.benchmark --preset peers             # all contests of one size
    python -m experiments.benchmark --preset peers --only machine train decode --rounds 9
    python -m experiments.benchmark --only attention --length 8192

Each contestant has a process of its own, prepares itself, and waits; in every round each has a
turn, so that what else the machine does falls on all alike. A ratio is the median over rounds of
the first contestant's time divided by another's in the same round. Contestants that are not
installed are named and left out: `pip install -e '.[peers]'` has them. Writes JSON, a table and a
plot; the load of the machine stands beside the figures, which are called quiet only if it was low.
"""

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from experiments.benchmark_plots import plot_contests
from experiments.benchmark_tables import Found, sections
from experiments.command_line import readable_errors
from experiments.contest import Contestant, Entry, MissingError, Size, contestants
from experiments.contests import PRESETS, TASKS, Task, has_share
from experiments.machine_load import busy_cores, caption, is_quiet, load_average
from experiments.study_command import read
from experiments.training.run import check_numbers, held


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to measure.

    Attributes:
        preset: The shapes.
        only: Contests to hold; none are all.
        rounds: Turns of each contestant.
        layers: Instead of the preset's.
        length: Tokens of a row, instead of the preset's.
        devices: That we simulate on a CPU; None is one for each core, as far as they share rows.
        output: Folder for the results; None is runs/benchmark-PRESET.
    """

    preset: Literal["peers", "smoke", "gpu"] = "peers"
    only: tuple[Task, ...] = ()
    rounds: int = 7
    layers: int | None = None
    length: int | None = None
    devices: int | None = None
    output: Path | None = None

    def __post_init__(self):
        check_numbers(self)


def main(asked: Benchmark) -> Path:
    """Hold the contests; returns the folder of the results."""
    size = PRESETS[asked.preset]
    size = replace(
        size, num_layers=asked.layers or size.num_layers, length=asked.length or size.length
    )
    devices = asked.devices or math.gcd(cores(), size.batch_size)
    output = asked.output or Path("runs") / f"benchmark-{asked.preset}"
    with held(output):
        return hold_all(asked, size, devices, output)


def hold_all(asked: Benchmark, size: Size, devices: int, output: Path) -> Path:
    """Hold the contests, and write what is found into a folder; see `main`."""
    results: dict[str, Any] = {
        "preset": asked.preset,
        "flags": flags(asked),
        "size": asdict(size),
        "simulated_devices": devices,
        "machine": {"cores": cores(), "architecture": platform.machine(), "processor": processor()},
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": {"before": load_average(), "cores": os.cpu_count(), "busy": {}},
        "peaks": {},
        "contests": {},
    }
    if not is_quiet(results["load"]):
        print(caption(results["load"]), flush=True)
    for task in asked.only or tuple(TASKS):
        results["load"]["busy"][task] = busy_cores()
        found, peaks = hold(task, size, asked.rounds, devices)
        results["contests"][task] = [asdict(one) for one in found]
        if peaks:
            results["peaks"][task] = [asdict(one) for one in peaks]
        (output / "benchmark.json").write_text(json.dumps(results, indent=1) + "\n")
        told = sections(results)
        (output / "table.md").write_text("\n\n".join(told) + "\n")
        print(f"\n{told[-1]}\n", flush=True)
    plot_contests(output / "plot.png", results["contests"])
    print(f"Everything is in {output}.")
    return output


def flags(asked: Benchmark) -> str:
    """What was asked for, as one types it; where results go is left out."""
    told = [f"--preset {asked.preset}"]
    if asked.only:
        told.append(f"--only {' '.join(asked.only)}")
    for name in ("rounds", "layers", "length", "devices"):
        value = getattr(asked, name)
        if value is not None:
            told.append(f"--{name} {value}")
    return " ".join(told)


def hold(task: Task, size: Size, rounds: int, devices: int) -> tuple[list[Found], list[Found]]:
    """One contest.

    Returns:
        What was found of its contestants; and, where shares of a peak are told, of those that
        measure the peak, in the same rounds, so that both have the same load beside them.
    """
    entries = TASKS[task]
    beside = TASKS["machine"] if has_share(task) else ()
    found = take_turns(task, (*entries, *beside), size, rounds, devices)
    return found[: len(entries)], found[len(entries) :]


def take_turns(
    task: Task, entries: Sequence[Entry], size: Size, rounds: int, devices: int
) -> list[Found]:
    """What was found of each contestant when all took turns."""
    with contestants(entries, size, environment(devices)) as prepared:
        found = {}
        for entry in entries:
            one = prepared[entry.name]
            found[entry.name] = Found(entry.name)
            if isinstance(one, Contestant):
                found[entry.name] = Found(entry.name, **one.prepared)
            else:
                found[entry.name].missing = one
        here = {name: one for name, one in prepared.items() if isinstance(one, Contestant)}

        def leaves(name: str, reason: MissingError) -> None:
            found[name].seconds, found[name].missing = [], str(reason)
            del here[name]

        for number in range(1, rounds + 1):
            order = list(here)
            first = number % max(1, len(order))
            for name in order[first:] + order[:first]:
                try:
                    found[name].seconds.append(here[name].turn())
                except MissingError as reason:
                    leaves(name, reason)
            said = ", ".join(f"{name} {found[name].seconds[-1]:.3f} s" for name in here)
            print(f"  {task}, round {number}/{rounds}: {said}", flush=True)
        for name, one in list(here.items()):
            try:
                found[name].peak_bytes = one.end()["peak_bytes"]
            except MissingError as reason:
                leaves(name, reason)
    return list(found.values())


def environment(devices: int) -> dict[str, str]:
    """Of all contestants: as many devices of ours as asked for; a GPU's memory as it is needed.

    Nothing is taken from programs compiled before.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    kept = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return {
        **kept,
        "XLA_FLAGS": flags.strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Its maker's name for it, where the system tells."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def versions() -> dict[str, str]:
    """Of what takes part."""
    names = ("jax", "jaxlib", "flax", "torch", "transformers", "x-transformers")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    with readable_errors():
        main(read(Benchmark, __doc__))
