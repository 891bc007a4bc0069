"""Runs programs in separate processes, in interleaved rounds, and times each round.

A program is a function of a size and of options that does the untimed setup and returns a round: a
function without arguments that does the work once and waits for its end.
"""

import contextlib
import importlib
import importlib.util
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RoundFunction = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class BenchmarkSize:
    """Sizes of the benchmark: model (Llama-like, gated feed-forward), batch and arrays.

    Attributes:
        model_dim: Width of the residual stream.
        num_heads: Number of query heads.
        num_kv_heads: Number of key-value heads; None is the number of query heads.
        num_layers: Number of layers.
        hidden_dim: Hidden width of the feed-forward.
        moe_layers: Number of layers of "experts".
        num_experts: Experts of each of its layers; a token uses an eighth of them.
        expert_dim: Hidden width of each expert.
        vocab_size: Vocabulary size.
        length: Row length in tokens for training, and prompt length of "prefill".
        batch_size: Rows of a batch.
        prompt: Prompt length of "decode".
        new_tokens: Tokens that "decode" generates.
        dtype: Dtype of the computation.
        matrix_dim: Rows and columns of the matrices that measure peak FLOP/s.
        copy_size: Elements of the arrays that measure memory bandwidth.
    """

    model_dim: int = 256
    num_heads: int = 8
    num_kv_heads: int | None = None
    num_layers: int = 6
    hidden_dim: int = 688
    moe_layers: int = 2
    num_experts: int = 8
    expert_dim: int = 128
    vocab_size: int = 2048
    length: int = 512
    batch_size: int = 8
    prompt: int = 64
    new_tokens: int = 128
    dtype: str = "float32"
    matrix_dim: int = 2048
    copy_size: int = 2**25


class Program(NamedTuple):
    """A program to measure: the import path of its function and the packages it needs."""

    name: str
    function: str  # module:function
    required_modules: tuple[str, ...] = ()  # modules
    options: Mapping[str, Any] = {}


@dataclass
class Measurement:
    """Measurement of one program.

    Attributes:
        name: Name of the program in tables.
        seconds: Seconds of each round.
        first_seconds: Seconds before the first timed round: imports, initialization, compilation
            and one round.
        temp_bytes: The compiler's estimate of memory per device, without arguments and results.
        num_devices: Number of devices.
        device_kind: Kind of the devices.
        peak_bytes: Peak memory of the process, or of the GPU if it uses one.
        skip_reason: Why it was not measured.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    first_seconds: float | None = None
    temp_bytes: int | None = None
    num_devices: int = 1
    device_kind: str | None = None
    peak_bytes: int | None = None
    skip_reason: str | None = None


def run_interleaved(
    case: str,
    programs: Sequence[Program],
    size: BenchmarkSize,
    rounds: int,
    profiles: Path | None = None,
) -> list[Measurement]:
    """Measure all programs, their rounds interleaved; a program that crashes has no measurement.

    Args:
        case: Name of the case, for the progress lines.
        programs: The programs.
        size: Benchmark size.
        rounds: Timed rounds of each program, after one that is not timed.
        profiles: Folder for a profile of one more round of each program in JAX; None profiles none.
    """
    measurements = {entry.name: Measurement(entry.name) for entry in programs}
    with contextlib.ExitStack() as processes:
        workers: dict[str, ProcessPoolExecutor] = {}

        def call_worker(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return workers[name].submit(function, *arguments).result()
            except Exception as error:
                last = str(error).strip().splitlines()[-1:] or [""]
                measurements[name] = Measurement(
                    name, skip_reason=f"{type(error).__name__}: {last[0][:200]}"
                )
                workers.pop(name).shutdown(wait=False)
                return None

        for entry in programs:
            missing = [
                name for name in entry.required_modules if importlib.util.find_spec(name) is None
            ]
            if missing:
                measurements[entry.name].skip_reason = f"needs {' and '.join(missing)}"
                continue
            start = multiprocessing.get_context("spawn")  # inherits nothing from this process
            process = ProcessPoolExecutor(
                1, start, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
            )
            workers[entry.name] = processes.enter_context(process)
            if reply := call_worker(entry.name, warm_up, entry.function, size, dict(entry.options)):
                measurements[entry.name] = Measurement(entry.name, **reply)
        for number in range(1, rounds + 1):
            order = list(workers)
            first = number % max(1, len(order))
            for name in order[first:] + order[:first]:
                if (seconds := call_worker(name, time_round)) is not None:
                    measurements[name].seconds.append(seconds)
            reply = ", ".join(f"{name} {measurements[name].seconds[-1]:.3f} s" for name in workers)
            print(f"  {case}, round {number}/{rounds}: {reply}", flush=True)
        for name in list(workers):
            measurements[name].peak_bytes = call_worker(name, peak_bytes)
        if profiles is not None:
            for name in list(workers):
                folder = profiles / f"{case}, {name}".replace(", ", "-").replace(" ", "_")
                call_worker(name, profile_round, folder)
    return list(measurements.values())


# In the process of a program


def warm_up(function: str, size: BenchmarkSize, options: Mapping[str, Any]) -> dict[str, Any]:
    """Compile and warm up in the worker; returns its first fields of `Measurement`."""
    global do_round
    module, name = function.split(":")
    started_at = time.perf_counter()
    do_round = getattr(importlib.import_module(module), name)(size, **options)
    do_round()
    reply = {"first_seconds": time.perf_counter() - started_at}
    if "jax" in sys.modules:
        import jax

        reply |= {"num_devices": len(jax.devices()), "device_kind": jax.devices()[0].device_kind}
    return reply | {"temp_bytes": getattr(do_round, "temp_bytes", None)}


def time_round() -> float:
    """Run one more round in the worker; returns its seconds."""
    started_at = time.perf_counter()
    do_round()
    return time.perf_counter() - started_at


def profile_round(folder: Path) -> None:
    """Write the profile of one more round, if the program uses JAX."""
    if "jax" in sys.modules:
        from jaxformer.training.profiling import profile, profile_tables

        with profile(folder) as round_profiles:
            do_round()
        tables = profile_tables(round_profiles[0], num_steps=1)
        (folder / "profile.md").write_text(tables, encoding="utf-8")


def peak_bytes() -> int:
    """Peak memory of this process: GPU memory if it uses a GPU, else resident memory."""
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    if (jax := sys.modules.get("jax")) and (memory_stats := jax.devices()[0].memory_stats()):
        return memory_stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def with_temp_bytes(do_round: RoundFunction, program: Any) -> RoundFunction:
    """Attach the compiler's count of temporary bytes of a device to a round function."""
    do_round.temp_bytes = program.memory_analysis().temp_size_in_bytes  # type: ignore
    return do_round
