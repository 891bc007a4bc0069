"""Mamba 2, without attention or feed-forward networks; Bamba, which has both."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import HEADS, like, sized

# Heads of 64, a state of 128 and biases of the convolution.
# Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060, section 7
MAMBA_2_LAYER = c.LinearAttention(
    num_heads=1,
    num_key_heads=1,
    key_dim=128,
    value_dim=64,
    delta_rule=False,
    beta="step",
    unit_vectors=False,
    scale=1.0,
    skip=True,
    output=c.GatedNorm(norm=LLAMA.norm, over="group", placement="before_norm"),
    biases=("convolution",),
)

# As Llama, except: Mamba 2 in place of attention, no feed-forward networks, tied.
# Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060, table 10
MAMBA_2 = like(
    LLAMA,
    vocab_size=50_288,
    attention=MAMBA_2_LAYER,
    feed_forward=(c.NoFeedForward(),),
    head=c.LMHead(tied=True),
)

# As Llama, except: Mamba 2 in all but the 10th, 19th and 28th of 32 layers, whose attention rotates
# half of each head.
# IBM, Princeton, CMU and UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model, 2024
BAMBA_HEADS = replace(HEADS, positions=(c.Rope(fraction=0.5),))
# The layers after the 28th are Mamba 2, as the first.
BAMBA = like(
    LLAMA, vocab_size=128_256, attention=(MAMBA_2_LAYER, *(*(MAMBA_2_LAYER,) * 8, BAMBA_HEADS) * 3)
)

PRESETS = {
    "mamba-2-2.7b": sized(MAMBA_2, 2560, 64, value_heads=80),
    "bamba-9b": sized(BAMBA, 4096, 32, heads=32, kv=8, value_heads=128, hidden=14_336),
}
YEARS = dict.fromkeys(PRESETS, 2024)
