"""Falcon and Falcon 2: parallel branches, GELU, few KV heads, no biases of linear layers."""

from dataclasses import replace
from typing import Literal, Unpack

from jaxformer import config as c
from jaxformer.zoo.llama import LlamaOptions, llama


def falcon(
    *,
    block: Literal["parallel", "parallel_shared_norm"] = "parallel_shared_norm",
    tied: bool = True,
    **options: Unpack[LlamaOptions],
) -> c.TransformerConfig:
    """One norm for both branches, but for the 40B model, which has two.

    References:
        Almazrouei et al., The Falcon Series of Open Language Models, 2023. arXiv:2311.16867
        Malartic et al., Falcon2-11B Technical Report, 2024. arXiv:2407.14885, section 2
    """
    return replace(
        llama(vocab_size=65_024, tied=tied, **options),
        feed_forward=(c.MLP(hidden_dim=options["hidden_dim"], activation="gelu"),),
        block=block,
        norm=c.LayerNorm(),
    )


PRESETS = {
    "falcon-7b": falcon(
        model_dim=4544, num_layers=32, num_heads=71, num_kv_heads=1, hidden_dim=18_176
    ),
    "falcon-40b": falcon(
        model_dim=8192,
        num_layers=60,
        num_heads=128,
        num_kv_heads=8,
        hidden_dim=32_768,
        block="parallel",
    ),
    "falcon-2-11b": falcon(
        model_dim=4096,
        num_layers=60,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=16_384,
        positions=(c.Rope(base=500_042.0),),
        tied=False,
    ),
}
YEARS = {"falcon-7b": 2023, "falcon-40b": 2023}
