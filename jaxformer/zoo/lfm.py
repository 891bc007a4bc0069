"""LFM 2.5: gated short convolutions in most layers, attention with QK-norm in the others."""

from jaxformer import config as c

ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)  # counted from 0


def lfm_2_5() -> c.TransformerConfig:
    """LFM 2.5 1.2B: 10 convolutions over 3 tokens, 6 layers with grouped queries, tied.

    References:
        Liquid AI, LFM2 Technical Report, 2025. arXiv:2511.23404, section 2
    """
    num_heads, head_dim = 32, 64
    norm = c.RMSNorm(eps=1e-5)
    convolution = c.ShortConvolution(num_heads=num_heads, head_dim=head_dim)
    attention = c.MultiHead(
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        positions=(c.Rope(base=1_000_000.0),),
        qk_norm=c.QKNorm(norm=norm, over="head"),
    )
    # The 16th layer is a convolution, as the first.
    kinds = (attention if i in ATTENTION_LAYERS else convolution for i in range(15))
    return c.TransformerConfig(
        vocab_size=65_536,
        model_dim=num_heads * head_dim,
        num_layers=16,
        attention=tuple(kinds),
        feed_forward=(c.GLU(hidden_dim=8192),),
        norm=norm,
        head=c.LMHead(tied=True),
    )


PRESETS = {"lfm-2.5-1.2b": lfm_2_5()}
YEARS = dict.fromkeys(PRESETS, 2026)
