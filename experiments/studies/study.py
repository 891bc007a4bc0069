"""Runs a study: variants that differ in one choice, several seeds each."""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from experiments.studies.results import ResultDict, StudyResults
from experiments.studies.train_seeds import (
    StudyTraining,
    Variant,
    held_out_losses,
    num_sharing_devices,
    train_seeds,
)
from jaxformer import costs
from jaxformer.checks import Checked, Must, Size
from jaxformer.data import max_vocab_size
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run.output_folder import lock_folder
from jaxformer.run.pretraining import RUNS, PackedCorpus, Pretrain, prepare_corpus
from jaxformer.run.run_config import (
    Seed,
    check_uses,
    enable_compilation_cache,
    select_devices,
    simulate_cpu_devices,
)
from jaxformer.run.train_setup import check_vocabulary
from jaxformer.training.schedules import make_schedule

CURVE_POINTS = 50  # losses that are saved of each seed

ExtraMetric = Callable[[Variant, Any, PackedCorpus, StudyTraining], ResultDict]


@dataclass(frozen=True, kw_only=True)
class Study(Checked):
    """Options that all studies share.

    Attributes:
        size: "smoke" for a test of minutes, "cpu" for a few hours on two cores, "untied" for "cpu"
            with an untied head, "gpu" for models of about 100M parameters.
        run: Named run of experiments.pretrain to vary instead of a size: its model, text,
            optimizer, objective, batch, remat and number of steps. Its mesh, gradient accumulation,
            skipping of steps and seed have no effect.
        seeds: Number of seeds of each variant.
        first_seed: The first seed; the others count up from it.
        steps: Training steps of each variant; None is the size's number.
        batch_size: Rows of a batch; None is the size's number.
        length: Row length in tokens; None is the size's length.
        devices: Maximum number of devices for a batch; the largest number up to it that divides
            the batch is used. None is all. On a CPU, the number to simulate; None is one per core.
        output: Folder for the results; None is runs/STUDY-SIZE. Variants with a result there are
            not trained again.
        cache: Folder for tokenized text.
    """

    size: Literal["smoke", "cpu", "untied", "gpu"] = "cpu"
    run: str | None = None
    seeds: Annotated[Size, Must("be at least 2, for an interval", lambda n: n > 1)] = 4
    first_seed: Seed = 0
    steps: Size | None = None
    batch_size: Size | None = None
    length: Size | None = None
    devices: Size | None = None
    output: Path | None = None
    cache: Path = Path("runs/cache")

    def __post_init__(self):
        super().__post_init__()
        check_uses(self, excludes={"size": "run"})
        if self.run is not None and self.run not in RUNS:
            raise ValueError(f"There is no named run {self.run!r}. Named runs: {', '.join(RUNS)}.")


def base_run(study: Study, sizes: Mapping[str, Pretrain]) -> Pretrain:
    """Baseline run of a study: a size or a named run with the study's overrides.

    If the number of steps changes, the warm-up scales with it.
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


def check_variants(variants: Sequence[Variant], run: Pretrain) -> None:
    """Raise unless every variant has its own name and differs from the baseline.

    Raises:
        ValueError: There is such a variant, or one that the settings of the run cannot train.
    """
    baseline, *other_variants = variants
    names = [variant.name for variant in variants]
    for variant in variants:
        if names.count(variant.name) > 1:
            raise ValueError(
                f"{names.count(variant.name)} variants have the same name {variant.name!r}."
            )
        try:
            make_schedule(variant.optimizer.schedule, run.steps)
            dataclasses.replace(run, model=variant.model)
        except ValueError as error:
            raise ValueError(f"Variant {variant.name!r}: {error}") from error
    for variant in other_variants:
        if dataclasses.replace(variant, name=baseline.name) == baseline:
            raise ValueError(
                f"Variant {variant.name!r} equals the baseline {baseline.name!r}. Choose another "
                "axis or run."
            )


def run_study(
    study: Study, name: str, run: Pretrain, variants: Sequence[Variant], extra_metric: ExtraMetric
) -> tuple[Path, list[ResultDict]]:
    """Train and evaluate every variant without a saved result.

    Args:
        study: Options of the study.
        name: Name of the study, without its size.
        run: Baseline run.
        variants: Variants, the baseline first.
        extra_metric: Function that returns more metrics of a trained variant from the variant, the
            parameters of all seeds, the packed corpus, and the settings of the training.

    Returns:
        The results folder, and the result of each variant in order.

    Raises:
        ValueError: A variant equals the baseline, the folder has another study, or another process
            has locked it.
    """
    check_variants(variants, run)
    size = study.size if study.run is None else study.run
    output = study.output or Path("runs") / f"{name}-{size}"
    simulate_cpu_devices(study.devices if study.devices is not None else os.cpu_count())
    with lock_folder(output):
        enable_compilation_cache()
        tokens = max_vocab_size(run.tokenizer) or 0
        for variant in variants:
            check_vocabulary(
                variant.model, tokens, f"give variant {variant.name!r} a vocab_size of"
            )
        text = prepare_corpus(dataclasses.replace(run, cache=study.cache))
        seeds = tuple(range(study.first_seed, study.first_seed + study.seeds))
        devices = select_devices(study.devices)
        mesh = make_mesh(MeshConfig(), devices[: num_sharing_devices(run.batch_size, devices)])
        training = StudyTraining(run, text.train, seeds, mesh)
        results = StudyResults(output, study_description(study, name, run, variants, text, seeds))
        results_in_order = []
        for index, variant in enumerate(variants, start=1):
            title = f"{index}/{len(variants)} {variant.name}"
            numbers = results.load(variant)
            if numbers is None:
                title += f", {study.seeds} seeds on {mesh.size} device(s)"
                numbers = run_variant(variant, training, text, extra_metric, title)
                numbers = results.save(variant, numbers)
            else:
                print(f"{title}: already finished.", flush=True)
            results_in_order.append(numbers)
        speeds_in_order = results.throughputs(variants, training)
        for numbers, speeds in zip(results_in_order, speeds_in_order, strict=True):
            numbers["speeds"] = speeds
        return output, results_in_order


def study_description(
    study: Study,
    name: str,
    run: Pretrain,
    variants: Sequence[Variant],
    text: PackedCorpus,
    seeds: Sequence[int],
) -> ResultDict:
    """The settings on which all results depend, and the names of the variants."""
    return {
        "study": name,
        "size": study.size if study.run is None else study.run,
        "seeds": list(seeds),
        "steps": run.steps,
        "batch_size": run.batch_size,
        "length": run.length,
        "tokens": run.steps * run.batch_size * run.length,
        "dtype": run.dtype,
        "corpus": str(run.corpus),
        "text": {"train": text.train.digest[:16], "held_out": text.held_out.digest[:16]},
        "held_out_tokens": text.held_out.num_targets,
        "epochs": round(run.steps * run.batch_size / len(text.train), 2),
        "variants": [variant.name for variant in variants],
    }


def run_variant(
    variant: Variant,
    training: StudyTraining,
    text: PackedCorpus,
    extra_metric: ExtraMetric,
    title: str,
) -> ResultDict:
    """Train and evaluate one variant."""
    trained = train_seeds(variant, training, title)
    started_at, steps = time.monotonic(), training.run.steps
    shown = np.linspace(0, steps - 1, min(CURVE_POINTS, steps)).round().astype(int)
    held_out = held_out_losses(variant.model, trained.params, text.held_out, training)
    extra = extra_metric(variant, trained.params, text, training)
    return {
        "parameters": costs.num_parameters(variant.model),
        "held_out": finite_or_none(held_out),
        "train": [finite_or_none(row) for row in trained.losses[shown].T],
        "train_steps": (shown + 1).tolist(),
        "skipped": trained.skipped,
        "seconds": round(trained.seconds, 2),
        "compile_seconds": round(trained.compile_seconds, 2),
        "measure_seconds": round(time.monotonic() - started_at, 2),
        "machine": machine_info(training.mesh.size),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **extra,
    }


def finite_or_none(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Round to about five digits for JSON; None for NaN and infinity."""
    return [round(float(x), 5) if np.isfinite(x) else None for x in values]


def machine_info(devices: int) -> dict[str, str | int]:
    """Hardware and software versions of this process, for the results."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": devices,
        "cores": os.cpu_count() or 0,
        "processor": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
