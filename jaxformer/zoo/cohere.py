"""Command R, R+ and A: parallel branches, one LayerNorm without bias, scaled tied logits."""

from jaxformer import config as c

NORM = c.LayerNorm(eps=1e-5, parameters="scale")


def cohere(
    *,
    model_dim: int,
    num_layers: int,
    num_kv_heads: int,
    hidden_dim: int,
    positions: tuple[c.Positions | None, ...],
    multiplier: float,
    windows: tuple[c.Window, ...] = (None,),
    qk_norm: c.QKNorm | None = None,
) -> c.TransformerConfig:
    """SwiGLU, heads of 128, no biases anywhere.

    References:
        Cohere, Command R: Retrieval Augmented Generation at Production Scale, 2024
        Cohere, Command A: An Enterprise-Ready Large Language Model, 2025. arXiv:2504.00698,
        section 2
    """
    return c.TransformerConfig(
        vocab_size=256_000,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=model_dim // 128,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            positions=positions,
            windows=windows,
            qk_norm=qk_norm,
        ),
        feed_forward=(c.GLU(hidden_dim=hidden_dim),),
        block="parallel_shared_norm",
        norm=NORM,
        head=c.LMHead(tied=True, multiplier=multiplier),
    )


def rope(base: float) -> c.Rope:
    """RoPE over neighbouring feature pairs."""
    return c.Rope(base=base, pairing="neighbours")


PRESETS = {
    "command-r": cohere(
        model_dim=8192,
        num_layers=40,
        num_kv_heads=64,
        hidden_dim=22_528,
        positions=(rope(8_000_000.0),),
        multiplier=0.0625,
    ),
    "command-r-plus": cohere(
        model_dim=12_288,
        num_layers=64,
        num_kv_heads=8,
        hidden_dim=33_792,
        positions=(rope(75_000_000.0),),
        multiplier=0.8333333333333334,
        qk_norm=c.QKNorm(norm=NORM, over="each_head"),
    ),
    "command-a": cohere(  # three narrow layers with rotations, then a wide one with no positions
        model_dim=12_288,
        num_layers=64,
        num_kv_heads=8,
        hidden_dim=36_864,
        positions=(*(rope(50_000.0),) * 3, None),
        multiplier=0.25,
        windows=(4096, 4096, 4096, None),
    ),
}
