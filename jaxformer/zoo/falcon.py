"""Falcon and Falcon 2: parallel branches, GELU, few KV heads, no biases of linear layers."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: parallel branches under one LayerNorm, GELU without a gate, tied. The model of
# 40B has a norm for each branch.
# Almazrouei et al., The Falcon Series of Open Language Models, 2023. arXiv:2311.16867
# Malartic et al., Falcon2-11B Technical Report, 2024. arXiv:2407.14885, section 2
FALCON = like(
    LLAMA,
    vocab_size=65_024,
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu"),),
    block="parallel_shared_norm",
    norm=c.LayerNorm(),
    head=c.LMHead(tied=True),
)
FALCON_40B = like(FALCON, block="parallel")

PRESETS = {
    "falcon-7b": sized(FALCON, 4544, 32, heads=71, kv=1),
    "falcon-40b": sized(FALCON_40B, 8192, 60, heads=128, kv=8),
    "falcon-2-11b": sized(FALCON, 4096, 60, heads=32, kv=8, base=500_042.0, tied=False),
}
YEARS = {"falcon-7b": 2023, "falcon-40b": 2023}
