"""Falcon and Falcon 2: parallel branches, GELU, few KV heads, no biases of linear layers."""

from typing import Literal

from jaxformer import config as c


def falcon(
    *,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block: Literal["parallel", "parallel_shared_norm"] = "parallel_shared_norm",
    base: float = 10_000.0,
    tied: bool = True,
) -> c.TransformerConfig:
    """One norm for both branches, but for the 40B model, which has two.

    References:
        Almazrouei et al., The Falcon Series of Open Language Models, 2023. arXiv:2311.16867
        Malartic et al., Falcon2-11B Technical Report, 2024. arXiv:2407.14885, section 2
    """
    return c.TransformerConfig(
        vocab_size=65_024,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            positions=(c.Rope(base=base),),
        ),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="gelu"),),
        block=block,
        norm=c.LayerNorm(),
        head=c.LMHead(tied=tied),
    )


PRESETS = {
    "falcon-7b": falcon(model_dim=4544, num_layers=32, num_heads=71, num_kv_heads=1, head_dim=64),
    "falcon-40b": falcon(
        model_dim=8192, num_layers=60, num_heads=128, num_kv_heads=8, head_dim=64, block="parallel"
    ),
    "falcon-2-11b": falcon(
        model_dim=4096,
        num_layers=60,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        base=500_042.0,
        tied=False,
    ),
}
YEARS = {"falcon-7b": 2023, "falcon-40b": 2023}
