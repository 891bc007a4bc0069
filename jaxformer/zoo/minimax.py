"""MiniMax M2: 256 experts, half of each head rotated, QK-norm over the full width."""

from jaxformer import config as c


def minimax_m2() -> c.TransformerConfig:
    """Full attention in every layer, 8 of 256 experts by sigmoid and a selection bias.

    References:
        MiniMax, MiniMax-M2, 2025. huggingface.co/MiniMaxAI/MiniMax-M2
    """
    norm = c.RMSNorm(eps=1e-6)
    moe = c.MoE(
        expert=c.GLU(hidden_dim=1536),
        num_experts=256,
        top_k=8,
        router=c.Router(score="sigmoid", selection_bias=True),
    )
    return c.TransformerConfig(
        vocab_size=200_064,
        model_dim=3072,
        num_layers=62,
        attention=c.MultiHead(
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            positions=(c.Rope(base=5_000_000.0, fraction=0.5),),
            qk_norm=c.QKNorm(norm=norm, over="width"),
        ),
        feed_forward=(moe,),
        norm=norm,
    )


PRESETS = {"minimax-m2": minimax_m2()}
YEARS = dict.fromkeys(PRESETS, 2025)
