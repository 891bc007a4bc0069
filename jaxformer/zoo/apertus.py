"""Apertus: Llama 3 without a gate, with xIELU, and QK-norm."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama 3.1, except: xIELU without a gate; QK-norm; another vocabulary and base of RoPE.
# Project Apertus, Apertus: Democratizing Open and Compliant LLMs, 2025. arXiv:2509.14233, section 2
SCALING = c.Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
)
APERTUS = like(
    LLAMA,
    vocab_size=131_072,
    positions=(c.Rope(base=1.2e7, scaling=SCALING),),
    qk_norm=c.QKNorm(norm=LLAMA.norm),
    feed_forward=(c.XIELU(hidden_dim=1),),
)

PRESETS = {
    "apertus-8b": sized(APERTUS, 4096, 32, heads=32, kv=8, hidden=21_504),
    "apertus-70b": sized(APERTUS, 8192, 80, heads=64, kv=8, hidden=43_008),
}
YEARS = dict.fromkeys(PRESETS, 2025)
