"""Small decoders of the named runs and of the studies, and the optimizer of the named runs."""

from dataclasses import replace
from typing import Any

from jaxformer.config import (
    GLU,
    Embedding,
    Initialisation,
    LMHead,
    MultiHead,
    Normal,
    QKNorm,
    TransformerConfig,
)
from jaxformer.training.optimizers import Muon, OptimizerConfig
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


def llama_like(
    *, model_dim: int, num_layers: int, num_heads: int, vocab_size: int
) -> TransformerConfig:
    """Llama-like decoder: pre-norm RMSNorm, RoPE, SwiGLU, tied embeddings.

    Embeddings are initialized with std model_dim ** -0.5 and scaled by model_dim ** 0.5, as in
    Attention Is All You Need, so that they are as large as the first outputs of the branches. With
    std 0.02 and no scale the output of the first attention is ten times as large as the embeddings
    and hides them from later layers: see LOG.md. Initial logits have variance 1, except the logit
    of the input token, which the tied table raises by up to model_dim ** 0.5: the initial loss is
    above ln(vocabulary size), by less if the branches are larger.
    """
    model = qwen3_like(
        model_dim=model_dim, num_layers=num_layers, num_heads=num_heads, vocab_size=vocab_size
    )
    attention: Any = model.attention
    return replace(
        model,
        attention=replace(attention, qk_norm=None),
        embedding=Embedding(scale=model_dim**0.5),
        initialisation=Initialisation(embedding=Normal(std=model_dim**-0.5)),
    )


def muon_config(*, warmup_steps: int) -> OptimizerConfig:
    """Muon with a cosine schedule, the optimizer of all named runs."""
    return OptimizerConfig(
        schedule=Cosine(peak=0.02, warmup_steps=warmup_steps), optimizer=Muon(adamw_rate=0.15)
    )
