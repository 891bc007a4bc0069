"""PaLM: parallel branches under one norm, multi-query attention, logits divided by sqrt(model_dim).

The norm is LayerNorm without biases, as in the paper. The pairing of RoPE and eps are not
published: here neighbours, as in the paper it cites, and 1e-5.
"""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import WIDTH, like, sized

# SwiGLU, no biases; one head of keys and values, heads of 256, tied.
# Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311, section 2
PALM = like(
    LLAMA,
    vocab_size=256_000,
    block="parallel_shared_norm",
    norm=c.LayerNorm(parameters="scale"),
    head=c.LMHead(tied=True, multiplier=WIDTH**-0.5),
    positions=(c.Rope(pairing="neighbours"),),
)

PRESETS = {
    "palm-8b": sized(PALM, 4096, 32, heads=16, kv=1, head_dim=256),
    "palm-62b": sized(PALM, 8192, 64, heads=32, kv=1, head_dim=256),
    "palm-540b": sized(PALM, 18_432, 118, heads=48, kv=1, head_dim=256),
}
