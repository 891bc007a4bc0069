"""ERNIE 4.5, the smallest: Llama with neighbouring features rotated together."""

from jaxformer.config import GLU, LMHead, MultiHead, RMSNorm, Rope, TransformerConfig


def ernie_4_5() -> TransformerConfig:
    """Heads twice as wide in all as the residual stream, 2 key-value heads, tied.

    References:
        Baidu ERNIE team, ERNIE 4.5 Technical Report, 2025
    """
    return TransformerConfig(
        vocab_size=103_424,
        model_dim=1024,
        num_layers=18,
        attention=MultiHead(
            num_heads=16,
            num_kv_heads=2,
            head_dim=128,
            positions=(Rope(base=500_000.0, pairing="neighbours"),),
        ),
        feed_forward=(GLU(hidden_dim=3072),),
        norm=RMSNorm(eps=1e-5),
        head=LMHead(tied=True),
    )


PRESETS = {"ernie-4.5-0.3b": ernie_4_5()}
YEARS = dict.fromkeys(PRESETS, 2025)
