"""Small decoders and the optimizers of the named runs."""

from jaxformer.config import GLU, LMHead, MultiHead, QKNorm, TransformerConfig
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig
from jaxformer.training.schedules import Cosine


def qwen3_like(
    *, model_dim: int, num_layers: int, num_heads: int, vocab_size: int
) -> TransformerConfig:
    """A small Qwen3-like decoder: RoPE, RMSNorm, SwiGLU, QK-norm, tied embeddings."""
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
        head=LMHead(tied=True),
    )


def muon_config(*, warmup_steps: int) -> OptimizerConfig:
    """Muon with a cosine schedule, to train from random weights."""
    return OptimizerConfig(
        schedule=Cosine(peak=0.02, warmup_steps=warmup_steps), optimizer=Muon(adamw_rate=0.15)
    )


def adamw_config(*, peak: float) -> OptimizerConfig:
    """AdamW with a cosine schedule, to train pretrained weights."""
    schedule = Cosine(peak=peak, warmup_steps=20)
    return OptimizerConfig(schedule=schedule, optimizer=AdamW(weight_decay=0.0))
