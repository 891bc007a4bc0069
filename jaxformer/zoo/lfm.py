"""LFM 2.5: gated short convolutions in most layers, attention with QK-norm in the others."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import HEADS, like, sized

# As Llama, except: convolutions over 3 tokens in all but 6 layers, which have QK-norm; tied.
# Liquid AI, LFM2 Technical Report, 2025. arXiv:2511.23404, section 2
CONVOLUTION = c.ShortConvolution(num_heads=1, head_dim=8)
LFM_HEADS = replace(HEADS, positions=(c.Rope(base=1e6),), qk_norm=c.QKNorm(norm=LLAMA.norm))
LFM_2_5 = like(
    LLAMA,
    vocab_size=65_536,
    # The 16th layer is a convolution, as the first.
    attention=tuple(LFM_HEADS if i in (2, 5, 8, 10, 12, 14) else CONVOLUTION for i in range(15)),
    head=c.LMHead(tied=True),
)

PRESETS = {"lfm-2.5-1.2b": sized(LFM_2_5, 2048, 16, heads=32, kv=8)}
YEARS = dict.fromkeys(PRESETS, 2026)
