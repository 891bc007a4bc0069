"""Qwen to Qwen 2.5 (Llama with QKV biases), Qwen 3 (QK-norm instead of biases), Qwen 3 Next, 3.5.

Vocabularies are as large as the released embeddings, padded to 152,064, since version 3 to 151,936.
Beyond its training length the first Qwen also scales RoPE and queries, which is not supported.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, HEADS, QKV, like, sized

# As Llama, except: biases of queries, keys and values.
# Bai et al., Qwen Technical Report, 2023. arXiv:2309.16609, section 2.3
# Yang et al., Qwen2 Technical Report, 2024. arXiv:2407.10671, section 2.2
# Yang et al., Qwen2.5 Technical Report, 2024. arXiv:2412.15115, section 2
QWEN = like(
    LLAMA, vocab_size=152_064, positions=(c.Rope(base=1e6),), biases=QKV, norm=c.RMSNorm(eps=1e-6)
)

# As Qwen, except: 60 small experts, 4 for each token, and one of four times their width with a
# gate.
# Qwen team, Qwen1.5-MoE: Matching 7B Model Performance with 1/3 Activated Parameters, 2024
SHARED = c.SharedExpert(expert=c.GLU(hidden_dim=4), gated=True)
QWEN_1_5_EXPERTS = c.MoE(
    expert=GLU, num_experts=60, top_k=4, router=c.Router(renormalise=False), shared=SHARED
)
QWEN_1_5_MOE = like(QWEN, vocab_size=151_936, feed_forward=(QWEN_1_5_EXPERTS,))

# As Qwen, except: QK-norm in place of biases; heads of 128 whatever the width; tied up to 4B. The
# mixtures have 128 experts in every layer; each token meets 8.
# Yang et al., Qwen3 Technical Report, 2025. arXiv:2505.09388, section 2, tables 1 and 2
QWEN_3 = like(QWEN, vocab_size=151_936, biases=(), qk_norm=c.QKNorm())
QWEN_3_MOE = like(QWEN_3, feed_forward=(c.MoE(expert=GLU, num_experts=128, top_k=8),))

# As Qwen 3, except: three layers of gated DeltaNet for one of gated attention, which rotates a
# quarter of each head; norms multiply by 1 + scale. The mixtures have a shared expert with a
# gate, Qwen 3.5 a larger vocabulary.
# Qwen team, Qwen3-Next, 2025
# Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024. arXiv:2412.06464
# Qiu et al., Gated Attention for Large Language Models, 2025. arXiv:2505.06708
NORM = c.RMSNorm(scale_offset=1.0)
DELTA_NET = c.LinearAttention(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128)
GATED_ATTENTION = replace(
    HEADS,
    positions=(c.Rope(base=1e7, fraction=0.25),),
    qk_norm=c.QKNorm(norm=NORM),
    output_gate=c.OutputGate(),
)
GATED_EXPERT = c.SharedExpert(expert=GLU, gated=True)
EXPERTS = c.MoE(expert=GLU, num_experts=512, top_k=10, shared=GATED_EXPERT)
QWEN_3_NEXT = like(
    QWEN_3, attention=(*(DELTA_NET,) * 3, GATED_ATTENTION), feed_forward=(EXPERTS,), norm=NORM
)
QWEN_3_5 = like(QWEN_3_NEXT, vocab_size=248_320, feed_forward=(GLU,))
QWEN_3_5_MOE = like(QWEN_3_NEXT, vocab_size=248_320)

PRESETS = {
    "qwen-14b": sized(QWEN, 5120, 40, heads=40, hidden=13_696, base=10_000.0),
    "qwen-1.5-moe-a2.7b": sized(QWEN_1_5_MOE, 2048, 24, heads=16, hidden=1408),
    "qwen-2-7b": sized(QWEN, 3584, 28, heads=28, kv=4, hidden=18_944),
    "qwen-2-72b": sized(QWEN, 8192, 80, heads=64, kv=8, hidden=29_568, eps=1e-5),
    "qwen-2.5-72b": sized(QWEN, 8192, 80, heads=64, kv=8, hidden=29_568, eps=1e-5),
    "qwen-3-0.6b": sized(QWEN_3, 1024, 28, heads=16, kv=8, head_dim=128, hidden=3072, tied=True),
    "qwen-3-1.7b": sized(QWEN_3, 2048, 28, heads=16, kv=8, head_dim=128, hidden=6144, tied=True),
    "qwen-3-4b": sized(QWEN_3, 2560, 36, heads=32, kv=8, head_dim=128, hidden=9728, tied=True),
    "qwen-3-8b": sized(QWEN_3, 4096, 36, heads=32, kv=8, hidden=12_288),
    "qwen-3-14b": sized(QWEN_3, 5120, 40, heads=40, kv=8, hidden=17_408),
    "qwen-3-32b": sized(QWEN_3, 5120, 64, heads=64, kv=8, head_dim=128, hidden=25_600),
    "qwen-3-30b-a3b": sized(QWEN_3_MOE, 2048, 48, heads=32, kv=4, head_dim=128, hidden=768),
    "qwen-3-235b-a22b": sized(QWEN_3_MOE, 4096, 94, heads=64, kv=4, head_dim=128, hidden=1536),
    "qwen-3-next-80b-a3b": sized(QWEN_3_NEXT, 2048, 48, heads=16, kv=2, head_dim=256, hidden=512),
    "qwen-3.5-9b": sized(QWEN_3_5, 4096, 32, heads=16, kv=4, hidden=12_288),
    "qwen-3.5-27b": sized(
        QWEN_3_5, 5120, 64, heads=24, kv=4, head_dim=256, value_heads=48, hidden=17_408
    ),
    "qwen-3.5-35b-a3b": sized(
        QWEN_3_5_MOE, 2048, 40, heads=16, kv=2, head_dim=256, hidden=512, experts=256, top_k=8
    ),
}
YEARS = {"qwen-3-next-80b-a3b": 2025} | dict.fromkeys(
    ("qwen-3.5-9b", "qwen-3.5-27b", "qwen-3.5-35b-a3b"), 2026
)
