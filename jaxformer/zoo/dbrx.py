"""DBRX: 16 experts in every layer, LayerNorms without biases, clipped queries, keys and values."""

from jaxformer.config import GLU, LayerNorm, MoE, MultiHead, Rope, TransformerConfig


def dbrx() -> TransformerConfig:
    """Each token meets 4 experts.

    References:
        Databricks, Introducing DBRX: A New State-of-the-Art Open LLM, 2024
    """
    return TransformerConfig(
        vocab_size=100_352,
        model_dim=6144,
        num_layers=40,
        attention=MultiHead(
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            positions=(Rope(base=500_000.0),),
            clip_qkv=8.0,
        ),
        feed_forward=(MoE(expert=GLU(hidden_dim=10_752), num_experts=16, top_k=4),),
        norm=LayerNorm(parameters="scale"),
    )


PRESETS = {"dbrx": dbrx()}
