"""Train a model to prefer some answers to others (direct preference optimization, DPO).

    jaxformer dpo --init path/to/folder --pairs pairs.jsonl
    jaxformer dpo --init runs/finetune-1 --pairs pairs.jsonl --objective.beta 0.3
    jaxformer dpo --init path/to/folder --pairs pairs.jsonl --model.adapter 'LoRA()'
    jaxformer dpo --resume                              # resume the newest run

Each line of the pairs is {"prompt": "...", "chosen": "...", "rejected": "..."}; all three may be
lists of messages, and both answers may begin with the prompt instead. The reference is the model of
--init. Its log-likelihoods of all answers are computed once, before the first update, and kept in
--output, so that no device holds two models.
Signals are handled as in `jaxformer pretrain`.
"""

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxformer import data
from jaxformer.checks import Positive, Size
from jaxformer.config import TransformerConfig
from jaxformer.errors import naming_fields
from jaxformer.json_files import json_digest
from jaxformer.parallel import is_primary_process, num_batch_shards, put_batch
from jaxformer.run.beginning import begin, tuned_run
from jaxformer.run.command_line import run_program
from jaxformer.run.models import adamw_config
from jaxformer.run.output_folder import own_chat_template, own_tokenizer
from jaxformer.run.pretraining import Pretrain, template_file
from jaxformer.run.program import train
from jaxformer.run.recorder import Evaluation, Recorder, TrainData, TrainResult
from jaxformer.run.run_config import (
    EpochsConfig,
    FromData,
    HeldOut,
    check_rows,
    context_length,
    fitting_batch_size,
    fitting_length,
)
from jaxformer.run.train_setup import TrainSetup
from jaxformer.training.gradient import DPO
from jaxformer.training.optimizers import OptimizerConfig
from jaxformer.training.train_step import make_log_likelihood_step

REFERENCE_FILE = "reference.npz"


@dataclass(frozen=True, kw_only=True)
class Dpo(EpochsConfig):
    """Options of preference training: pairs of answers, row length, epochs, evaluation.

    Attributes:
        pairs: File of pairs: JSON Lines, Parquet or Arrow, with prompt, chosen and rejected.
        objective: `beta`, and the losses of routers.
        chat_template: Chat template, instead of the tokenizer's folder's: a Jinja file, or
            "chatml". It is saved with the run.
        held_out: Fraction of the pairs that is held out for evaluation, with all pairs of a prompt.
        length: Row length in tokens, of a prompt with one answer; None is the longest one's length,
            at most 512.
        batch_size: Rows of a batch, over all devices: two for each pair. None is 16, or fewer for
            ten updates an epoch.
        steps: Total number of training steps, instead of --epochs.
        cache: Folder for tokenized pairs.
        evaluate_pairs: Held-out pairs of an evaluation during training; the final one uses all.
    """

    model: TransformerConfig = Pretrain.model  # replaced by the model of --init
    tokenizer: data.TokenizerConfig = Pretrain.tokenizer  # likewise
    optimizer: OptimizerConfig = adamw_config(peak=1e-6)
    TOPIC: ClassVar = "data"
    FIRST_PAGE: ClassVar[tuple[str, ...]] = (
        *("init", "pairs", "objective.beta", "epochs", "batch_size", "length", "learning_rate"),
        *("model.adapter", "chat_template", "dtype", "output", "resume"),
    )

    pairs: Path | None = None
    objective: DPO = DPO()
    chat_template: str | None = None
    held_out: HeldOut = 0.05
    length: FromData = None  # type: ignore[assignment]
    batch_size: FromData = None  # type: ignore[assignment]
    steps: FromData = None  # type: ignore[assignment]
    epochs: Positive | None = 1.0
    cache: Path = Path("runs/cache")
    evaluate_every: Size = 50
    evaluate_pairs: Size = 128
    save_every: Size = 100

    def __post_init__(self):
        super().__post_init__()
        check_rows(self, "DPO")

    def largest(self) -> "Dpo":
        """The run with a row length and a batch size for many pairs."""
        length = self.length or min(512, context_length(self.model) or 512)
        return replace(self, length=length, batch_size=self.batch_size or 16)

    def tuned(self) -> "Dpo":
        return tuned_run(self)


RUNS = {"default": Dpo()}


@naming_fields()
def dpo(run: Dpo) -> Path:
    """Train a model to prefer some answers to others, and evaluate it on held-out pairs.

        from jaxformer import run
        folder = run.dpo(run.Dpo(init="runs/finetune-1", pairs="pairs.jsonl"))
        run.export(run.Export(checkpoint=folder, output="mine"))

    The model and the tokenizer are those of `init`, and the learning rate suits its width, unless
    the run has others.

    Args:
        run: Options of the run.

    Returns:
        The output folder, with checkpoints, metrics and the tokenizer.

    Raises:
        ValueError: There is no `init` or no file of pairs; or the options do not fit each other,
            the pairs or this machine.
    """
    return train_on_pairs(begin(run, RUNS))


def train_on_pairs(run: Dpo) -> Path:
    """The course of a run on pairs: train and evaluate; returns the output folder."""
    if not run.resume and (run.init is None or run.pairs is None):
        raise ValueError("DPO needs a model and pairs of answers: pass --init FOLDER --pairs FILE.")
    return train(run, RUNS, PreferenceData, length=run.largest().length)


def main(arguments: list[str] | None = None) -> None:
    """Train on preferences by the command line."""
    run_program(train_on_pairs, RUNS, __doc__, arguments)


def check_pairs_divide(run: Dpo, num_shards: int) -> None:
    """Raise if a device would not have both rows of a pair in each microbatch."""
    unit = 2 * num_shards * run.gradient_accumulation_steps
    if run.batch_size % unit:
        raise ValueError(
            f"batch_size {run.batch_size} must be a multiple of {unit}: 2 rows of a pair x "
            f"{num_shards} shards of the batch x gradient_accumulation_steps "
            f"{run.gradient_accumulation_steps}."
        )


def prepare_pairs(
    run: Dpo, tokenizer: data.Tokenizer, template: data.ChatTemplate | None
) -> data.Preferences:
    """Read and tokenize the pairs, or open the pairs of an earlier run."""
    assert run.pairs is not None
    if template is None:
        print(
            "Without a chat template, prompt and answer are joined as they are; for --chat, pass "
            "--chat-template."
        )
    pairs = data.read_preferences(
        run.pairs, tokenizer, template=template, row_length=run.length, folder=run.cache
    )
    if pairs.left_out_text:
        print(f"Pairs that are left out: {pairs.left_out_text}.")
    if pairs.num_truncated:
        print(
            f"{pairs.num_truncated} of {2 * len(pairs)} answers are longer than a row of "
            f"{run.length} tokens and are truncated."
        )
    return pairs


class PreferenceData(TrainData):
    """Pairs of answers to train on, and accuracy and margin of the held-out ones."""

    def __init__(self, run: Dpo, setup: TrainSetup):
        """Prepare pairs and batches; `prepare` adds what the reference, `run.init`, computes."""
        resumes_from, self._mesh = setup.resumes_from, setup.mesh
        self._template = own_chat_template(run, resumes_from)
        self._file, shards = setup.local_folder / REFERENCE_FILE, num_batch_shards(setup.mesh.shape)
        check_pairs_divide(run.largest(), shards)
        self.tokenizer = data.build_tokenizer(own_tokenizer(run, resumes_from), ())
        pairs = prepare_pairs(run.largest(), self.tokenizer, self._template)
        train, self._held_out = pairs.split(run.held_out)
        length, batch_size = run.length, run.batch_size
        if length is None:
            longest = np.diff(pairs.ends, prepend=0).max() - 1
            length = fitting_length(int(longest), pairs.row_length)
        if batch_size is None:
            unit = 2 * shards * run.gradient_accumulation_steps
            batch_size = fitting_batch_size(run, 2 * len(train), unit)
        self.fitted = {"length": length, "batch_size": batch_size}
        self._run, self.sequence_length = replace(run, **self.fitted), length
        self._pairs = pairs = replace(pairs, row_length=length)
        print(f"Pairs: {len(train):,} to train on, {len(self._held_out):,} held out.", flush=True)
        self.rows_per_epoch = 2 * len(train)
        self._reference = np.zeros(len(pairs.tokens), np.float32)
        self._batches = data.PreferenceBatches(
            pairs, self._reference, train, num_pairs=batch_size // 2, seed=run.seed
        )
        self._log_likelihoods = make_log_likelihood_step(setup.model, setup.mesh)

    def get_batch(self, step: int) -> data.PreferenceBatch:
        """The sharded batch of step `step` + 1."""
        return put_batch(self._batches[step], self._mesh, self._run.batch_size // 2)

    def fingerprint(self) -> dict[str, Any]:
        """Digest of the pairs."""
        return {"data": {"pairs": self._pairs.digest}}

    def files(self) -> dict[str, str]:
        """The chat template of --chat-template, if it is set."""
        return template_file(self._run, self._template)

    def prepare(self, step: int, params: Any) -> None:
        """Compute the log-likelihoods of the reference, or read them from a resumed run.

        Raises:
            ValueError: The folder of a resumed run has none of this model and these pairs.
        """
        key = json_digest([str(self._run.init), self._pairs.digest])
        has_loss = self._pairs.loss_mask
        if step == 0:
            self._reference[has_loss] = self._reference_of(params)
            if is_primary_process():
                np.savez(self._file, key=key, values=self._reference[has_loss])
            return
        try:
            with open(self._file, "rb") as file, np.load(file) as saved:
                if str(saved["key"]) != key:
                    raise ValueError("they are of other weights or pairs")
                self._reference[has_loss] = saved["values"]
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self._file} must have the log-likelihoods of the model that the run began with "
                f"({error}). Restore the file, or start a new run."
            ) from error

    def _reference_of(self, params: Any) -> np.ndarray:
        """Log-likelihood of each token with loss, in the order of the rows."""
        size, count, values = self._run.batch_size, 2 * len(self._pairs), list[np.ndarray]()
        print(f"Log-likelihoods of {count:,} answers under the reference.", flush=True)
        for first in range(0, count, size):
            numbers = np.minimum(np.arange(first, first + size), count - 1)
            rows = self._pairs.rows(numbers)
            log_p, is_new = self._score(params, rows), np.arange(first, first + size) < count
            values.append(log_p[rows.loss_mask & is_new[:, None]])
        return np.concatenate(values)

    def _score(self, params: Any, rows: data.Batch) -> np.ndarray:
        sharded = put_batch(rows, self._mesh, self._run.batch_size)
        return np.asarray(self._log_likelihoods(params, sharded))

    def evaluate(self, step: int, params: Any, recorder: Recorder, *, final: bool) -> Evaluation:
        """Loss, accuracy and margin of some held-out pairs; `final` ones of all."""
        numbers, beta = self._held_out, self._run.objective.beta
        if not final and self._run.evaluate_pairs < len(numbers):
            sample = np.linspace(0, len(numbers) - 1, self._run.evaluate_pairs)
            numbers = numbers[sample.astype(int)]
        margins = beta * self._log_ratios(params, numbers)
        means = {
            "loss": np.logaddexp(0, -margins).mean(),
            "accuracy": (margins > 0).mean(),
            "margin": margins.mean(),
        }
        shown = ", ".join(f"{name} {value:.4f}" for name, value in means.items())
        if not final:  # `report` prints the final ones
            pairs = f"{len(numbers):,} held-out pair{'s' * (len(numbers) > 1)}"
            recorder.progress.print(f"step {step:,}: {shown} of {pairs}")
        name = "final_held_out" if final else "held_out"
        metrics = {f"{name}_{x}": float(value) for x, value in means.items()}
        return Evaluation(metrics, loss=float(means["loss"]))

    def report(self, result: TrainResult | None) -> None:
        """Print accuracy and margin of the held-out pairs."""
        if result is not None:
            accuracy, margin = (result[1][f"final_held_out_{x}"] for x in ("accuracy", "margin"))
            print(f"\nHeld-out pairs: accuracy {accuracy:.1%}, mean margin {margin:.4f}.")

    def _log_ratios(self, params: Any, numbers: np.ndarray) -> np.ndarray:
        """Log-ratio to the reference of each chosen answer, less the rejected one's log-ratio."""
        size, ratios = self._run.batch_size, list[np.ndarray]()
        for first in range(0, len(numbers), size):
            places = np.minimum(np.arange(first, first + size), len(numbers) - 1)
            batch = self._pairs.batch(numbers[places], self._reference)
            chosen, rejected = (
                np.sum(self._score(params, rows) - reference, axis=-1, dtype=np.float64)
                for rows, reference in (
                    (batch.chosen, batch.chosen_reference),
                    (batch.rejected, batch.rejected_reference),
                )
            )
            ratios.append(np.asarray(chosen - rejected))
        return np.concatenate(ratios)[: len(numbers)]
