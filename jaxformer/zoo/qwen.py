"""Qwen to Qwen 2.5 (Llama with QKV biases), Qwen 3 (QK-norm instead of biases), Qwen 3 Next, 3.5.

Vocabularies are those of the released embeddings, padded to 152,064, since version 3 to 151,936.
Beyond its training length the first Qwen also scales RoPE and queries, which is not supported.
"""

from dataclasses import replace
from typing import Any, Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaSizes, llama
from jaxformer.zoo.projection_biases import QKV


def qwen(
    *, eps: float = 1e-6, base: float = 1_000_000.0, **sizes: Unpack[LlamaSizes]
) -> c.TransformerConfig:
    """Heads of 128, not tied at these sizes.

    References:
        Bai et al., Qwen Technical Report, 2023. arXiv:2309.16609, section 2.3
        Yang et al., Qwen2 Technical Report, 2024. arXiv:2407.10671, section 2.2
        Yang et al., Qwen2.5 Technical Report, 2024. arXiv:2412.15115, section 2
    """
    return llama(vocab_size=152_064, eps=eps, base=base, biases=QKV, **sizes)


def qwen_72b(*, eps: float) -> c.TransformerConfig:
    """The largest of versions 2 and 2.5."""
    return qwen(
        model_dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=29_568, eps=eps
    )


def qwen_1_5_moe() -> c.TransformerConfig:
    """60 small experts, of which each token meets 4, and one of four times their width with a gate.

    References:
        Qwen team, Qwen1.5-MoE: Matching 7B Model Performance with 1/3 Activated Parameters, 2024
    """
    body = qwen(model_dim=2048, num_layers=24, num_heads=16, hidden_dim=1408)
    experts = c.MoE(
        expert=c.GLU(hidden_dim=1408),
        num_experts=60,
        top_k=4,
        router=c.Router(renormalise=False),
        shared=c.SharedExpert(expert=c.GLU(hidden_dim=5632), gated=True),
    )
    return replace(body, vocab_size=151_936, feed_forward=(experts,))


def qwen_3(*, tied: bool = False, **sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """Heads of 128 whatever the width, normed before they turn; no biases; tied up to 4B.

    References:
        Yang et al., Qwen3 Technical Report, 2025. arXiv:2505.09388, section 2, table 1
    """
    sizes.setdefault("num_kv_heads", 8)
    sizes["head_dim"] = 128
    return llama(
        vocab_size=151_936, eps=1e-6, base=1_000_000.0, tied=tied, qk_norm=c.QKNorm(), **sizes
    )


def qwen_3_moe(**sizes: Unpack[LlamaSizes]) -> c.TransformerConfig:
    """128 experts in every layer, of which each token meets 8; 4 key-value heads.

    References:
        Yang et al., Qwen3 Technical Report, 2025. arXiv:2505.09388, section 2, table 2
    """
    sizes["num_kv_heads"] = 4
    body = qwen_3(**sizes)
    experts = c.MoE(expert=c.GLU(hidden_dim=sizes["hidden_dim"]), num_experts=128, top_k=8)
    return replace(body, feed_forward=(experts,))


def qwen_3_next(
    *, num_value_heads: int = 32, vocab_size: int = 248_320, **sizes: Unpack[LlamaSizes]
) -> c.TransformerConfig:
    """Three layers of gated DeltaNet for one of gated attention; norms multiply by 1 + scale.

    References:
        Qwen team, Qwen3-Next, 2025
        Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024. arXiv:2412.06464
        Qiu et al., Gated Attention for Large Language Models, 2025. arXiv:2505.06708
    """
    norm = c.RMSNorm(scale_offset=1.0)
    delta_net = c.LinearAttention(
        num_heads=num_value_heads,
        num_key_heads=16,
        key_dim=128,
        value_dim=128,
        output=c.GatedNorm(norm=c.RMSNorm()),
    )
    sizes["head_dim"] = 256
    body = llama(
        vocab_size=vocab_size,
        positions=(c.Rope(base=1e7, fraction=0.25),),
        qk_norm=c.QKNorm(norm=norm),
        output_gate=c.OutputGate(),
        **sizes,
    )
    attention: Any = body.attention
    return replace(body, attention=(delta_net, delta_net, delta_net, attention), norm=norm)


def qwen_3_next_moe(
    *, num_layers: int, num_experts: int, top_k: int, vocab_size: int = 248_320
) -> c.TransformerConfig:
    """Experts of 512 features in every layer, and a shared one with a gate."""
    expert = c.GLU(hidden_dim=512)
    shared = c.SharedExpert(expert=expert, gated=True)
    body = qwen_3_next(
        model_dim=2048,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=2,
        hidden_dim=expert.hidden_dim,
        vocab_size=vocab_size,
    )
    experts = c.MoE(expert=expert, num_experts=num_experts, top_k=top_k, shared=shared)
    return replace(body, feed_forward=(experts,))


PRESETS = {
    "qwen-14b": qwen(model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_696, base=10_000.0),
    "qwen-1.5-moe-a2.7b": qwen_1_5_moe(),
    "qwen-2-7b": qwen(
        model_dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, hidden_dim=18_944
    ),
    "qwen-2-72b": qwen_72b(eps=1e-5),
    "qwen-2.5-72b": qwen_72b(eps=1e-5),
    "qwen-3-0.6b": qwen_3(model_dim=1024, num_layers=28, num_heads=16, hidden_dim=3072, tied=True),
    "qwen-3-1.7b": qwen_3(model_dim=2048, num_layers=28, num_heads=16, hidden_dim=6144, tied=True),
    "qwen-3-4b": qwen_3(model_dim=2560, num_layers=36, num_heads=32, hidden_dim=9728, tied=True),
    "qwen-3-8b": qwen_3(model_dim=4096, num_layers=36, num_heads=32, hidden_dim=12_288),
    "qwen-3-14b": qwen_3(model_dim=5120, num_layers=40, num_heads=40, hidden_dim=17_408),
    "qwen-3-32b": qwen_3(model_dim=5120, num_layers=64, num_heads=64, hidden_dim=25_600),
    "qwen-3-30b-a3b": qwen_3_moe(model_dim=2048, num_layers=48, num_heads=32, hidden_dim=768),
    "qwen-3-235b-a22b": qwen_3_moe(model_dim=4096, num_layers=94, num_heads=64, hidden_dim=1536),
    "qwen-3-next-80b-a3b": qwen_3_next_moe(
        num_layers=48, num_experts=512, top_k=10, vocab_size=151_936
    ),
    "qwen-3.5-9b": qwen_3_next(
        model_dim=4096, num_layers=32, num_heads=16, num_kv_heads=4, hidden_dim=12_288
    ),
    "qwen-3.5-27b": qwen_3_next(
        model_dim=5120,
        num_layers=64,
        num_heads=24,
        num_kv_heads=4,
        num_value_heads=48,
        hidden_dim=17_408,
    ),
    "qwen-3.5-35b-a3b": qwen_3_next_moe(num_layers=40, num_experts=256, top_k=8),
}
YEARS = {"qwen-3-next-80b-a3b": 2025} | dict.fromkeys(
    ("qwen-3.5-9b", "qwen-3.5-27b", "qwen-3.5-35b-a3b"), 2026
)
