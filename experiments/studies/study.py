"""Runs a study: variants that differ in one choice, several seeds each."""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.pretrain import RUNS, Pretrain, Text, read_corpus
from experiments.studies.results import Numbers, Results
from experiments.studies.seeds import Arm, Training, held_out_nats, shared_by, train_seeds
from experiments.training.loop import check_vocabulary
from experiments.training.run import (
    check_numbers,
    check_uses,
    chosen_devices,
    held,
    keep_programs,
    simulate,
)
from jaxformer import costs
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training.optimizers import learning_rate

Measure = Callable[[Arm, Any, Text, Training], Numbers]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Options that all studies share.

    Attributes:
        size: "smoke" to see that it runs, "cpu" for a few hours of two cores, "untied" to see
            whether what was found there hangs on the table that both ends share, "gpu" for models
            of about 100M parameters.
        run: A named run of experiments.pretrain to vary instead: its model, text, optimizer,
            objective, batch, remat and number of updates. What it says of meshes, accumulation,
            skipped updates and seeds is the study's own to say.
        seeds: Of each arm: this many, from `first_seed` on.
        first_seed: The first one.
        steps: Updates of each arm; None is the size's.
        batch_size: Rows of a batch, of each seed; None is the size's.
        length: Tokens of a row; None is the size's.
        devices: At most so many share the rows of a batch, as far as they divide them; None is
            all. On a CPU, how many to simulate; None is one for each core.
        output: Folder for the results; None is runs/STUDY-SIZE. Arms that are finished there are
            not trained again.
        cache: Folder for tokenised text.
    """

    size: Literal["smoke", "cpu", "untied", "gpu"] = "cpu"
    run: str | None = None
    seeds: int = 4
    first_seed: int = 0
    steps: int | None = None
    batch_size: int | None = None
    length: int | None = None
    devices: int | None = None
    output: Path | None = None
    cache: Path = Path("runs/cache")

    def __post_init__(self):
        check_numbers(self)
        check_uses(self, excludes={"size": "run"})
        if self.seeds < 2:
            raise ValueError(f"A confidence interval needs at least 2 seeds; got {self.seeds}.")
        if self.run is not None and self.run not in RUNS:
            raise ValueError(f"There is no run {self.run!r}. Runs: {', '.join(RUNS)}.")


def base_run(study: Study, sizes: Mapping[str, Pretrain]) -> Pretrain:
    """Baseline run of a study: a study size or a named run, with these overrides.

    Another number of updates scales the warm-up with it.
    """
    base = sizes[study.size] if study.run is None else RUNS[study.run]
    overrides = {name: getattr(study, name) for name in ("steps", "batch_size", "length")}
    changes: dict[str, Any] = {name: x for name, x in overrides.items() if x is not None}
    if study.steps is not None:
        schedule = base.optimizer.schedule
        warmup = round(schedule.warmup_steps * study.steps / base.planned_steps)
        min_warmup = min(schedule.warmup_steps, 1)
        schedule = dataclasses.replace(schedule, warmup_steps=max(warmup, min_warmup))
        changes["optimizer"] = dataclasses.replace(base.optimizer, schedule=schedule)
        changes["schedule_steps"] = study.steps
    return dataclasses.replace(base, **changes)


def check_arms(arms: Sequence[Arm], run: Pretrain) -> None:
    """Raise unless every variant has its own name and differs from the baseline.

    Raises:
        ValueError: There is such an arm, or one that cannot be trained as the run is.
    """
    baseline, *other_variants = arms
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1:
            raise ValueError(f"{names.count(arm.name)} arms are called {arm.name!r}.")
        try:
            learning_rate(arm.optimizer, run.steps)
            dataclasses.replace(run, model=arm.model)
        except ValueError as error:
            raise ValueError(f"Arm {arm.name!r}: {error}") from error
    for arm in other_variants:
        if dataclasses.replace(arm, name=baseline.name) == baseline:
            raise ValueError(
                f"Arm {arm.name!r} equals the baseline {baseline.name!r}: nothing differs but the "
                "name. Vary another axis or run."
            )


def conduct(
    study: Study, name: str, run: Pretrain, arms: Sequence[Arm], measure: Measure
) -> tuple[Path, list[Numbers]]:
    """Train and evaluate every variant without a saved result.

    Args:
        study: As asked for.
        name: Of the study, without its size.
        run: What is varied.
        arms: The baseline first.
        measure: More numbers of an arm, once it is trained: from the arm, the parameters of all
            seeds, the text, and how it was trained.

    Returns:
        The folder of the results, and those of each arm in order.

    Raises:
        ValueError: An arm equals the baseline, the folder holds another study, or another process
            is at work in it.
    """
    check_arms(arms, run)
    size = study.size if study.run is None else study.run
    output = study.output or Path("runs") / f"{name}-{size}"
    with held(output):
        return output, train_arms(study, name, run, arms, measure, output)


def train_arms(
    study: Study, name: str, run: Pretrain, arms: Sequence[Arm], measure: Measure, output: Path
) -> list[Numbers]:
    """Train and measure every arm that is not finished in a folder; see `conduct`."""
    simulate(study.devices if study.devices is not None else os.cpu_count())
    keep_programs()
    text = read_corpus(dataclasses.replace(run, cache=study.cache))
    for arm in arms:
        check_vocabulary(arm.model, text.tokenizer, f"give arm {arm.name!r} a vocab_size of")
    seeds = tuple(range(study.first_seed, study.first_seed + study.seeds))
    devices = chosen_devices(study.devices)
    mesh = make_mesh(MeshConfig(), devices[: shared_by(run.batch_size, devices)])
    training = Training(text.train, seeds, run.steps, run.batch_size, run.dtype, run.remat, mesh)
    description = {
        "study": name,
        "size": study.size if study.run is None else study.run,
        "seeds": list(seeds),
        "steps": run.steps,
        "batch_size": run.batch_size,
        "length": run.length,
        "tokens": run.steps * run.batch_size * run.length,
        "dtype": run.dtype,
        "corpus": str(run.corpus),
        "text": {"train": text.train.digest()[:16], "held_out": text.held_out.digest()[:16]},
        "held_out_tokens": text.held_out.num_targets,
        "epochs": round(run.steps * run.batch_size / len(text.train), 2),
        "arms": [arm.name for arm in arms],
    }
    results = Results(output, description)
    results_in_order = []
    for index, arm in enumerate(arms, start=1):
        numbers = results.finished(arm)
        if numbers is None:
            title = f"{index}/{len(arms)} {arm.name}, {study.seeds} seeds on {mesh.size} device(s)"
            numbers = results.save(arm, try_arm(arm, training, text, measure, title))
        else:
            print(f"{index}/{len(arms)} {arm.name}: finished before.", flush=True)
        results_in_order.append(numbers)
    for numbers, speeds in zip(results_in_order, results.speeds(arms, training), strict=True):
        numbers["speeds"] = speeds
    return results_in_order


def try_arm(arm: Arm, training: Training, text: Text, measure: Measure, title: str) -> Numbers:
    """Train and evaluate one variant."""
    trained = train_seeds(arm, training, title)
    started_at = time.monotonic()
    held_out = held_out_nats(arm.model, trained.params, text.held_out, training)
    extra = measure(arm, trained.params, text, training)
    return {
        "parameters": costs.parameters(arm.model),
        "held_out": finite_or_none(held_out),
        "train": [finite_or_none(row) for row in thinned(trained.losses).T],
        "train_steps": [int(at) + 1 for at in np.flatnonzero(kept_steps(training.steps))],
        "skipped": trained.skipped,
        "seconds": round(trained.seconds, 2),
        "compile_seconds": round(trained.compile_seconds, 2),
        "measure_seconds": round(time.monotonic() - started_at, 2),
        "machine": machine(training.mesh.size),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **extra,
    }


def kept_steps(steps: int, points: int = 50) -> np.ndarray:
    """Mask of the steps kept in saved curves: the last, and evenly spaced ones before it."""
    mask = np.zeros(steps, bool)
    mask[np.linspace(0, steps - 1, min(points, steps)).round().astype(int)] = True
    return mask


def thinned(losses: np.ndarray) -> np.ndarray:
    """Curves at the kept steps only."""
    return losses[kept_steps(len(losses))]


def finite_or_none(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Round to about five digits for JSON; None for NaN and infinity."""
    return [round(float(x), 5) if np.isfinite(x) else None for x in values]


def machine(devices: int) -> dict[str, str | int]:
    """Hardware and software versions of this process, for the results."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": devices,
        "cores": os.cpu_count() or 0,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
