"""Run configuration and device setup."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxformer import functional as F
from jaxformer import parallel
from jaxformer.checks import AtLeastOne, Checked, Must, Positive, Size
from jaxformer.config import Decoder, TransformerConfig, to_json
from jaxformer.data import TokenizerConfig
from jaxformer.errors import own_command, with_fields
from jaxformer.layers.runtime import Remat
from jaxformer.parallel import DistributedConfig, MeshConfig
from jaxformer.training.gradient import Objective
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.skip_step import SkipStepConfig

if TYPE_CHECKING:  # the data, or `RunConfig.largest`, replace None before anything reads it
    FromData: TypeAlias = int
else:
    FromData = Size | None

Seed: TypeAlias = Annotated[
    int, Must(f"lie between 0 and {2**32 - 1}", lambda seed: 0 <= seed < 2**32)
]
InitName: TypeAlias = Annotated[str, Must("name a folder, a hub name or the output of a run", bool)]
HeldOut: TypeAlias = Annotated[float, Must("lie between 0 and 1", lambda share: 0 < share < 1)]

UPDATES_PER_EPOCH = 10  # at least, where the batch size follows from the data
LENGTH_MULTIPLE = 16  # of row lengths that follow from the data
CACHE_SETTINGS = (
    *("jax_enable_compilation_cache", "jax_compilation_cache_dir"),
    "jax_persistent_cache_min_compile_time_secs",
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """Options that all training programs share.

    Attributes:
        model: Model configuration.
        init: Start from the weights of this Hugging Face folder, hub name (Qwen/Qwen3-0.6B) or
            output of a run instead of random ones. Its model and tokenizer become the defaults.
        tokenizer: Tokenizer, trained on the training text if it needs training.
        batch_size: Rows of a batch, over all devices.
        gradient_accumulation_steps: Number of microbatches of a step, to save memory.
        steps: Total number of training steps, counted from the start of the run.
        schedule_steps: Length of the learning-rate schedule in steps; None is the --steps that the
            run was started with.
        optimizer: Optimizer and learning-rate schedule.
        objective: Terms of the loss beside the cross-entropy.
        skip_step: Which steps are skipped because of their loss or gradient norm.
        dtype: Dtype of the computation; parameters are float32.
        remat: What the backward pass recomputes; "dots" saves only the results of matmuls, which
            takes half the memory of "none" and is faster on a CPU.
        attention_implementation: Attention implementation; "auto" is the best of the platform, see
            `F.dot_product_attention`.
        scan: Whether to scan over layers (compiles fast) or unroll them (runs faster on a CPU).
        expert_capacity_factor: Maximum number of rows sent to each other device's experts, as a
            multiple of an even distribution; further rows are dropped. None is no limit (see
            --mesh.expert).
        mesh: Sizes of the mesh axes.
        overlap: Whether compiler options overlap collectives with compute, on TPUs and GPUs.
        devices: Number of devices to use per process; None is all. On a CPU, this many devices are
            simulated.
        distributed: Whether this is one of several processes, each started with the same command.
        hosts: How the processes find each other.
        seed: Random seed of parameters, data order and dropout.
        output: Folder for checkpoints, metrics and the tokenizer, or an address in an object store,
            such as gs://bucket/run; None is a new runs/NAME-N, or with --resume the newest. All
            processes share it.
        resume: Resume from the newest checkpoint in the output folder.
        resume_or_begin: Resume if --output has a checkpoint, else start a new run there; if the run
            is complete, do nothing. Use it in a script that repeats the command until it succeeds.
        log_every: Steps between lines of the metrics.
        evaluate_every: Steps between evaluations; the last step is always evaluated.
        save_every: Steps between checkpoints; the last step is always saved, and each whose
            evaluation is the best so far.
        keep: Number of newest checkpoints to keep, beside the best.
        tensorboard: Whether to write TensorBoard files.
        wandb: Project to log to at Weights and Biases.
        profile_steps: Steps to profile, as a slice: 10:13 is steps 10, 11 and 12. Their time by
            module is in profile/profile.md in the output folder, beside the trace for Perfetto and
            XProf.
        show: What to print at the start: the changes to a named run, or all fields.
    """

    TOPIC: ClassVar = "run"  # of --help

    model: TransformerConfig
    init: InitName | None = None
    tokenizer: TokenizerConfig
    batch_size: Size
    gradient_accumulation_steps: Size = 1
    steps: Size
    schedule_steps: Size | None = None
    optimizer: OptimizerConfig
    objective: Objective = Objective()
    skip_step: SkipStepConfig = SkipStepConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "dots"
    attention_implementation: F.Implementation = "auto"
    scan: bool = False
    expert_capacity_factor: AtLeastOne | None = None
    mesh: MeshConfig = MeshConfig()
    overlap: bool = True
    devices: Size | None = None
    distributed: bool = False
    hosts: DistributedConfig = DistributedConfig()
    seed: Seed = 0
    output: Path | None = None
    resume: bool = False
    resume_or_begin: bool = False
    log_every: Size = 10
    evaluate_every: Size
    save_every: Size = 200
    keep: Size = 3
    tensorboard: bool = True
    wandb: Annotated[str, Must("name a project", bool)] | None = None
    profile_steps: str | None = None
    show: Literal["changes", "all"] = "changes"

    def __new__(cls, **values: Any):
        """Note which fields are given; all others follow from `init` and `resume`."""
        run = super().__new__(cls)
        vars(run)["_given"] = frozenset(values)
        return run

    def __post_init__(self):
        super().__post_init__()
        if self.init is not None:
            object.__setattr__(self, "init", os.path.expanduser(self.init))
        check_uses(self, excludes={"resume": "resume_or_begin"})
        if self.resume_or_begin and self.output is None:
            raise ValueError(
                with_fields(
                    "--resume-or-begin needs --output FOLDER, from which the next start resumes."
                )
            )
        if getattr(self, "epochs", None) is None:
            self.check_profiled_steps()

    @property
    def given(self) -> Set[str]:
        """Names of the fields that the run was made with; after `dataclasses.replace` all."""
        return vars(self)["_given"]

    @property
    def planned_steps(self) -> int:
        """Number of steps of the learning-rate schedule."""
        return self.schedule_steps or self.steps

    def check_profiled_steps(self) -> None:
        """Raise a ValueError if --profile-steps is no slice of the steps of the run."""
        if self.profiled_steps.stop > self.steps + 1:
            raise ValueError(
                f"profile_steps {self.profile_steps} ends after the last step, {self.steps}."
            )

    @property
    def profiled_steps(self) -> range:
        """Steps of --profile-steps.

        Raises:
            ValueError: It is no slice of steps, or has none.
        """
        if self.profile_steps is None:
            return range(0)
        bounds = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        steps = range(int(bounds[1]), int(bounds[2])) if bounds else range(0)
        if not steps or steps.start < 1:
            raise ValueError(
                "profile_steps must be FIRST:STOP with 1 <= FIRST < STOP, such as 10:13 for steps "
                f"10, 11 and 12; got {self.profile_steps!r}."
            )
        return steps

    def largest(self: "AnyRunConfig") -> "AnyRunConfig":
        """The run with the largest row length and batch size that it may have."""
        return self

    def tuned(self: "AnyRunConfig") -> "AnyRunConfig":
        """The run with a learning rate that suits the model of `init`."""
        return self

    @property
    def name(self) -> str:
        """Name of the program, for commands and folder names."""
        return type(self).__name__.lower()

    @property
    def command(self) -> str:
        """The command of the program."""
        return own_command(self.name)


@dataclass(frozen=True, kw_only=True)
class EpochsConfig(RunConfig):
    """Options of a run whose length may be set in epochs.

    Attributes:
        epochs: Number of epochs, instead of --steps: every row, in every part of a mixture, is
            read at least this often. None means --steps; --steps replaces a default.
    """

    epochs: Positive | None = None

    def __post_init__(self):
        if self.epochs is None and self.steps is None:
            raise ValueError(with_fields("--epochs None needs --steps NUMBER."))
        super().__post_init__()


AnyRunConfig = TypeVar("AnyRunConfig", bound=RunConfig)


def fitting_length(longest: int, limit: int) -> int:
    """Length of the rows for examples of at most `longest` tokens."""
    return min(limit, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


def fitting_batch_size(run: RunConfig, num_rows: int, unit: int) -> int:
    """The largest batch size, a multiple of `unit`, with enough updates in an epoch."""
    most = run.largest().batch_size
    return min(most, max(unit, num_rows // UPDATES_PER_EPOCH // unit * unit))


def context_length(model: TransformerConfig) -> int | None:
    """Learned positions of a model, else the context length of its folder or run, if known."""
    return model.max_length or model.max_position_embeddings


def length_warning(what: str, length: int, known: int | None, remedy: str) -> str | None:
    """Sentence about texts beyond the context of a model, or of its training; None within it."""
    if known is None or length <= known:
        return None
    return (
        f"Warning: {what} {length:,} tokens, but the model knows {known:,} positions "
        f"(max_position_embeddings, or the rows of its training). {remedy}"
    )


def check_rows(run: Any, program: str) -> None:
    """Raise unless the model is a decoder for the row length.

    Args:
        run: A run with the field `length`.
        program: What needs it, such as "DPO".
    """
    longest = run.model.max_length
    if None not in (longest, run.length) and run.length > longest:
        raise ValueError(
            f"length {run.length} is more than the {longest} learned positions of the model."
        )
    if not isinstance(run.model.topology, Decoder):
        raise ValueError(f"{program} needs the topology Decoder; got {run.model.topology}.")


def check_uses(
    options: Any, *, needs: Mapping[str, str] = {}, excludes: Mapping[str, str] = {}
) -> None:
    """Raise if a flag that is set has no effect, or excludes another one.

    Args:
        options: A dataclass whose fields are flags.
        needs: For a field, the field without which it has no effect.
        excludes: For a field, the field that it cannot be combined with.

    Raises:
        ValueError: The message has the two flags.
    """
    flag = {f.name: f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(options)}
    chosen = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != f.default}
    for name, other in needs.items():
        if name in chosen and getattr(options, other) in (None, False, ()):
            raise ValueError(with_fields(f"{flag[name]} needs {flag[other]}."))
    for name, other in excludes.items():
        if {name, other} <= chosen:
            raise ValueError(with_fields(f"{flag[name]} and {flag[other]} cannot be combined."))


# Devices


@contextlib.contextmanager
def setup_devices(run: Any) -> Iterator[None]:
    """Simulate CPU devices, initialize jax.distributed, enable the compilation cache for a block.

    Only process 0 prints; the others print errors only. After the block JAX's settings of the cache
    are as before; CPU devices stay, as they cannot change once JAX has started.

    Args:
        run: Options with the fields `devices`, `distributed` and `hosts`.

    Raises:
        ValueError: The flags differ between processes, or --distributed is missing.
    """
    if run.hosts != DistributedConfig() and not run.distributed:
        raise ValueError(f"{run.hosts} is for several processes; also pass --distributed.")
    before = {name: jax.config.values[name] for name in CACHE_SETTINGS}
    simulate_cpu_devices(run.devices)
    if run.distributed:
        parallel.initialize_distributed(run.hosts)
    enable_compilation_cache()  # before anything is compiled
    try:
        with contextlib.ExitStack() as stack:
            if run.distributed:
                if not parallel.is_primary_process():
                    nowhere = stack.enter_context(open(os.devnull, "w"))
                    stack.enter_context(contextlib.redirect_stdout(nowhere))
                flat_config = flatten(json.loads(to_json(run)))
                parallel.check_equal_across_processes(
                    {k: x for k, x in flat_config.items() if k != "hosts.process_id"}
                )
            yield
    finally:
        if before != {name: jax.config.values[name] for name in CACHE_SETTINGS}:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()  # or else JAX goes on as at the first program


def simulate_cpu_devices(count: int | None) -> None:
    """Simulate this many CPU devices; no effect on other platforms."""
    if count is not None:
        with contextlib.suppress(RuntimeError):  # JAX is already initialized
            jax.config.update("jax_num_cpu_devices", count)


def select_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices of each process; all by default."""
    everyone = jax.devices()
    if count is None:
        return everyone
    by_process: dict[int, list[jax.Device]] = {}
    for device in everyone:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    if not 1 <= count <= fewest:
        remedy = ""
        if count > fewest and everyone[0].platform == "cpu":
            remedy = (
                " JAX has started in this process, which fixes its CPU devices: start a new "
                f'process, or call jax.config.update("jax_num_cpu_devices", {count}) before all '
                "else."
            )
        raise ValueError(
            f"devices must lie between 1 and {fewest} on this machine; got {count}.{remedy}"
        )
    return [device for devices in by_process.values() for device in devices[:count]]


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache, so that a resumed run does not recompile.

    JAX's settings have priority: JAX_COMPILATION_CACHE_DIR selects the folder, and
    JAX_ENABLE_COMPILATION_CACHE=0 disables the cache. Programs for several CPU devices are never
    cached: programs that XLA reads from the cache may start collectives in another order on each
    device, and then deadlock until they abort (JAX 0.10.2 and 0.12.0).
    """
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.values["jax_compilation_cache_dir"] is None:
        folder = Path("runs/cache/programs").resolve()  # it may be deleted at any time
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # most are small


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves of nested dicts and lists, keyed by their dotted path."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in leaves}
