"""OLMo (LayerNorm without parameters) to OLMo 3 (norms after the branches, QK-norm), and OLMoE.

Vocabularies are padded from 50,280 to 50,304 ids (OLMo) and from 100,278 to 100,352 (OLMo 2).
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: a LayerNorm that has neither scale nor bias.
# Groeneveld et al., OLMo: Accelerating the Science of Language Models, 2024. arXiv:2402.00838,
# section 2.1
OLMO = like(LLAMA, vocab_size=50_304, norm=c.LayerNorm(parameters="none"))

# As Llama, except: norms after the branches, before the residual sum; QK-norm over the full width.
# OLMo team, 2 OLMo 2 Furious, 2024. arXiv:2501.00656, section 2
ROPE, NORM = c.Rope(base=500_000.0), c.RMSNorm(eps=1e-6)
OLMO_2 = like(
    LLAMA,
    vocab_size=100_352,
    positions=(ROPE,),
    qk_norm=c.QKNorm(norm=NORM, over="width"),
    norm=NORM,
    norm_placement="res_post",
)

# As OLMo 2, except: a window in three of four layers; the fourth sees all and has YaRN.
# OLMo team, Olmo 3, 2025. arXiv:2512.13961, section 3
YARN = c.Yarn(factor=8.0, original_max_length=8192, attention_factor=1.2079441541679836)
OLMO_3 = like(
    OLMO_2,
    vocab_size=100_278,
    positions=(ROPE, ROPE, ROPE, replace(ROPE, scaling=YARN)),
    windows=(4096, 4096, 4096, None),
)

# As Llama, except: QK-norm over the full width, and experts, whose weights are not renormalised.
# Muennighoff et al., OLMoE: Open Mixture-of-Experts Language Models, 2024. arXiv:2409.02060,
# section 2
OLMOE = like(
    LLAMA,
    vocab_size=50_304,
    qk_norm=c.QKNorm(norm=LLAMA.norm, over="width"),
    feed_forward=(c.MoE(expert=GLU, num_experts=64, top_k=8, router=c.Router(renormalise=False)),),
)

PRESETS = {
    "olmo-1b": sized(OLMO, 2048, 16, heads=16, tied=True),
    "olmo-7b": sized(OLMO, 4096, 32, heads=32, hidden=11_008),
    "olmo-2-7b": sized(OLMO_2, 4096, 32, heads=32, hidden=11_008),
    "olmo-2-13b": sized(OLMO_2, 5120, 40, heads=40, hidden=13_824),
    "olmo-3-7b": sized(OLMO_3, 4096, 32, heads=32, hidden=11_008),
    "olmo-3-32b": sized(OLMO_3, 5120, 64, heads=40, kv=8, hidden=27_648),
    "olmoe-1b-7b": sized(OLMOE, 2048, 16, heads=16, hidden=1024),
}
