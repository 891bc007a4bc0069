"""EXAONE 4: norms after the branches, QK-norm, RoPE only in the layers with a window."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: norms after the branches, QK-norm, and three layers with RoPE and a window, then
# one without positions that sees all.
# LG AI Research, EXAONE 4.0: Unified Large Language Models Integrating Non-reasoning and Reasoning
# Modes, 2025. arXiv:2507.11407, section 2.1
ROPE = c.Rope(
    base=1e6,
    scaling=c.Llama3Scaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    ),
)
EXAONE_4 = like(
    LLAMA,
    vocab_size=102_400,
    positions=(ROPE, ROPE, ROPE, None),
    windows=(4096, 4096, 4096, None),
    qk_norm=c.QKNorm(norm=LLAMA.norm),
    norm_placement="res_post",
)

PRESETS = {"exaone-4-32b": sized(EXAONE_4, 5120, 64, heads=40, kv=8, hidden=27_392)}
YEARS = dict.fromkeys(PRESETS, 2025)
