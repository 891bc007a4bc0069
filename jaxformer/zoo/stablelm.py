"""StableLM 2: LayerNorms and a quarter of each head rotated; parallel branches at 12B."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import QKV, like, sized

# As Llama, except: LayerNorm, a quarter of each head rotated, biases of queries, keys and values.
# Bellagente et al., Stable LM 2 1.6B Technical Report, 2024. arXiv:2402.17834, section 3
STABLELM_2 = like(
    LLAMA, vocab_size=100_352, positions=(c.Rope(fraction=0.25),), biases=QKV, norm=c.LayerNorm()
)

# As StableLM 2, except: no biases, QK-norm with a scale for each head, both branches under one norm
# (the same source).
QK_NORM = c.QKNorm(norm=c.LayerNorm(parameters="scale"), over="each_head")
STABLELM_2_12B = like(STABLELM_2, biases=(), qk_norm=QK_NORM, block="parallel_shared_norm")

PRESETS = {
    "stablelm-2-1.6b": sized(STABLELM_2, 2048, 24, heads=32, hidden=5632),
    "stablelm-2-12b": sized(STABLELM_2_12B, 5120, 40, heads=32, kv=8, hidden=13_824),
}
YEARS = dict.fromkeys(PRESETS, 2024)
