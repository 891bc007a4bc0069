"""Fine-tune an existing model on your own text or instructions.

    python -m experiments.finetune --init Qwen/Qwen3-0.6B --corpus my.txt
    python -m experiments.finetune --init path/to/folder --corpus my/texts --epochs 2
    python -m experiments.finetune --init runs/pretrain-1 --corpus my.txt

This is `experiments.pretrain` with other defaults: the model and the tokenizer come from --init,
AdamW has a learning rate for pretrained weights, and --epochs sets the length of the run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from experiments import pretrain
from experiments.training.program import run_program, tuned_run
from experiments.training.run_config import FromData, context_length
from jaxformer.checks import Positive, Size
from jaxformer.training.optimizers import AdamW, OptimizerConfig
from jaxformer.training.schedules import Cosine

LENGTH = 512  # of the rows of a large corpus


@dataclass(frozen=True, kw_only=True)
class Finetune(pretrain.Pretrain):
    """Options of fine-tuning: a pretrained model and the text to train it on.

    Attributes:
        length: Row length in tokens; None is 512, or what fits a small corpus: its longest
            instruction, or text in ten rows.
        batch_size: Rows of a batch, over all devices; None is 8, or fewer for ten updates an epoch.
        steps: Total number of training steps, instead of --epochs.
    """

    FIRST_PAGE: ClassVar[tuple[str, ...]] = (
        *("init", "corpus", "epochs", "batch_size", "length", "learning_rate", "model.adapter"),
        *("dtype", "prompt", "output", "resume"),
    )

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

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sample; the rows of a small corpus are shorter."""
        return context_length(self.model) or max(LENGTH, self.length or 0)


def main(run: Finetune) -> Path:
    """Fine-tune the model that --init names; returns the output folder."""
    if run.init is None:
        raise ValueError("Fine-tuning needs a pretrained model: pass --init FOLDER.")
    return pretrain.main(run, RUNS)


RUNS = {
    "default": Finetune(
        model=pretrain.RUNS["default"].model,  # replaced by the model of --init
        optimizer=OptimizerConfig(
            schedule=Cosine(peak=2e-5, warmup_steps=20), optimizer=AdamW(weight_decay=0.0)
        ),
    )
}

if __name__ == "__main__":
    run_program(main, RUNS, __doc__, tuned_run)
