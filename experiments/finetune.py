"""Fine-tune an existing model on your own text or instructions.

    python -m experiments.finetune --init Qwen/Qwen3-0.6B --corpus my.txt
    python -m experiments.finetune --init path/to/folder --corpus my/texts --epochs 2
    python -m experiments.finetune --init runs/pretrain-1 --corpus my.txt

This is `experiments.pretrain` with other defaults: the model and the tokenizer are those of --init,
AdamW has a learning rate for pretrained weights, and --epochs sets the length of the run.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments import pretrain
from experiments.training.program import run_program
from jaxformer.training.optimizers import AdamW, OptimizerConfig
from jaxformer.training.schedules import Cosine


@dataclass(frozen=True, kw_only=True)
class Finetune(pretrain.Pretrain):
    """Options of fine-tuning: a pretrained model and the text to train it on."""

    epochs: float | None = 1.0
    length: int = 512
    evaluate_every: int = 50
    save_every: int = 100
    prompt: str = ""


def main(run: Finetune) -> Path:
    """Fine-tune the model that --init names; returns the output folder."""
    if run.init is None:
        raise ValueError("Fine-tuning needs a pretrained model: pass --init FOLDER.")
    return pretrain.main(run, RUNS)


RUNS = {
    "default": Finetune(
        model=pretrain.RUNS["default"].model,  # replaced by that of --init
        optimizer=OptimizerConfig(
            schedule=Cosine(peak=2e-5, warmup_steps=20), optimizer=AdamW(weight_decay=0.0)
        ),
    )
}

if __name__ == "__main__":
    run_program(main, RUNS, __doc__)
