"""Mistral 7B 0.1: a window of 4096 tokens; Mixtral: 8 experts; Ministral 3 (text): YaRN."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: a window in every layer of version 0.1.
# Jiang et al., Mistral 7B, 2023. arXiv:2310.06825, section 2
MISTRAL = like(LLAMA, windows=(4096,))

# As Llama, except: 8 experts in every layer; each token meets 2.
# Jiang et al., Mixtral of Experts, 2024. arXiv:2401.04088, section 2
MIXTRAL = like(LLAMA, feed_forward=(c.MoE(expert=GLU, num_experts=8),))

# As Llama, except: YaRN from 16,384 tokens on, and queries that grow with the position.
# Mistral AI, Ministral 3, 2026. arXiv:2601.08584
LENGTH = 16_384
YARN = c.Yarn(factor=16.0, original_max_length=LENGTH, attention_factor=1.0)
MINISTRAL_3 = like(
    LLAMA,
    vocab_size=131_072,
    positions=(c.Rope(base=1e6, scaling=YARN),),
    query_scaling=c.QueryScaling(beta=0.1, original_max_length=LENGTH),
)

PRESETS = {
    "mistral-7b": sized(MISTRAL, 4096, 32, heads=32, kv=8, hidden=14_336),
    "mixtral-8x7b": sized(MIXTRAL, 4096, 32, heads=32, kv=8, hidden=14_336, base=1e6),
    "ministral-3-8b": sized(MINISTRAL_3, 4096, 34, heads=32, kv=8, hidden=14_336),
}
YEARS = {"ministral-3-8b": 2026}
