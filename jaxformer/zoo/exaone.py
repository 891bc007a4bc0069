"""EXAONE 3 (Llama), EXAONE 4: norms after the branches, QK-norm, RoPE in layers with a window."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: another base of RoPE.
# LG AI Research, EXAONE 3.0 7.8B Instruction Tuned Language Model, 2024. arXiv:2408.03541, table 1
EXAONE_3 = like(LLAMA, vocab_size=102_400, positions=(c.Rope(base=5e5),))

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

PRESETS = {
    "exaone-3.0-7.8b": sized(EXAONE_3, 4096, 32, heads=32, kv=8, hidden=14_336),
    "exaone-4-32b": sized(EXAONE_4, 5120, 64, heads=40, kv=8, hidden=27_392),
}
YEARS = {"exaone-3.0-7.8b": 2024, "exaone-4-32b": 2025}
