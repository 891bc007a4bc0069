"""Run configuration, device setup and output folder."""

import contextlib
import dataclasses
import json
import os
import pprint
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import jax

from experiments.command_line import RESUME_FLAGS, changed_flags
from experiments.training import object_store as stores
from jaxformer import functional as F
from jaxformer import parallel
from jaxformer.config import TransformerConfig, to_json
from jaxformer.data import TokenizerConfig
from jaxformer.errors import IMPORTED_MODULES
from jaxformer.layers.runtime import Remat
from jaxformer.parallel import DistributedConfig, MeshConfig
from jaxformer.training.gradient import Objective
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.skip_step import SkipStepConfig

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
RUN_FILE = "run.json"  # everything that a run was asked for


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that all training programs share.

    Attributes:
        model: The model.
        init: Begin with the weights of this folder instead of fresh ones: of Hugging Face, of its
            hub by name (Qwen/Qwen3-0.6B), or the output of a run. On the command line its model and
            its tokenizer come along, and other flags change them.
        tokenizer: How text becomes tokens; trained on the training text where it needs training.
        batch_size: Rows of a batch, over all devices.
        gradient_accumulation_steps: In how many parts a device works through its rows, to save
            memory.
        steps: Stop after this many updates, counted from the start of the run.
        schedule_steps: Updates that the learning-rate schedule is planned for; None is --steps, as
            it was when the run began.
        optimizer: How gradients become updates.
        objective: Terms of the loss beside the cross-entropy.
        skip_step: Which updates are left out because their gradients would do harm.
        dtype: Of the computation; parameters are float32.
        remat: What the backward pass recomputes; "dots" keeps the results of matrix products alone,
            which takes half the memory and, on a CPU, less time than to keep everything.
        attention_implementation: How scores are computed; "auto" is the platform's best, see
            `F.dot_product_attention`.
        scan: Run layers as one compiled loop (compiles fast) or unrolled (runs faster on a CPU).
        expert_capacity_factor: Rows that a device has room for from each other one on the way to
            experts, as a multiple of an even share; None has room for all (see --mesh.expert).
        mesh: How the devices share the work.
        overlap: Let messages between TPUs travel while products are computed.
        devices: How many devices to use, of each process; None is all. On a CPU, how many to
            simulate.
        distributed: Whether this is one of many processes, each started with the same command.
        hosts: How the processes find each other.
        seed: Of parameters, data and dropout.
        output: Folder for checkpoints, metrics and the tokenizer, or of an object store, such as
            gs://bucket/run; None is runs/NAME-N, a new one, or with --resume the newest. Processes
            share it.
        resume: Go on from the newest checkpoint in the output folder.
        resume_or_begin: Go on if --output has a checkpoint, else begin there; nothing is done where
            the run is finished. For a command that is given again until it ends with status 0.
        log_every: Updates between lines in the metrics.
        evaluate_every: Updates between evaluations.
        save_every: Updates between checkpoints; the last update is always saved.
        keep: How many of the newest checkpoints to keep, beside the best.
        tensorboard: Whether to write TensorBoard files.
        wandb: Project to log to at Weights and Biases.
        show: What is printed at the start: what differs from a named run, or all.
    """

    model: TransformerConfig
    init: str | None = None
    tokenizer: TokenizerConfig
    batch_size: int
    gradient_accumulation_steps: int = 1
    steps: int
    schedule_steps: int | None = None
    optimizer: OptimizerConfig
    objective: Objective = Objective()
    skip_step: SkipStepConfig = SkipStepConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "dots"
    attention_implementation: F.Implementation = "auto"
    scan: bool = False
    expert_capacity_factor: float | None = None
    mesh: MeshConfig = MeshConfig()
    overlap: bool = True
    devices: int | None = None
    distributed: bool = False
    hosts: DistributedConfig = DistributedConfig()
    seed: int = 0
    output: Path | None = None
    resume: bool = False
    resume_or_begin: bool = False
    log_every: int = 10
    evaluate_every: int
    save_every: int = 200
    keep: int = 3
    tensorboard: bool = True
    wandb: str | None = None
    show: Literal["changes", "all"] = "changes"

    def __post_init__(self):
        check_integers(self)
        check_uses(self, excludes={"resume": "resume_or_begin"})
        if self.expert_capacity_factor is not None and not self.expert_capacity_factor >= 1:
            raise ValueError(
                "expert_capacity_factor must be at least 1, or None; got "
                f"{self.expert_capacity_factor}."
            )
        if self.resume_or_begin and self.output is None:
            raise ValueError(
                "--resume-or-begin needs --output FOLDER, where the next start finds the run."
            )
        if self.wandb == "":
            raise ValueError("wandb must name a project; got ''.")

    @property
    def planned_steps(self) -> int:
        """Number of steps of the learning-rate schedule."""
        return self.schedule_steps or self.steps

    @property
    def name(self) -> str:
        """Name of the program, for commands and folder names."""
        return type(self).__name__.lower()

    def files(self) -> dict[str, str]:
        """What its folder has besides what every run's has, by name."""
        return {}


AnyRunConfig = TypeVar("AnyRunConfig", bound=RunConfig)


def check_integers(config: Any) -> None:
    """Raise if a count is below 1 or above 2**31 - 1, or the seed is not a 32-bit integer.

    Args:
        config: A dataclass, of which each whole number is a count, but for seeds.

    Raises:
        ValueError: With the field and its number.
    """
    for field in dataclasses.fields(config):
        number = getattr(config, field.name)
        if field.type not in (int, int | None) or number is None:
            continue
        minimum, maximum = (0, 2**32 - 1) if field.name.endswith("seed") else (1, 2**31 - 1)
        if not minimum <= number <= maximum:
            raise ValueError(
                f"{field.name} must lie between {minimum} and {maximum}; got {number}."
            )


def check_uses(
    options: Any, *, needs: Mapping[str, str] = {}, excludes: Mapping[str, str] = {}
) -> None:
    """Refuse flags that would be of no use.

    Args:
        options: A dataclass, whose fields are flags.
        needs: For a field the one without which it changes nothing.
        excludes: For a field one that it may not stand beside.

    Raises:
        ValueError: With the two flags.
    """
    flag = {f.name: f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(options)}
    chosen = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default}
    for name, other in needs.items():
        if name in chosen and getattr(options, other) in (None, False, ()):
            raise ValueError(f"{flag[name]} is for {flag[other]}.")
    for name, other in excludes.items():
        if {name, other} <= chosen:
            raise ValueError(f"{flag[name]} and {flag[other]} exclude each other.")


def check_output_file(path: Path) -> None:
    """Refuse a path that no file can be written to, before what it is to hold is worked out.

    Raises:
        ValueError: It is a folder, or its folder does not exist or may not be written to.
    """
    if path.is_dir():
        raise ValueError(f"output must name a file; {str(path)!r} is a folder.")
    if not path.parent.is_dir():
        raise ValueError(f"output {path}: the folder {path.parent} does not exist.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"output {path} may not be written.")


def print_run(
    run: AnyRunConfig,
    runs: Mapping[str, AnyRunConfig],
    init_run: Callable[[AnyRunConfig, str], AnyRunConfig],
) -> str:
    """Print the run as a diff to the nearest named run, or in full.

    Args:
        run: The run.
        runs: The named ones.
        init_run: From a named run and what --init names, the run of that model.

    Returns:
        The command that begins it again, in another folder.
    """
    init_flags = []
    if run.init is not None:
        init_flags = ["--init", run.init]
        runs = {name: _begun(named, run, init_run) for name, named in runs.items()}
    flags_by_run = {name: changed_flags(run, named) for name, named in runs.items()}
    name = min(flags_by_run, key=lambda name: len(flags_by_run[name]))
    if run.show == "all":
        print(pprint.pformat(run, width=100), flush=True)
    else:
        lines = [shlex.join([name, *init_flags]), *map(shlex.join, flags_by_run[name].values())]
        print("Run: " + "\n  ".join(lines), flush=True)
    rerun_flags = [
        x for x in flags_by_run[name].values() if x[0] not in ("--output", *RESUME_FLAGS)
    ]
    words = [name] * (name != next(iter(runs))) + init_flags
    words += chain(*(("--import", module) for module in IMPORTED_MODULES))
    return shlex.join(["python", "-m", f"experiments.{run.name}", *words, *chain(*rerun_flags)])


def _begun(
    named: AnyRunConfig, run: AnyRunConfig, begin: Callable[[AnyRunConfig, str], AnyRunConfig]
) -> AnyRunConfig:
    """A named run with what --init names; with that of the run, if it goes on and that is gone."""
    try:
        return begin(named, str(run.init))
    except (ValueError, OSError, ImportError):
        if not (run.resume or run.resume_or_begin):
            raise
        return replace(named, init=run.init, model=run.model, tokenizer=run.tokenizer)


# Devices


class HasDevices(Protocol):
    """Protocol of options with devices, distributed and its settings."""

    @property
    def devices(self) -> int | None: ...  # noqa: D102
    @property
    def distributed(self) -> bool: ...  # noqa: D102
    @property
    def hosts(self) -> DistributedConfig: ...  # noqa: D102


def setup_devices(run: HasDevices) -> None:
    """Simulate CPU devices, initialize jax.distributed, enable the compilation cache.

    The first process speaks for all; the others are silent but for errors.

    Raises:
        ValueError: The processes were told different things, or not that they are many.
    """
    if run.hosts != DistributedConfig() and not run.distributed:
        raise ValueError(f"{run.hosts} is for many processes; pass --distributed too.")
    simulate_cpu_devices(run.devices)
    if run.distributed:
        parallel.initialize_distributed(run.hosts)
    enable_compilation_cache()  # before the first is compiled
    if run.distributed:
        if not parallel.is_primary_process():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        flat_config = flatten(json.loads(to_json(run)))
        parallel.check_equal_across_processes(
            {k: x for k, x in flat_config.items() if k != "hosts.process_id"}
        )


def simulate_cpu_devices(count: int | None) -> None:
    """Simulate this many CPU devices; no effect on other platforms."""
    if count is not None:
        with contextlib.suppress(RuntimeError):  # JAX runs already; then it has what it has
            jax.config.update("jax_num_cpu_devices", count)


def select_devices(count: int | None) -> list[jax.Device]:
    """The first `devices` devices, equally many of each process; all by default."""
    everyone = jax.devices()
    if count is None:
        return everyone
    by_process: dict[int, list[jax.Device]] = {}
    for device in everyone:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    if not 1 <= count <= fewest:
        raise ValueError(f"Asked for {count} devices; this machine has {fewest}.")
    return [device for devices in by_process.values() for device in devices[:count]]


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache, so that a resumed run does not recompile.

    JAX's own settings come first: where JAX_COMPILATION_CACHE_DIR names a folder it is that one,
    and JAX_ENABLE_COMPILATION_CACHE=0 keeps nothing. Programs for several CPU devices are never
    kept: those that XLA reads back from the disk may begin their messages in another order on each
    device, and then wait for each other until they abort (JAX 0.10.2 and 0.12.0).
    """
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.values["jax_compilation_cache_dir"] is None:
        folder = Path("runs/cache/programs").resolve()  # it may be deleted at any time
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones are many


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists, keyed by their dotted path."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [flatten(value, f"{path}.{name}" if path else str(name)) for name, value in items]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {path: tree}


# The folder


@contextlib.contextmanager
def open_output_folder(run: RunConfig) -> Iterator[Path]:
    """Open and lock the output folder, the same for all processes; see `choose_folder`.

    Where the run is kept in an object store, it is a folder of this machine; see `stores`.

    Raises:
        ValueError: Another run holds the folder, it holds an earlier run, there is none to resume,
            or its store does not answer.
    """
    with contextlib.ExitStack() as stack:

        def claim_folder() -> str:
            folder = choose_folder(run)
            there = stores.reached(folder, writes=True)
            stack.enter_context(lock_folder(stores.local_path(folder)))
            run_files = ("checkpoints", "metrics.jsonl", "tokenizer.json", "tensorboard")
            existing = [name for name in run_files if (there / name).exists()]
            if existing and not (run.resume or run.resume_or_begin):
                raise ValueError(
                    f"{folder} holds {', '.join(existing)} of an earlier run. Pass --resume to go "
                    "on "
                    "with it (--resume-or-begin if it may have no checkpoint yet), or another "
                    "--output."
                )
            return str(folder)

        folder = Path(parallel.broadcast_from_process_0(claim_folder))
        yield stores.download(folder)
        if parallel.is_primary_process():
            stores.upload(folder)


def choose_folder(run: RunConfig) -> Path:
    """The folder of --output; else a new runs/NAME-N, or the newest one with --resume."""
    if run.output is not None:
        return run.output
    # A run that ended before its first checkpoint is nothing to resume.
    earlier = Path("runs").glob(f"{run.name}-*/checkpoints" if run.resume else f"{run.name}-*")
    names = [f.parts[1].removeprefix(f"{run.name}-") for f in earlier]
    newest = max((int(name) for name in names if name.isdigit()), default=0)
    if run.resume and not newest:
        raise ValueError(f"There is no runs/{run.name}-N to resume; pass --output FOLDER.")
    if run.resume:
        return Path("runs") / f"{run.name}-{newest}"
    return new_folder(f"runs/{run.name}", newest + 1)


def new_folder(name: str, number: int) -> Path:
    """Create the first free folder NAME-N, counting up from `number`."""
    while True:
        folder = Path(f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run was quicker
            number += 1


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for the block; the operating system releases the lock if the process dies.

    Args:
        folder: Made where it is missing; it goes if nothing comes into it.

    Raises:
        ValueError: Another process holds it, and which; it is in a store, or a file.
    """
    try:
        stores.here(folder).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"output must name a folder; {folder} is a file, or in one.") from None
    with open(folder / LOCK_FILE, "a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} is in use by process {file.read()}. Wait for it, end it, or pass "
                "another --output."
            ) from None
        except OSError:  # this file system has no locks, so nothing keeps a second run out
            pass
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()
                folder.rmdir()
