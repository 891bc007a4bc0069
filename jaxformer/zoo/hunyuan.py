"""Hunyuan A13B and 3: QK-norm, 64 or 192 experts and a shared one.

The module of Hunyuan 3 that predicts a second token is left out.
"""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import EXPERTS_BY_SIGMOID, SHARED, SIGMOID
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, like, sized

# As Llama, except: 8 of 64 experts and a shared one, QK-norm after RoPE, tied.
# Tencent, Hunyuan-A13B Technical Report, 2025. github.com/Tencent-Hunyuan/Hunyuan-A13B
HUNYUAN_A13B = like(
    LLAMA,
    vocab_size=128_167,
    positions=(c.Rope(scaling=c.NTKScaling(factor=1000.0)),),
    qk_norm=c.QKNorm(norm=LLAMA.norm, placement="after_rope"),
    feed_forward=(c.MoE(expert=GLU, num_experts=64, top_k=8, shared=SHARED),),
    head=c.LMHead(tied=True),
)

# As Llama, except: QK-norm, and after the first layer 8 of 192 experts by sigmoid and a selection
# bias, and a shared one.
# Tencent, Hy3 preview, 2026. huggingface.co/tencent/Hy3-preview
EXPERTS = replace(EXPERTS_BY_SIGMOID, num_experts=192, router=replace(SIGMOID, scale=2.826))
HUNYUAN_3 = like(
    LLAMA,
    vocab_size=120_832,
    positions=(c.Rope(base=11_158_840.0),),
    qk_norm=c.QKNorm(norm=LLAMA.norm),
    feed_forward=(GLU, EXPERTS),
)

PRESETS = {
    "hunyuan-a13b": sized(HUNYUAN_A13B, 4096, 32, heads=32, kv=8, hidden=3072),
    "hunyuan-3": sized(
        HUNYUAN_3, 4096, 80, heads=64, kv=8, head_dim=128, dense=1, hidden=13_312, expert_dim=1536
    ),
}
YEARS = {"hunyuan-a13b": 2025, "hunyuan-3": 2026}
