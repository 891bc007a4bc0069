"""Command R, R+ and A: parallel branches, one LayerNorm without bias, scaled tied logits."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

NORM = c.LayerNorm(eps=1e-5, parameters="scale")
ROPE = c.Rope(pairing="neighbours")

# As Llama, except: parallel branches under one LayerNorm without bias, tied. Command R+ has QK-norm
# with a scale for each head.
# Cohere, Command R: Retrieval Augmented Generation at Production Scale, 2024
COMMAND_R = like(
    LLAMA,
    vocab_size=256_000,
    positions=(ROPE,),
    block="parallel_shared_norm",
    norm=NORM,
    head=c.LMHead(tied=True),
)
COMMAND_R_PLUS = like(COMMAND_R, qk_norm=c.QKNorm(norm=NORM, over="each_head"))

# As Command R, except: three layers with a window, then one without positions that sees all.
# Cohere, Command A: An Enterprise-Ready Large Language Model, 2025. arXiv:2504.00698, section 2
COMMAND_A = like(COMMAND_R, positions=(ROPE, ROPE, ROPE, None), windows=(4096, 4096, 4096, None))

PRESETS = {
    "command-r": sized(COMMAND_R, 8192, 40, heads=64, hidden=22_528, base=8e6, multiplier=1 / 16),
    "command-r-plus": sized(
        COMMAND_R_PLUS, 12_288, 64, heads=96, kv=8, hidden=33_792, base=75e6, multiplier=5 / 6
    ),
    "command-a": sized(
        COMMAND_A, 12_288, 64, heads=96, kv=8, hidden=36_864, base=50_000.0, multiplier=1 / 4
    ),
}
