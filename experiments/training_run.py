"""What a training run says of itself, whatever it trains."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.flag_checks import check_counts, check_folder, check_seed
from experiments.locks import held
from experiments.starting import keep_printed
from jaxformer import functional as F
from jaxformer import parallel
from jaxformer.config import TransformerConfig, to_json
from jaxformer.layers.mode import Remat
from jaxformer.parallel import Hosts, MeshConfig
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import Objective
from jaxformer.training.guard import Skipping
from jaxformer.training.optimizers import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every training run says of itself.

    Attributes:
        model: The model.
        batch_size: Rows of a batch, over all devices.
        accumulation: In how many parts a device works through its rows, to save memory.
        steps: Stop after this many updates, counted from the start of the run.
        schedule_steps: Updates that the learning-rate schedule is planned for. It does not follow
            --steps, so that a run can stop early and be resumed without another result.
        optimizer: How gradients become updates.
        objective: Terms of the loss beside the cross-entropy.
        skipping: Which updates are left out because their gradients would do harm.
        dtype: Of the computation; parameters are float32.
        remat: What the backward pass recomputes; "dots" keeps the results of matrix products alone,
            which takes half the memory and, on a CPU, less time than to keep everything.
        attention_implementation: How scores are computed; "auto" is the platform's best, see
            `F.dot_product_attention`.
        scan: Run layers as one compiled loop (compiles fast) or unrolled (runs faster on a CPU).
        expert_room: Rows that a device has room for from each other one on the way to experts, as
            a multiple of an even share; None has room for all (see --mesh.expert).
        mesh: How the devices share the work.
        overlap: Let messages between TPUs travel while products are computed.
        devices: How many devices to use, of each process; None is all. On a CPU, how many to
            simulate.
        distributed: Whether this is one of many processes, each started with the same command.
        hosts: How the processes find each other.
        seed: Of parameters, data and dropout.
        output: Folder for checkpoints, metrics and the tokenizer; None is runs/NAME-N, a new one,
            or with --resume the newest. Processes share it.
        resume: Go on from the newest checkpoint in the output folder.
        resume_or_begin: Go on if --output has a checkpoint, else begin there; nothing is done where
            the run is finished. For a command that is given again until it ends with status 0.
        log_every: Updates between lines in the metrics.
        evaluate_every: Updates between evaluations.
        save_every: Updates between checkpoints; the last update is always saved.
        keep: How many of the newest checkpoints to keep, beside the best.
        tensorboard: Whether to write TensorBoard files.
        wandb: Project to log to at Weights and Biases.
    """

    model: TransformerConfig
    batch_size: int
    accumulation: int = 1
    steps: int
    schedule_steps: int
    optimizer: OptimizerConfig
    objective: Objective = Objective()
    skipping: Skipping = Skipping()
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "dots"
    attention_implementation: F.Implementation = "auto"
    scan: bool = False
    expert_room: float | None = None
    mesh: MeshConfig = MeshConfig()
    overlap: bool = True
    devices: int | None = None
    distributed: bool = False
    hosts: Hosts = Hosts()
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

    def __post_init__(self):
        check_counts(self, "seed")
        check_seed("seed", self.seed)
        check_folder("output", self.output)
        if self.expert_room is not None and not self.expert_room >= 1:
            raise ValueError(f"expert_room must be at least 1, or None; got {self.expert_room}.")
        if self.resume_or_begin and self.output is None:
            raise ValueError(
                "--resume-or-begin needs --output FOLDER, where the next start finds the run."
            )
        if self.wandb == "":
            raise ValueError("wandb must name a project; got ''.")


def name_of(run: Run) -> str:
    """What a run is called in commands and folders."""
    return type(run).__name__.lower()


@contextlib.contextmanager
def output_folder(run: Run) -> Iterator[Path]:
    """The same folder for all processes, of which the first holds it; see `choose_folder`.

    Raises:
        ValueError: Another run holds the folder, or there is none for this run.
    """
    with contextlib.ExitStack() as holding:

        def take() -> str:
            folder = choose_folder(run)
            made = run.output is None and not run.resume
            holding.enter_context(held(folder, made=made))
            refuse_earlier(run, folder)
            return str(folder)

        folder = Path(parallel.first_decides(take))
        if parallel.is_first():
            keep_printed(folder)
        yield folder


def choose_folder(run: Run) -> Path:
    """The folder asked for, or for example runs/pretrain-N: a new one, or the newest to resume."""
    folder, name = run.output, name_of(run)
    if folder is None:
        # A run that ended before its first checkpoint is nothing to resume.
        earlier = Path("runs").glob(f"{name}-*/checkpoints" if run.resume else f"{name}-*")
        names = [f.parts[1].removeprefix(f"{name}-") for f in earlier]
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        if run.resume and not newest:
            raise ValueError(f"There is no runs/{name}-N to resume; pass --output FOLDER.")
        if run.resume:
            return Path("runs") / f"{name}-{newest}"
        return new_folder(f"runs/{name}", newest + 1)
    return folder


def new_folder(name: str, number: int) -> Path:
    """Make the first folder NAME-N that is not there, from a number on."""
    while True:
        folder = Path(f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run was quicker
            number += 1


def refuse_earlier(run: Run, folder: Path) -> None:
    """Refuse to begin where an earlier run has left something.

    Raises:
        ValueError: With what it left.
    """
    if run.resume or run.resume_or_begin:
        return
    ours = ("checkpoints", "metrics.jsonl", "tokenizer.json", "tensorboard")
    found = [name for name in ours if (folder / name).exists()]
    if found:
        raise ValueError(
            f"{folder} holds {', '.join(found)} of an earlier run. Pass --resume to go on with it "
            "(--resume-or-begin if it may have no checkpoint yet), or another --output."
        )


def going_on(run: Run, output: Path) -> bool:
    """Whether a run goes on from a checkpoint, the same in all processes."""
    if not run.resume_or_begin:
        return run.resume
    saved = Checkpoints(output / "checkpoints")
    return parallel.first_decides(lambda: str(bool(saved.steps()))) == "True"


def check_vocabulary(run: Run, need: int) -> None:
    """Refuse a tokenizer whose last tokens would have no row in the model's table."""
    have = run.model.vocab_size
    if have < need:
        raise ValueError(
            f"The tokenizer has {need} tokens, the model {have}; pass --model.vocab-size {need}."
        )


def describe(run: Run, fixed: tuple[str, ...], **digests: Any) -> dict[str, Any]:
    """What a checkpoint says of itself: everything that the result depends on.

    Args:
        run: The run.
        fixed: Its fields that a resumed run may not change.
        digests: Of the tokenizer and the data.
    """
    chosen = json.loads(to_json(run))
    return {
        "config": chosen["model"],
        "run": {name: chosen[name] for name in fixed},
        **digests,
    }
