"""What a training run says of itself, whatever it trains."""

import json
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxformer.config import TransformerConfig, to_json
from jaxformer.layers.mode import Remat
from jaxformer.training import step
from jaxformer.training.optimizers import OptimizerConfig


class Run(Protocol):
    """What a run says of its training; `experiments.pretrain_runs` documents each field."""

    @property
    def model(self) -> TransformerConfig: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def schedule_steps(self) -> int: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def objective(self) -> step.Objective: ...
    @property
    def dtype(self) -> Literal["float32", "bfloat16"]: ...
    @property
    def remat(self) -> Remat: ...
    @property
    def scan(self) -> bool: ...
    @property
    def devices(self) -> int | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def output(self) -> Path | None: ...
    @property
    def resume(self) -> bool: ...
    @property
    def log_every(self) -> int: ...
    @property
    def evaluate_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> str | None: ...


def name_of(run: Run) -> str:
    """What a run is called in commands and folders."""
    return type(run).__name__.lower()


def output_folder(run: Run) -> Path:
    """The folder asked for, or for example runs/pretrain-N: the next, or the newest to resume."""
    folder, name = run.output, name_of(run)
    if folder is None:
        # A run that ended before its first checkpoint is nothing to resume.
        earlier = Path("runs").glob(f"{name}-*/checkpoints" if run.resume else f"{name}-*")
        names = [f.parts[1].removeprefix(f"{name}-") for f in earlier]
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        if run.resume and not newest:
            raise ValueError(f"There is no runs/{name}-N to resume; pass --output FOLDER.")
        folder = Path("runs") / f"{name}-{newest if run.resume else newest + 1}"
    elif not run.resume:
        ours = ("checkpoints", "metrics.jsonl", "tokenizer.json", "tensorboard")
        found = [name for name in ours if (folder / name).exists()]
        if found:
            raise ValueError(
                f"{folder} holds {', '.join(found)} of an earlier run. Pass --resume to go on "
                "with it, or another --output."
            )
    return folder


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
