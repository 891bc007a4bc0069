"""DBRX: 16 experts in every layer, LayerNorms without biases, clipped queries, keys and values."""

from jaxformer import config as c


def dbrx() -> c.TransformerConfig:
    """Each token meets 4 experts.

    References:
        Databricks, Introducing DBRX: A New State-of-the-Art Open LLM, 2024
    """
    return c.TransformerConfig(
        vocab_size=100_352,
        model_dim=6144,
        num_layers=40,
        attention=c.MultiHead(
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            positions=(c.Rope(base=500_000.0),),
            clip_qkv=8.0,
        ),
        feed_forward=(c.MoE(expert=c.GLU(hidden_dim=10_752), num_experts=16, top_k=4),),
        norm=c.LayerNorm(parameters="scale"),
    )


PRESETS = {"dbrx": dbrx()}
