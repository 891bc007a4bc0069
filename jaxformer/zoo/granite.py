"""Granite 3 and 4: constants on embedding, scores, branches and logits; 4 is mostly Mamba 2."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.mamba import MAMBA_2_LAYER
from jaxformer.zoo.sizes import GLU, HEADS, like, sized

# As Llama, except: the embedding, the branches, the scores and the logits have multipliers; tied.
# Granite team, Granite 3.0 Language Models, 2024, section 2
GRANITE_3 = like(
    LLAMA,
    vocab_size=49_159,
    residual_multiplier=0.22,
    embedding=c.Embedding(scale=12.0),
    head=c.LMHead(tied=True),
    positions=(c.Rope(base=1e7),),
)

# As Granite 3, except: nine layers of Mamba 2 for one of attention without positions, and experts,
# with a shared one twice as wide.
# IBM, Granite 4.0, 2025 (model page)
EXPERTS = c.MoE(
    expert=GLU, num_experts=72, top_k=10, shared=c.SharedExpert(expert=c.GLU(hidden_dim=2))
)
GRANITE_4 = like(
    GRANITE_3,
    vocab_size=100_352,
    attention=(
        *(MAMBA_2_LAYER,) * 5,
        replace(HEADS, positions=(None,), scale=1 / 128),
        *(MAMBA_2_LAYER,) * 4,
    ),
    feed_forward=(EXPERTS,),
)

PRESETS = {
    "granite-3.3-2b": sized(
        GRANITE_3, 2048, 40, heads=32, kv=8, hidden=8192, scale=1 / 64, multiplier=1 / 8
    ),
    "granite-3.3-8b": sized(
        GRANITE_3, 4096, 40, heads=32, kv=8, hidden=12_800, scale=1 / 128, multiplier=1 / 16
    ),
    "granite-4.0-h-small": sized(
        GRANITE_4, 4096, 40, heads=32, kv=8, value_heads=128, hidden=768, multiplier=1 / 16
    ),
}
YEARS = dict.fromkeys(PRESETS, 2025)
