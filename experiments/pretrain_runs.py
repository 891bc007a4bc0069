"""What a pretraining run is, and the named ones."""

from dataclasses import dataclass
from pathlib import Path

from experiments.training_run import Run
from jaxformer import data
from jaxformer.config import GLU, Decoder, Head, MultiHead, QKNorm, TransformerConfig
from jaxformer.training.optimizers import Muon, OptimizerConfig
from jaxformer.training.schedules import Cosine


@dataclass(frozen=True, kw_only=True)
class Pretrain(Run):
    """What to train, on what, for how long.

    Attributes:
        corpus: The text.
        tokenizer: How text becomes tokens; trained on the training text where it needs training.
        held_out: Share of the text that is kept for evaluation.
        length: Tokens of a row.
        cache: Folder for tokenised text.
        evaluate_rows: Held-out rows of an evaluation during the run; the last one reads all.
        prompt: Text that the sample at the end continues.
        sample_tokens: Length of that sample; None is no sample.
    """

    corpus: data.Corpus = data.StandardLibrary()
    tokenizer: data.TokenizerConfig = data.BPE(vocab_size=4096)
    held_out: float = 0.05
    length: int = 256
    batch_size: int = 8
    steps: int = 600
    schedule_steps: int = 600
    cache: Path = Path("runs/cache")
    evaluate_every: int = 100
    evaluate_rows: int = 64
    prompt: str = "def "
    sample_tokens: int | None = 160

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1; got {self.held_out}.")
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
