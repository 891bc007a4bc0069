"""Seed-OSS 36B: Llama with QKV biases and heads twice as wide in all as the residual stream."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import QKV, like, sized

# As Llama, except: biases of queries, keys and values.
# ByteDance Seed, Seed-OSS Open-Source Models, 2025. github.com/ByteDance-Seed/seed-oss
SEED_OSS = like(
    LLAMA, vocab_size=155_136, positions=(c.Rope(base=1e7),), biases=QKV, norm=c.RMSNorm(eps=1e-6)
)

PRESETS = {"seed-oss-36b": sized(SEED_OSS, 5120, 64, heads=80, kv=8, head_dim=128, hidden=27_648)}
YEARS = dict.fromkeys(PRESETS, 2025)
