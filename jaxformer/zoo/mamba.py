"""Mamba 2, without attention or feed-forward networks; Bamba, which has both."""

from jaxformer import config as c

NORM = c.RMSNorm(eps=1e-5)


def mamba_2_layer(
    *, num_heads: int, num_groups: int = 1, min_step: float = 0.0
) -> c.LinearAttention:
    """A Mamba 2 layer with heads of 64, a state of 128 and biases of the convolution.

    References:
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060, section 7
    """
    return c.LinearAttention(
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=128,
        value_dim=64,
        decay=c.StepDecay(min_step=min_step),
        delta_rule=False,
        beta="step",
        unit_vectors=False,
        scale=1.0,
        skip=True,
        output=c.GatedNorm(norm=NORM, over="group", placement="before_norm"),
        biases=("convolution",),
    )


def mamba_2() -> c.TransformerConfig:
    """Mamba 2 2.7B: 64 layers, tied.

    References:
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060, table 10
    """
    return c.TransformerConfig(
        vocab_size=50_288,
        model_dim=2560,
        num_layers=64,
        attention=mamba_2_layer(num_heads=80),
        feed_forward=(c.NoFeedForward(),),
        norm=NORM,
        head=c.LMHead(tied=True),
    )


def bamba() -> c.TransformerConfig:
    """Bamba 9B: attention in 3 of 32 layers, with RoPE on half of each head.

    References:
        IBM, Princeton, CMU and UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model, 2024
    """
    attention = c.MultiHead(
        num_heads=32, num_kv_heads=8, head_dim=128, positions=(c.Rope(fraction=0.5),)
    )
    mamba = mamba_2_layer(num_heads=128)
    # The layers after the 28th are Mamba 2, as the first.
    kinds = (attention if i in (9, 18, 27) else mamba for i in range(28))
    return c.TransformerConfig(
        vocab_size=128_256,
        model_dim=4096,
        num_layers=32,
        attention=tuple(kinds),
        feed_forward=(c.GLU(hidden_dim=14_336),),
        norm=NORM,
    )


PRESETS = {"mamba-2-2.7b": mamba_2(), "bamba-9b": bamba()}
YEARS = dict.fromkeys(PRESETS, 2024)
