"""Arcee: AFM 4.5B, Llama with ReLU squared and no gate; Trinity Mini, experts and gated heads."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.deepseek import EXPERTS_BY_SIGMOID, SIGMOID
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, WIDTH, like, sized

# As Llama, except: ReLU squared without a gate; YaRN.
# Arcee AI, AFM-4.5B, 2025. huggingface.co/arcee-ai/AFM-4.5B
ARCEE = like(
    LLAMA,
    vocab_size=128_004,
    feed_forward=(c.MLP(hidden_dim=1, activation="relu_squared"),),
    positions=(c.Rope(scaling=c.Yarn(factor=20.0, original_max_length=4096)),),
)

# As Llama, except: three layers with RoPE and a window, then one without positions that sees all;
# QK-norm; a gate for each feature of the heads; norms before and after the branches; a scaled
# embedding; after two dense layers, 8 of 128 experts and a shared one.
# Singh et al., Arcee Trinity Large Technical Report, 2026. arXiv:2602.17004, section 2
TRINITY = like(
    LLAMA,
    vocab_size=200_192,
    positions=(c.Rope(), c.Rope(), c.Rope(), None),
    windows=(2048, 2048, 2048, None),
    qk_norm=c.QKNorm(norm=LLAMA.norm),
    output_gate=c.OutputGate(),
    feed_forward=(GLU, replace(EXPERTS_BY_SIGMOID, router=replace(SIGMOID, scale=2.826))),
    norm_placement="sandwich",
    embedding=c.Embedding(scale=WIDTH**0.5),
)

PRESETS = {
    "arcee-4.5b": sized(ARCEE, 2560, 36, heads=20, kv=4, hidden=18_432),
    "trinity-mini": sized(
        TRINITY, 2048, 32, heads=32, kv=4, head_dim=128, dense=2, hidden=6144, expert_dim=1024
    ),
}
YEARS = dict.fromkeys(PRESETS, 2025)
