"""DeepSeekMoE, and DeepSeek V2 and V3: multi-head latent attention and many small experts.

The dense DeepSeek 67B is a Llama (`jaxformer.zoo.llama`). V3's module that predicts a second token
is left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# Experts that every token meets, as one network of their total width
SHARED, TWO_SHARED = (c.SharedExpert(expert=c.GLU(hidden_dim=count)) for count in (1, 2))
SIGMOID = c.Router(score="sigmoid", selection_bias=True)
EXPERTS_BY_SIGMOID = c.MoE(expert=GLU, num_experts=128, top_k=8, router=SIGMOID, shared=SHARED)

# As Llama, except: in all layers but the first, 6 of 64 experts and 2 shared ones.
# Dai et al., DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language
# Models, 2024. arXiv:2401.06066, sections 3 and 5.1
EXPERTS_16B = c.MoE(
    expert=GLU, num_experts=64, top_k=6, router=c.Router(renormalise=False), shared=TWO_SHARED
)
DEEPSEEK_MOE = like(
    LLAMA, vocab_size=102_400, feed_forward=(GLU, EXPERTS_16B), norm=c.RMSNorm(eps=1e-6)
)

# As DeepSeekMoE, except: latent attention with YaRN, whose scores are scaled by its factor squared.
# V2 Lite has queries without a latent and chooses from all experts, V2 from the best 3 of 8 groups.
# DeepSeek-AI, DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model,
# 2024. arXiv:2405.04434, section 2 and appendix B
YARN = c.Yarn(factor=40.0, original_max_length=4096, attention_factor=1.0)
LATENT = c.Latent(
    num_heads=1,
    latent_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    positions=(c.Rope(pairing="neighbours", scaling=YARN),),
    scale=(128 + 64) ** -0.5 * yarn_attention_factor(YARN.factor, mscale=0.707) ** 2,
)
EXPERTS_V2 = replace(
    EXPERTS_16B,
    num_experts=160,
    router=c.Router(
        groups=c.ExpertGroups(num_groups=8, top_k=3, score="max"), renormalise=False, scale=16.0
    ),
)
DEEPSEEK_V2_LITE = like(DEEPSEEK_MOE, attention=LATENT)
DEEPSEEK_V2 = like(DEEPSEEK_V2_LITE, query_latent_dim=1536, feed_forward=(GLU, EXPERTS_V2))

# As DeepSeek V2, except: experts are chosen by sigmoid and a selection bias; another scale.
# DeepSeek-AI, DeepSeek-V3 Technical Report, 2024. arXiv:2412.19437, sections 2 and 4.2
ROUTER_V3 = replace(SIGMOID, groups=c.ExpertGroups(num_groups=8, top_k=4, score="top_2"), scale=2.5)
EXPERTS_V3 = replace(EXPERTS_BY_SIGMOID, num_experts=256, router=ROUTER_V3)
DEEPSEEK_V3 = like(
    DEEPSEEK_V2,
    vocab_size=129_280,
    scale=(128 + 64) ** -0.5 * yarn_attention_factor(YARN.factor) ** 2,
    feed_forward=(GLU, EXPERTS_V3),
)

PRESETS = {
    "deepseek-moe-16b": sized(
        DEEPSEEK_MOE, 2048, 28, heads=16, dense=1, hidden=10_944, expert_dim=1408
    ),
    "deepseek-v2-lite": sized(
        DEEPSEEK_V2_LITE, 2048, 27, heads=16, dense=1, hidden=10_944, expert_dim=1408
    ),
    "deepseek-v2": sized(DEEPSEEK_V2, 5120, 60, heads=128, dense=1, hidden=12_288, expert_dim=1536),
    "deepseek-v3": sized(DEEPSEEK_V3, 7168, 61, heads=128, dense=3, hidden=18_432, expert_dim=2048),
}
