"""DBRX: 16 experts in every layer, LayerNorms without biases, clipped queries, keys and values."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: LayerNorm without bias, clipped queries, keys and values, and 4 of 16 experts.
# Databricks, Introducing DBRX: A New State-of-the-Art Open LLM, 2024
DBRX = like(
    LLAMA,
    vocab_size=100_352,
    positions=(c.Rope(base=500_000.0),),
    clip_qkv=8.0,
    feed_forward=(c.MoE(expert=GLU, num_experts=16, top_k=4),),
    norm=c.LayerNorm(parameters="scale"),
)

PRESETS = {"dbrx": sized(DBRX, 6144, 40, heads=48, kv=8, hidden=10_752)}
