"""MiniMax M2: 256 experts, half of each head rotated, QK-norm over the full width."""

from jaxformer import config as c
from jaxformer.zoo.deepseek import SIGMOID
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: half of each head rotated, QK-norm over the full width, and 8 of 256 experts by
# sigmoid and a selection bias.
# MiniMax, MiniMax-M2, 2025. huggingface.co/MiniMaxAI/MiniMax-M2
NORM = c.RMSNorm(eps=1e-6)
MINIMAX_M2 = like(
    LLAMA,
    vocab_size=200_064,
    positions=(c.Rope(base=5e6, fraction=0.5),),
    qk_norm=c.QKNorm(norm=NORM, over="width"),
    feed_forward=(c.MoE(expert=GLU, num_experts=256, top_k=8, router=SIGMOID),),
    norm=NORM,
)

PRESETS = {"minimax-m2": sized(MINIMAX_M2, 3072, 62, heads=48, kv=8, head_dim=128, hidden=1536)}
YEARS = dict.fromkeys(PRESETS, 2025)
