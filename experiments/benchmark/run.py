"""Runs a benchmark: flags, cases, result files."""

import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from experiments.benchmark.cases import (
    CASES,
    PEER_CASES,
    PRESET_CASES,
    PRESETS,
    CaseName,
    has_peak_share,
)
from experiments.benchmark.report import markdown_sections, plot_cases
from experiments.benchmark.runner import run_interleaved
from jaxformer.checks import Checked, Size
from jaxformer.run.output_folder import lock_folder


@dataclass(frozen=True, kw_only=True)
class Benchmark(Checked):
    """Options of a benchmark run.

    Attributes:
        preset: Named benchmark size, and its cases.
        only: Cases to measure; empty means all of the preset.
        rounds: Timed rounds of each program.
        layers: Number of layers; None is the preset's.
        length: Row length in tokens; None is the preset's.
        devices: Devices that jaxformer simulates on a CPU; None is the greatest common divisor of
            the number of cores and the batch size.
        profile: Whether to write the time by module of one more round of each program in JAX, to
            the folder profile of the results.
        output: Folder for the results; None is runs/benchmark-PRESET.
    """

    preset: Literal["peers", "smoke", "gpu", "h100"] = "peers"
    only: tuple[CaseName, ...] = ()
    rounds: Size = 7
    layers: Size | None = None
    length: Size | None = None
    devices: Size | None = None
    profile: bool = False
    output: Path | None = None


def main(options: Benchmark) -> Path:
    """Run every case and write its measurements; returns the results folder."""
    preset = PRESETS[options.preset]
    num_layers, length = options.layers or preset.num_layers, options.length or preset.length
    size = replace(preset, num_layers=num_layers, length=length)
    devices = options.devices or math.gcd(num_cores(), size.batch_size)
    prepare_environment(devices)
    output = options.output or Path("runs") / f"benchmark-{options.preset}"
    results: dict[str, Any] = {
        "preset": options.preset,
        "flags": flag_text(options),
        "size": asdict(size),
        "simulated_devices": devices,
        "machine": machine_info(),
        "versions": package_versions(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": os.getloadavg()[0],
        "peaks": {},
        "cases": {},
    }
    with lock_folder(output):
        for task in options.only or PRESET_CASES.get(options.preset, PEER_CASES):
            programs = CASES[task]
            # The peak is measured in the same rounds, under the same load.
            peak_programs = CASES["machine"] if has_peak_share(task) else ()
            together = (*programs, *peak_programs)
            # A GPU cannot hold all programs at once, so there they run one after the other.
            is_gpu = options.preset in ("gpu", "h100")
            groups = [(one,) for one in together] if is_gpu else [together]
            profiles = output / "profile" if options.profile and task != "machine" else None
            measurements_by_group = [
                run_interleaved(task, group, size, options.rounds, profiles) for group in groups
            ]
            measurements = [asdict(one) for group in measurements_by_group for one in group]
            results["cases"][task] = measurements[: len(programs)]
            if peak_programs:
                results["peaks"][task] = measurements[len(programs) :]
            (output / "benchmark.json").write_text(json.dumps(results, indent=1) + "\n")
            sections_text = markdown_sections(results)
            (output / "table.md").write_text("\n\n".join(sections_text) + "\n")
            print(f"\n{sections_text[-1]}\n", flush=True)
        plot_cases(output / "plot.png", results["cases"])
    print(f"Results are in {output}.")
    return output


def flag_text(options: Benchmark) -> str:
    """The command-line flags of this run, without the flags that name the results folder."""
    words = [f"--preset {options.preset}"]
    if options.only:
        words.append(f"--only {' '.join(options.only)}")
    for name in ("rounds", "layers", "length", "devices"):
        value = getattr(options, name)
        if value is not None:
            words.append(f"--{name} {value}")
    return " ".join(words)


def prepare_environment(devices: int) -> None:
    """Set environment variables: CPU devices, no GPU memory preallocation, no compilation cache."""
    xla_flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = (
        f"{xla_flags} --xla_force_host_platform_device_count={devices}".strip()
    )
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_info() -> dict[str, str | int]:
    """Cores, architecture, and the processor's model name where the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": num_cores(),
        "architecture": platform.machine(),
        "processor": named[0] if named else platform.processor(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that are compared."""
    names = ("jax", "jaxlib", "flax", "torch", "transformers", "x-transformers")
    installed = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {"python": platform.python_version()} | {
        n: installed[n] for n in names if n in installed
    }
