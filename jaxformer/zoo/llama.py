"""LLaMA, Llama 2 and Llama 3, and other models of the same architecture, such as Marin.

RoPE pairs the halves of a head, as in checkpoints of the transformers library; Meta's checkpoints
pair neighbours, with queries and keys permuted accordingly.
"""

from typing import NotRequired, TypedDict, Unpack

from jaxformer import config as c
from jaxformer.config.attention.multi_head import Projection


class AttentionOptions(TypedDict, total=False):
    """Options of `MultiHead` besides its sizes."""

    positions: tuple[c.Positions | None, ...]
    windows: tuple[c.Window, ...]
    scale: float
    logit_softcap: float
    clip_qkv: float
    qk_norm: c.QKNorm | None
    query_scaling: c.QueryScaling
    biases: tuple[Projection, ...]
    sinks: bool
    output_gate: c.OutputGate


class LlamaSizes(TypedDict):
    """Sizes of a Llama; by default with as many KV heads as heads, as wide in all as the model."""

    model_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: NotRequired[int]
    head_dim: NotRequired[int]
    hidden_dim: int


class LlamaOptions(LlamaSizes, AttentionOptions):
    """Sizes of a Llama, and options of its attention."""


def llama(
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden_dim: int,
    eps: float = 1e-5,
    base: float = 10_000.0,
    scaling: c.RopeScaling | None = None,
    tied: bool = False,
    **options: Unpack[AttentionOptions],
) -> c.TransformerConfig:
    """Llama: pre-norm with RMSNorm, RoPE, SwiGLU, no biases; `options` are of the attention.

    References:
        Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023.
        arXiv:2302.13971, section 2.2
        Touvron et al., Llama 2: Open Foundation and Fine-Tuned Chat Models, 2023. arXiv:2307.09288
        Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783, section 3.2
    """
    options.setdefault("positions", (c.Rope(base=base, scaling=scaling),))
    return c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_dim=head_dim or model_dim // num_heads,
            **options,
        ),
        feed_forward=(c.GLU(hidden_dim=hidden_dim),),
        norm=c.RMSNorm(eps=eps),
        head=c.LMHead(tied=tied),
    )


def llama_3(*, small: bool, scaling: c.RopeScaling | None = None) -> c.TransformerConfig:
    """Llama 3 or 3.1 at 8B or 70B; 3.1 scales RoPE."""
    sizes = (4096, 32, 32, 14_336) if small else (8192, 80, 64, 28_672)
    model_dim, num_layers, num_heads, hidden_dim = sizes
    return llama(
        vocab_size=128_256,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        hidden_dim=hidden_dim,
        base=500_000.0,
        scaling=scaling,
    )


def llama_7b(*, eps: float) -> c.TransformerConfig:
    """LLaMA 7B or Llama 2 7B, by eps."""
    return llama(
        vocab_size=32_000, model_dim=4096, num_layers=32, num_heads=32, hidden_dim=11_008, eps=eps
    )


LLAMA_3_1_SCALING = c.Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
)

PRESETS = {
    "llama-7b": llama_7b(eps=1e-6),
    "llama-13b": llama(
        vocab_size=32_000, model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_824, eps=1e-6
    ),
    "llama-65b": llama(
        vocab_size=32_000, model_dim=8192, num_layers=80, num_heads=64, hidden_dim=22_016
    ),
    "llama-2-7b": llama_7b(eps=1e-5),
    "llama-2-70b": llama(
        vocab_size=32_000,
        model_dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=28_672,
    ),
    "llama-3-8b": llama_3(small=True),
    "llama-3-70b": llama_3(small=False),
    "llama-3.1-8b": llama_3(small=True, scaling=LLAMA_3_1_SCALING),
    "llama-3.1-70b": llama_3(small=False, scaling=LLAMA_3_1_SCALING),
    "marin-8b": llama_3(small=True, scaling=LLAMA_3_1_SCALING),
    "deepseek-67b": llama(
        vocab_size=102_400,
        model_dim=8192,
        num_layers=95,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=22_016,
        eps=1e-6,
    ),
    "yi-34b": llama(
        vocab_size=64_000,
        model_dim=7168,
        num_layers=60,
        num_heads=56,
        num_kv_heads=8,
        hidden_dim=20_480,
        base=5_000_000.0,
    ),
    "reka-flash-3": llama(
        vocab_size=100_352,
        model_dim=6144,
        num_layers=44,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=19_648,
        base=8_000_000.0,
    ),
    "smollm2-1.7b": llama(
        vocab_size=49_152,
        model_dim=2048,
        num_layers=24,
        num_heads=32,
        hidden_dim=8192,
        base=130_000.0,
        tied=True,
    ),
}
