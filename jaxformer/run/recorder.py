"""What a run trains on, and what records it: metrics, evaluations, checkpoints and its files."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxformer import parallel
from jaxformer.config import to_json
from jaxformer.data import PretrainedTokenizer, Tokenizer
from jaxformer.run import object_store as stores
from jaxformer.run.output_folder import RUN_FILE, write_beginning
from jaxformer.run.run_config import RunConfig
from jaxformer.run.throughput import ThroughputMeter
from jaxformer.run.train_setup import TrainSetup
from jaxformer.training import loop, metrics, train_step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.gradient import AnyBatch
from jaxformer.training.progress import Progress


class Evaluation(NamedTuple):
    """Metrics of an evaluation, and the loss by which the best checkpoint is selected."""

    metrics: dict[str, float]
    loss: float


TrainResult = tuple[Any, dict[str, float]]  # final parameters, metrics of their evaluation


@runtime_checkable
class TrainData(Protocol):
    """What a run trains with and is evaluated on.

    Attributes:
        tokenizer: Tokenizer, which is saved beside the checkpoints.
        sequence_length: Row length in tokens; with an encoder, of the targets.
        fitted: Fields of the run that follow from the data.
        rows_per_epoch: Rows of an epoch; None if they are not known.
        get_batch: Function of k that returns the sharded batch of step k + 1.
    """

    tokenizer: Tokenizer
    sequence_length: int
    fitted: Mapping[str, Any] = {}
    rows_per_epoch: int | None = None
    get_batch: Callable[[int], AnyBatch]

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data of a resumed run, beside the settings of the run."""
        return {}

    def files(self) -> dict[str, str]:
        """Additional files for the output folder: their contents, by name."""
        return {}

    def is_ready(self, step: int) -> bool:
        """Whether `get_batch(step)` returns at once."""
        return True

    def batch_of_each_shape(self, step: int) -> Iterable[AnyBatch]:
        """One batch of each shape, for which the train step is compiled."""
        return [self.get_batch(step)]

    def prepare(self, step: int, params: Any) -> None:
        """Prepare for the steps after `step`, with the parameters after it."""
        return

    def evaluate(self, step: int, params: Any, recorder: "Recorder", *, final: bool) -> Evaluation:
        """Evaluate the parameters after a step, on all held-out data if the evaluation is final.

        Args:
            step: The step.
            params: The parameters.
            recorder: It has the progress and the checkpoints.
            final: Whether it is the result of the run; others choose the best checkpoint.
        """
        ...

    def report(self, result: TrainResult | None) -> None:
        """Print the result at the end of the run; there is None if it was already complete."""
        ...


class Recorder(NamedTuple):
    """Logs the steps of a run, evaluates its parameters and saves its state."""

    run: RunConfig
    setup: TrainSetup
    train_data: TrainData
    checkpoints: Checkpoints
    description: dict[str, Any]
    meter: ThroughputMeter
    writer: metrics.MultiWriter
    progress: Progress

    def log(self, results: list[loop.StepResult]) -> None:
        """Show the metrics of finished steps, and write them at every `log_every` steps."""
        for result, numbers in self.meter.step_metrics(results):
            seconds = self.meter.tokens / numbers["tokens_per_second"]
            self.progress.update(result.step, step_seconds=seconds, **numbers)
            if result.num_consecutive_skips:
                self.progress.print(
                    f"step {result.step:,}: update skipped (loss {result.loss:.4g}, gradient norm "
                    f"{result.gradient_norm:.4g}); {result.num_skipped} skipped so far"
                )
            if result.step % self.run.log_every == 0 or result.step == self.run.steps:
                skipped = {"skipped_updates": result.num_skipped} if result.num_skipped else {}
                numbers["gradient_norm"] = result.gradient_norm
                if result.max_expert_load is not None:
                    numbers["max_expert_load"] = result.max_expert_load
                self.writer.write(result.step, {**numbers, **skipped})

    def evaluate(self, step: int, params: Any, *, final: bool = False) -> Evaluation:
        """Evaluate the parameters and write the metrics."""
        evaluation = self.train_data.evaluate(step, params, self, final=final)
        if final or step % self.run.evaluate_every == 0:  # so that a longer run has no others
            self.writer.write(step, evaluation.metrics)
        return evaluation

    def save(self, step: int, state: train_step.TrainState, loss: float | None) -> None:
        """Save a checkpoint, and upload the small files of a run in an object store."""
        write_data_files(self.setup.local_folder, self.train_data)
        self.checkpoints.save(step, state, self.description, loss=loss)
        if parallel.is_primary_process() and self.run.output is not None:
            stores.upload(self.run.output)


def write_run_files(run: RunConfig, folder: Path, train_data: TrainData, start_step: int) -> None:
    """Write run.json and the tokenizer; for a new run also the copies of the files of --init."""
    if not parallel.is_primary_process():
        return
    if start_step == 0:
        write_beginning(run, train_data.tokenizer, folder)
    elif not isinstance(run.tokenizer, PretrainedTokenizer):  # its file may be damaged
        train_data.tokenizer.save(folder)
    write_data_files(folder, train_data)
    (folder / RUN_FILE).write_text(to_json(run, indent=1), encoding="utf-8")


def write_data_files(folder: Path, train_data: TrainData) -> None:
    """Write the files of the data, such as the records of its sources."""
    if parallel.is_primary_process():
        for name, content in train_data.files().items():
            (folder / name).write_text(content, encoding="utf-8")


def make_writers(
    run: RunConfig, output: Path, description: dict[str, Any], start_step: int
) -> list[metrics.MetricWriter]:
    """Metric writers of process 0, resumed so that they drop lines after `start_step`."""
    if not parallel.is_primary_process():
        return []
    resume_from = start_step if run.resume or run.resume_or_begin else None
    file = output / "metrics.jsonl"
    writers: list[metrics.MetricWriter] = [metrics.JsonLinesWriter(file, resume_from=resume_from)]
    if start_step >= run.log_every and not file.stat().st_size:
        print(f"{file} has no metrics of the first {start_step} steps.", file=sys.stderr)
    if run.tensorboard:
        folder = output / "tensorboard"
        writers.append(metrics.TensorBoardWriter(folder, resume_from=resume_from))
    if run.wandb is not None:
        writers.append(metrics.WandbWriter(run.wandb, output.name, description))
    return writers
