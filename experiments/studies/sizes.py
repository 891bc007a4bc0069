"""Base runs of studies: a plain Llama-like decoder at three sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxformer import data
from jaxformer.config import Embedding, Initialisation, LMHead, Normal, TransformerConfig
from jaxformer.run.models import qwen3_like
from jaxformer.run.pretraining import Pretrain
from jaxformer.training.optimizers import AdamW, Muon, Optimizer, OptimizerConfig
from jaxformer.training.schedules import Cosine


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


def study_run(
    model: TransformerConfig,
    *,
    steps: int,
    peak: float,
    length: int,
    batch_size: int,
    held_out: float = 0.05,
    optimizer: Optimizer | None = None,
    **other_fields: Any,
) -> Pretrain:
    """Run of a study: cosine schedule, warm-up of a tenth of the steps; AdamW if None."""
    schedule = Cosine(peak=peak, warmup_steps=max(1, steps // 10))
    return Pretrain(
        model=model,
        tokenizer=data.BPE(vocab_size=model.vocab_size),
        held_out=held_out,
        length=length,
        batch_size=batch_size,
        steps=steps,
        optimizer=OptimizerConfig(schedule=schedule, optimizer=optimizer or AdamW()),
        **other_fields,
    )


SMOKE = study_run(
    llama_like(model_dim=32, num_layers=2, num_heads=2, vocab_size=512),
    steps=20,
    peak=1e-2,
    length=32,
    batch_size=4,
    held_out=0.015,
)
GPU = study_run(
    llama_like(model_dim=768, num_layers=12, num_heads=12, vocab_size=16384),
    steps=400,  # about four epochs
    peak=1e-3,
    length=1024,
    batch_size=32,
    dtype="bfloat16",
)


def with_untied_head(run: Pretrain) -> Pretrain:
    """The run with an untied head, whose initial loss is ln(vocabulary size)."""
    return replace(run, model=replace(run.model, head=LMHead(tied=False)))


PLACEMENT_CPU = study_run(
    llama_like(model_dim=128, num_layers=4, num_heads=4, vocab_size=2048),
    steps=400,
    peak=5e-3,
    length=256,
    batch_size=8,
)
ABLATION_CPU = study_run(
    llama_like(model_dim=96, num_layers=4, num_heads=4, vocab_size=1024),
    steps=250,
    peak=5e-3,
    length=128,
    batch_size=16,
)
MIXER_CPU = study_run(
    llama_like(model_dim=64, num_layers=4, num_heads=2, vocab_size=512),
    steps=400,
    peak=2e-2,
    length=64,
    batch_size=16,
    optimizer=Muon(adamw_rate=0.25),  # attention learns no recall in so few steps of AdamW: LOG.md
)


def study_sizes(cpu: Pretrain) -> dict[str, Pretrain]:
    """Study runs by name; smoke and gpu are the same in all studies."""
    return {"smoke": SMOKE, "cpu": cpu, "untied": with_untied_head(cpu), "gpu": GPU}


PLACEMENT_SIZES: Mapping[str, Pretrain] = study_sizes(PLACEMENT_CPU)
ABLATION_SIZES: Mapping[str, Pretrain] = study_sizes(ABLATION_CPU)
MIXER_SIZES: Mapping[str, Pretrain] = study_sizes(MIXER_CPU)


def ablation_sizes(axis: str) -> Mapping[str, Pretrain]:
    """Sizes of an ablation; ablations of mixers are smaller, as each mixer is trained twice."""
    return MIXER_SIZES if axis == "mixer" else ABLATION_SIZES
