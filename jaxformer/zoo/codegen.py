"""CodeGen: GPT-J in four sizes; vocabulary padded from 50,295 to 51,200."""

from jaxformer import config as c
from jaxformer.zoo.eleuther import GPT_J
from jaxformer.zoo.sizes import like, sized

# As GPT-J, except: RoPE on 32 features of a head in the smallest model, on 64 in the others.
# Nijkamp et al., CodeGen: An Open Large Language Model for Code with Multi-Turn Program Synthesis,
# 2022. arXiv:2203.13474, section 2.2
CODEGEN = like(GPT_J, vocab_size=51_200)
HALF = like(CODEGEN, positions=(c.Rope(fraction=0.5, pairing="neighbours"),))
FOUR_FIFTHS = like(CODEGEN, positions=(c.Rope(fraction=0.8, pairing="neighbours"),))

PRESETS = {
    "codegen-350m": sized(HALF, 1024, 20, heads=16),
    "codegen-2b": sized(FOUR_FIFTHS, 2560, 32, heads=32),
    "codegen-6b": sized(CODEGEN, 4096, 33, heads=16),
    "codegen-16b": sized(CODEGEN, 6144, 34, heads=24),
}
YEARS = dict.fromkeys(PRESETS, 2022)
