"""GLM 4 (sandwich norms), GLM 4.5 and GLM 4.7 Flash (mixtures of experts).

The module that predicts a second token is left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import EXPERTS_BY_SIGMOID, SIGMOID
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, QKV, like, sized

# As Llama, except: norms before and after each branch, neighbours rotated in half of each head, and
# biases of queries, keys and values: GLM 4 9B of April 2025 (0414).
# GLM team, ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools, 2024.
# arXiv:2406.12793, section 2
GLM_4 = like(
    LLAMA,
    vocab_size=151_552,
    positions=(c.Rope(fraction=0.5, pairing="neighbours"),),
    biases=QKV,
    norm_placement="sandwich",
)

# As Llama, except: half of each head rotated, biases of queries, keys and values, and DeepSeek V3's
# experts without groups. The larger model has QK-norm.
# GLM-4.5 team, GLM-4.5: Agentic, Reasoning, and Coding (ARC) Foundation Models, 2025.
# arXiv:2508.06471, section 2.1 and table 1
GLM_4_5_AIR = like(
    LLAMA,
    vocab_size=151_552,
    positions=(c.Rope(base=1e6, fraction=0.5),),
    biases=QKV,
    feed_forward=(GLU, EXPERTS_BY_SIGMOID),
)
GLM_4_5_EXPERTS = replace(EXPERTS_BY_SIGMOID, num_experts=160, router=replace(SIGMOID, scale=2.5))
GLM_4_5 = like(GLM_4_5_AIR, qk_norm=c.QKNorm(norm=LLAMA.norm), feed_forward=(GLU, GLM_4_5_EXPERTS))

# As DeepSeek V3, except: no groups of experts, no YaRN, and values as wide as queries and keys.
# Z.ai, GLM-4.7-Flash, 2026. huggingface.co/zai-org/GLM-4.7-Flash
FLASH_LATENT = c.Latent(
    num_heads=1,
    latent_dim=512,
    query_latent_dim=768,
    nope_dim=192,
    rope_dim=64,
    value_dim=256,
    positions=(c.Rope(base=1e6, pairing="neighbours"),),
)
FLASH_EXPERTS = replace(
    EXPERTS_BY_SIGMOID, num_experts=64, top_k=4, router=replace(SIGMOID, scale=1.8)
)
GLM_4_7_FLASH = like(
    LLAMA, vocab_size=154_880, attention=FLASH_LATENT, feed_forward=(GLU, FLASH_EXPERTS)
)

PRESETS = {
    "glm-4-9b": sized(GLM_4, 4096, 40, heads=32, kv=2, hidden=13_696),
    "glm-4.5-air": sized(
        GLM_4_5_AIR, 4096, 46, heads=96, kv=8, head_dim=128, dense=1, hidden=10_944, expert_dim=1408
    ),
    "glm-4.5": sized(
        GLM_4_5, 5120, 92, heads=96, kv=8, head_dim=128, dense=3, hidden=12_288, expert_dim=1536
    ),
    "glm-4.7-flash": sized(
        GLM_4_7_FLASH, 2048, 47, heads=20, dense=1, hidden=10_240, expert_dim=1536
    ),
}
YEARS = dict.fromkeys(PRESETS, 2025) | {"glm-4.7-flash": 2026}
