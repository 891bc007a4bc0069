"""Trains one variant from several seeds, one after the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.config import TransformerConfig
from jaxformer.layers import Transformer
from jaxformer.parallel import put_batch
from jaxformer.run.pretraining import Pretrain, evaluate_rows, make_batches
from jaxformer.run.train_setup import make_model
from jaxformer.run.trainer import compile_train_step, make_run_optimizer
from jaxformer.training import loop
from jaxformer.training.gradient import Objective
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.progress import Progress
from jaxformer.training.skip_step import SkipStepConfig
from jaxformer.training.train_step import TrainState, init_train_state, make_eval_step

TIMING_ROUNDS, TIMING_STEPS = 5, 2  # of a variant in `measure_throughput`, after one step


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant of a study: a name and the run to train.

    Attributes:
        name: Name in tables and plots.
        model: Model configuration.
        optimizer: Optimizer and learning-rate schedule.
        objective: Terms of the loss beside the cross-entropy.
    """

    name: str
    model: TransformerConfig
    optimizer: OptimizerConfig
    objective: Objective = Objective()


class StudyTraining(NamedTuple):
    """What all variants of a study share: their run, data, seeds and mesh."""

    run: Pretrain
    rows: data.AnyRows
    seeds: tuple[int, ...]
    mesh: Mesh

    def run_of(self, variant: Variant) -> Pretrain:
        """The run of a variant."""
        return replace(
            self.run,
            model=variant.model,
            optimizer=variant.optimizer,
            objective=variant.objective,
            # Only non-finite steps are skipped, as skipping large norms would hide instability.
            skip_step=SkipStepConfig(max_norm_ratio=None),
            gradient_accumulation_steps=1,
            scan=True,
        )

    def batch_getter(self, seed: int) -> Callable[[int], data.Batch]:
        """Function of k that returns the batch of step k + 1 of one seed."""
        size = self.run.batch_size
        batches = make_batches(self.rows, self.mesh, size, seed=seed)
        return lambda step: put_batch(batches[step], self.mesh, size)


class SeedResults(NamedTuple):
    """Final parameters and loss curve of each seed, and the training time."""

    params: list[Any]
    losses: np.ndarray  # [steps, seeds]
    skipped: int  # steps of all seeds with a non-finite update
    seconds: float  # without compilation
    compile_seconds: float


def train_seeds(variant: Variant, training: StudyTraining, title: str) -> SeedResults:
    """Train a variant from every seed with one compiled program.

    A seed determines the data order and the initial parameters, so variants with the same
    parameter shapes have both in common.

    Args:
        variant: Variant to train.
        training: Settings of the training.
        title: Title of the progress display.

    Returns:
        The results. Steps with a non-finite loss or gradient are skipped; their losses stay NaN or
        infinite in the loss curve.

    Raises:
        ValueError: The train step does not fit in the memory of a device.
    """
    started_at = time.monotonic()
    init, update = compile_variant(variant, training)
    compiled, steps = time.monotonic(), training.run.steps
    params, losses, skipped = [], np.zeros((steps, len(training.seeds))), 0
    with Progress(losses.size, title=title) as progress:
        for seed_index, seed in enumerate(training.seeds):
            updates = loop.train_steps(
                init(seed),
                update,
                training.batch_getter(seed),
                start_step=0,
                stop_step=steps,
                should_sync=lambda step: step == steps,
                max_consecutive_skips=steps,
            )
            for step, state, results in updates:
                for result in results:
                    losses[result.step - 1, seed_index] = result.loss
                    progress.update(seed_index * steps + result.step, loss=result.loss)
                if step == steps:
                    params.append(state.params)
                    skipped += result.num_skipped
    return SeedResults(params, losses, skipped, time.monotonic() - compiled, compiled - started_at)


def compile_variant(
    variant: Variant, training: StudyTraining
) -> tuple[Callable[[int], TrainState], Any]:
    """Compile the train step of a variant; returns a function of a seed, its state, and the step.

    Raises:
        ValueError: The train step does not fit in the memory of a device.
    """
    run, mesh = training.run_of(variant), training.mesh
    model, optimizer = make_model(run), make_run_optimizer(run)
    update = compile_train_step(
        run,
        model,
        optimizer,
        mesh,
        [training.batch_getter(seed=0)(0)],
        advice=lambda _: (
            "Pass a smaller --batch-size or --length, or --run with a run that uses remat."
        ),
    )
    return lambda seed: init_train_state(model, optimizer, jax.random.key(seed), mesh), update


def measure_throughput(
    variants: Sequence[Variant], training: StudyTraining
) -> dict[str, list[float]]:
    """Time a few steps of every variant, interleaved, so that machine load affects all equally.

        tokens/s = TIMING_STEPS * batch_size * row_length / seconds

    Args:
        variants: Variants, in the order of a round.
        training: Settings of the training.

    Returns:
        Tokens per second of each of `TIMING_ROUNDS` rounds, by variant name.
    """
    batch = training.batch_getter(training.seeds[0])(0)
    programs = {variant.name: compile_variant(variant, training) for variant in variants}
    tokens = training.run.batch_size * training.rows.row_length * TIMING_STEPS
    throughputs: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for _ in range(TIMING_ROUNDS):
        for name, (begin, update) in programs.items():
            state, _ = jax.block_until_ready(update(begin(training.seeds[0]), batch))
            since = time.monotonic()
            for _ in range(TIMING_STEPS):
                state, metrics = update(state, batch)
            jax.block_until_ready(metrics)
            throughputs[name].append(round(tokens / (time.monotonic() - since), 1))
    return throughputs


def held_out_losses(
    model: TransformerConfig, params: Sequence[Any], rows: data.AnyRows, training: StudyTraining
) -> list[float]:
    """Held-out loss in nats per token, for each seed; rows of any length.

    Args:
        model: Model configuration; its RoPE scaling may differ from the training's.
        params: Parameters of each seed, from `train_seeds`.
        rows: Rows to evaluate.
        training: Settings of the training.

    Returns:
        One number for each seed.
    """
    mesh = training.mesh
    # About as many tokens per batch as in training, and equally many rows per device.
    size = training.run.batch_size * training.rows.row_length // rows.row_length
    size = max(1, size // mesh.size) * mesh.size
    tally = make_eval_step(Transformer(model, dtype=training.run.dtype), mesh)
    losses = []
    for seed_params in params:
        nats, tokens = evaluate_rows(tally, seed_params, rows, mesh, size)
        losses.append(nats / tokens)
    return losses


def num_sharing_devices(rows: int, devices: Sequence[Any]) -> int:
    """Largest number of devices that divides the number of rows."""
    return max(n for n in range(1, len(devices) + 1) if rows % n == 0)
