"""LLaMA to Llama 4, and equal models such as Marin: pre-norm with RMSNorm, RoPE, SwiGLU, no biases.

RoPE pairs the halves of a head, as in checkpoints of the transformers library; Meta's checkpoints
pair neighbours, with queries and keys permuted accordingly. Those of Llama 4 pair neighbours.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.sizes import DEPTH, GLU, HEADS, WIDTH, like, sized

# Pre-norm with RMSNorm, RoPE, SwiGLU, no biases.
# Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023. arXiv:2302.13971,
# section 2.2
# Touvron et al., Llama 2: Open Foundation and Fine-Tuned Chat Models, 2023. arXiv:2307.09288
LLAMA = c.TransformerConfig(
    vocab_size=32_000,
    model_dim=WIDTH,
    num_layers=DEPTH,
    attention=HEADS,
    feed_forward=(GLU,),
    norm=c.RMSNorm(eps=1e-5),
)

# As Llama, except: a larger vocabulary and RoPE with a larger base, in version 3.1 scaled.
# Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783, section 3.2
LLAMA_3 = like(LLAMA, vocab_size=128_256, positions=(c.Rope(base=500_000.0),))
LLAMA_3_1 = LLAMA_3.with_rope_scaling(
    c.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192)
)

# As Llama 3, except: attention in chunks, in each fourth layer to everything, without positions and
# with queries that grow; a shared expert, and experts that read x times the sigmoid of their logit.
# Scout normalises queries and keys; Maverick has experts in every second layer.
# Meta, Llama 4, 2025. github.com/meta-llama/llama-models, models/llama4
CHUNKED = replace(
    HEADS, positions=(c.Rope(base=5e5, pairing="neighbours"),), windows=(c.Chunks(size=8192),)
)
GROWING = replace(
    HEADS, positions=(None,), query_scaling=c.QueryScaling(original_max_length=8192, offset=1)
)
INPUT_EXPERTS = c.MoE(
    expert=GLU, num_experts=16, top_k=1, router=c.InputRouter(), shared=c.SharedExpert(expert=GLU)
)
MAVERICK = like(
    LLAMA,
    vocab_size=202_048,
    attention=(*(CHUNKED,) * 3, GROWING),
    feed_forward=(GLU, INPUT_EXPERTS),
)
L2_NORM = c.QKNorm(norm=c.RMSNorm(eps=1e-5, parameters="none"), placement="after_rope")
SCOUT = like(
    MAVERICK,
    attention=(*(replace(CHUNKED, qk_norm=L2_NORM),) * 3, GROWING),
    feed_forward=(INPUT_EXPERTS,),
).with_rope_scaling(c.Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0))

PRESETS = {
    "llama-7b": sized(LLAMA, 4096, 32, heads=32, hidden=11_008, eps=1e-6),
    "llama-13b": sized(LLAMA, 5120, 40, heads=40, hidden=13_824, eps=1e-6),
    "llama-65b": sized(LLAMA, 8192, 80, heads=64, hidden=22_016),
    "llama-2-7b": sized(LLAMA, 4096, 32, heads=32, hidden=11_008),
    "llama-2-70b": sized(LLAMA, 8192, 80, heads=64, kv=8, hidden=28_672),
    "llama-3-8b": sized(LLAMA_3, 4096, 32, heads=32, kv=8, hidden=14_336),
    "llama-3-70b": sized(LLAMA_3, 8192, 80, heads=64, kv=8, hidden=28_672),
    "llama-3.1-8b": sized(LLAMA_3_1, 4096, 32, heads=32, kv=8, hidden=14_336),
    "llama-3.1-70b": sized(LLAMA_3_1, 8192, 80, heads=64, kv=8, hidden=28_672),
    "llama-4-scout": sized(SCOUT, 5120, 48, heads=40, kv=8, expert_dim=8192),
    "llama-4-maverick": sized(
        MAVERICK, 5120, 48, heads=40, kv=8, hidden=16_384, expert_dim=8192, experts=128
    ),
    "marin-8b": sized(LLAMA_3_1, 4096, 32, heads=32, kv=8, hidden=14_336),
    "deepseek-67b": sized(LLAMA, 8192, 95, vocab=102_400, heads=64, kv=8, hidden=22_016, eps=1e-6),
    "yi-34b": sized(LLAMA, 7168, 60, vocab=64_000, heads=56, kv=8, hidden=20_480, base=5e6),
    "reka-flash-3": sized(LLAMA, 6144, 44, vocab=100_352, heads=64, kv=8, hidden=19_648, base=8e6),
    "smollm2-1.7b": sized(LLAMA, 2048, 24, vocab=49_152, heads=32, base=130_000.0, tied=True),
}
