"""Fine-tune an existing model on your own text or instructions.

    jaxformer finetune --init Qwen/Qwen3-0.6B --corpus my.txt
    jaxformer finetune --init path/to/folder --corpus 'Instructions(path="mine.jsonl")' --epochs 2
    jaxformer finetune --init runs/pretrain-1 --corpus my.txt

This is pretraining with other defaults: the model and the tokenizer come from --init, AdamW has a
learning rate for pretrained weights, and --epochs sets the length of the run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from jaxformer.checks import Positive, Size
from jaxformer.errors import naming_fields
from jaxformer.run.beginning import begin, tuned_run
from jaxformer.run.command_line import run_program
from jaxformer.run.models import adamw_config
from jaxformer.run.pretraining import Pretrain, train_on_text
from jaxformer.run.run_config import FromData, context_length
from jaxformer.training.optimizers import OptimizerConfig

LENGTH = 512  # of the rows of a large corpus


@dataclass(frozen=True, kw_only=True)
class Finetune(Pretrain):
    """Options of fine-tuning: a pretrained model and the text to train it on.

    Attributes:
        length: Row length in tokens; None is 512, or what fits a small corpus: its longest
            instruction, or text in ten rows.
        batch_size: Rows of a batch, over all devices; None is 8, or fewer for ten updates an epoch.
        steps: Total number of training steps, instead of --epochs.
    """

    FIRST_PAGE: ClassVar[tuple[str, ...]] = (
        *("init", "corpus", "epochs", "batch_size", "length", "learning_rate", "model.adapter"),
        *("chat_template", "dtype", "prompt", "output", "resume"),
    )

    optimizer: OptimizerConfig = adamw_config(peak=2e-5)
    epochs: Positive | None = 1.0
    length: FromData = None  # type: ignore[assignment]
    batch_size: FromData = None  # type: ignore[assignment]
    steps: FromData = None  # type: ignore[assignment]
    evaluate_every: Size = 50
    save_every: Size = 100
    prompt: str = ""

    def largest(self) -> "Finetune":
        """The run with a row length and a batch size for a large corpus."""
        length = self.length or min(LENGTH, context_length(self.model) or LENGTH)
        return replace(self, length=length, batch_size=self.batch_size or 8)

    def tuned(self) -> "Finetune":
        return tuned_run(self)

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sample; the rows of a small corpus are shorter."""
        return context_length(self.model) or max(LENGTH, self.length or 0)


RUNS = {"default": Finetune()}  # the model is replaced by the model of --init


@naming_fields()
def finetune(run: Finetune) -> Path:
    """Train a pretrained model on text or instructions, evaluate it, and print a sample.

        from jaxformer import data, run
        text = data.Instructions(path="mine.jsonl")
        folder = run.finetune(run.Finetune(init="Qwen/Qwen3-0.6B", corpus=text, epochs=2))

    The model and the tokenizer are those of `init`, and the learning rate suits its width, unless
    the run has others.

    Args:
        run: Options of the run.

    Returns:
        The output folder, with checkpoints, metrics and the tokenizer.

    Raises:
        ValueError: There is no `init`; or the options do not fit each other, the text or this
            machine.
    """
    return train_pretrained(begin(run, RUNS))


def train_pretrained(run: Finetune) -> Path:
    """The course of fine-tuning; returns the output folder."""
    if run.init is None and not run.resume:  # without a checkpoint, resuming says so
        raise ValueError("Fine-tuning needs a pretrained model: pass --init FOLDER.")
    return train_on_text(run, RUNS)


def main(arguments: list[str] | None = None) -> None:
    """Fine-tune by the command line."""
    run_program(train_pretrained, RUNS, __doc__, arguments)
