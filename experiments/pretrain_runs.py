"""What a pretraining run is, and the named ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxformer import data
from jaxformer.config import GLU, Decoder, Head, MultiHead, QKNorm, TransformerConfig
from jaxformer.layers.mode import Remat
from jaxformer.training import step
from jaxformer.training.optimizers import Muon, OptimizerConfig
from jaxformer.training.schedules import Cosine


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """What to train, on what, for how long.

    Attributes:
        model: The model.
        corpus: The text.
        tokenizer: How text becomes tokens; trained on the training text where it needs training.
        held_out: Share of the text that is kept for evaluation.
        length: Tokens of a row.
        batch_size: Rows of a batch, over all devices.
        accumulation: In how many parts a batch is worked through, to save memory.
        steps: Stop after this many updates, counted from the start of the run.
        schedule_steps: Updates that the learning-rate schedule is planned for. It does not follow
            --steps, so that a run can stop early and be resumed without another result.
        optimizer: How gradients become updates.
        objective: Terms of the loss beside the cross-entropy.
        dtype: Of the computation; parameters are float32.
        remat: What the backward pass recomputes to save memory.
        scan: Run layers as one compiled loop (compiles fast) or unrolled (runs faster on a CPU).
        devices: How many devices to use; None is all. On a CPU, how many to simulate.
        seed: Of parameters, batches, dropout and the sample.
        output: Folder for checkpoints, metrics and the tokenizer; None is runs/pretrain-N, a new
            one, or with --resume the newest.
        cache: Folder for tokenised text.
        resume: Go on from the newest checkpoint in the output folder.
        log_every: Updates between lines in the metrics.
        evaluate_every: Updates between evaluations.
        evaluate_rows: Held-out rows of an evaluation during the run; the last one reads all.
        save_every: Updates between checkpoints; the last update is always saved.
        keep: How many of the newest checkpoints to keep, beside the best.
        tensorboard: Whether to write TensorBoard files.
        wandb: Project to log to at Weights and Biases.
        prompt: Text that the sample at the end continues.
        sample_tokens: Length of that sample.
    """

    model: TransformerConfig
    corpus: data.Corpus = data.StandardLibrary()
    tokenizer: data.TokenizerConfig = data.BPE(vocab_size=4096)
    held_out: float = 0.05
    length: int = 256
    batch_size: int = 8
    accumulation: int = 1
    steps: int = 600
    schedule_steps: int = 600
    optimizer: OptimizerConfig
    objective: step.Objective = step.Objective()
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "none"
    scan: bool = False
    devices: int | None = None
    seed: int = 0
    output: Path | None = None
    cache: Path = Path("runs/cache")
    resume: bool = False
    log_every: int = 10
    evaluate_every: int = 100
    evaluate_rows: int = 64
    save_every: int = 200
    keep: int = 3
    tensorboard: bool = True
    wandb: str | None = None
    prompt: str = "def "
    sample_tokens: int = 160

    def __post_init__(self):
        for name in ("length", "batch_size", "accumulation", "steps", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("evaluate_every", "evaluate_rows", "save_every", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie between 0 and {2**32 - 1}; got {self.seed}.")
        longest = self.model.max_length
        if longest is not None and self.length > longest:
            raise ValueError(
                f"length {self.length} exceeds the model's {longest} learned positions."
            )
        if not isinstance(self.model.topology, Decoder):
            raise ValueError(f"Pretraining on text takes a Decoder; got {self.model.topology}.")


def llama(*, model_dim: int, num_layers: int, num_heads: int, vocab_size: int) -> TransformerConfig:
    """A small decoder of today's common design: RoPE, RMSNorm, SwiGLU, QK-norm, tied head."""
    return TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            qk_norm=QKNorm(),
        ),
        feed_forward=(GLU(hidden_dim=8 * model_dim // 3 // 32 * 32),),
        head=Head(tied=True),
    )


def muon(*, warmup_steps: int) -> OptimizerConfig:
    """The recipe of all runs: Muon under a cosine."""
    return OptimizerConfig(
        schedule=Cosine(peak=0.02, warmup_steps=warmup_steps), optimizer=Muon(adamw_rate=0.15)
    )


RUNS = {
    "default": Pretrain(
        model=llama(model_dim=192, num_layers=4, num_heads=4, vocab_size=4096),
        optimizer=muon(warmup_steps=20),
    ),
    "tiny": Pretrain(
        model=llama(model_dim=64, num_layers=2, num_heads=4, vocab_size=512),
        tokenizer=data.BPE(vocab_size=512),
        length=64,
        steps=20,
        schedule_steps=20,
        evaluate_every=10,
        save_every=10,
        optimizer=muon(warmup_steps=2),
    ),
    "small": Pretrain(
        model=llama(model_dim=768, num_layers=12, num_heads=12, vocab_size=32768),
        tokenizer=data.BPE(vocab_size=32768),
        length=1024,
        batch_size=64,
        steps=10_000,
        schedule_steps=10_000,
        evaluate_every=500,
        evaluate_rows=256,
        save_every=1000,
        dtype="bfloat16",
        remat="dots",
        scan=True,
        optimizer=muon(warmup_steps=200),
    ),
}
