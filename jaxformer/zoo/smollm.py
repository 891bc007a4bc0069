"""SmolLM3: Llama without positions in every fourth layer. SmolLM2 is a Llama."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: no positions in every fourth layer, tied.
# Bakouch et al., SmolLM3: smol, multilingual, long-context reasoner, 2025
ROPE = c.Rope(base=5e6)
SMOLLM_3 = like(
    LLAMA,
    vocab_size=128_256,
    positions=(ROPE, ROPE, ROPE, None),
    norm=c.RMSNorm(eps=1e-6),
    head=c.LMHead(tied=True),
)

PRESETS = {"smollm3-3b": sized(SMOLLM_3, 2048, 36, heads=16, kv=4, hidden=11_008)}
YEARS = dict.fromkeys(PRESETS, 2025)
