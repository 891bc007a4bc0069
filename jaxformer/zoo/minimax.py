"""MiniMax M2: 256 experts, half of each head rotated, QK-norm over the full width."""

from jaxformer.config import GLU, MoE, MultiHead, QKNorm, RMSNorm, Rope, Router, TransformerConfig


def minimax_m2() -> TransformerConfig:
    """Full attention in every layer, 8 of 256 experts by sigmoid and a selection bias.

    References:
        MiniMax, MiniMax-M2, 2025. huggingface.co/MiniMaxAI/MiniMax-M2
    """
    norm = RMSNorm(eps=1e-6)
    moe = MoE(
        expert=GLU(hidden_dim=1536),
        num_experts=256,
        top_k=8,
        router=Router(score="sigmoid", selection_bias=True),
    )
    return TransformerConfig(
        vocab_size=200_064,
        model_dim=3072,
        num_layers=62,
        attention=MultiHead(
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            positions=(Rope(base=5_000_000.0, fraction=0.5),),
            qk_norm=QKNorm(norm=norm, over="width"),
        ),
        feed_forward=(moe,),
        norm=norm,
    )


PRESETS = {"minimax-m2": minimax_m2()}
YEARS = dict.fromkeys(PRESETS, 2025)
