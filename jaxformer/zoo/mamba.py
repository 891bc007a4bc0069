"""Mamba and Mamba 2, without attention or feed-forward networks; Jamba and Bamba, with both."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import GLU, HEADS, like, sized

# As Llama, except: selective scans in place of attention, no feed-forward networks, tied.
# Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
# arXiv:2312.00752, section 3.4
MAMBA_LAYER = c.SelectiveScan(width=1, step_rank=1)
MAMBA = like(
    LLAMA,
    vocab_size=50_280,
    attention=MAMBA_LAYER,
    feed_forward=(c.NoFeedForward(),),
    head=c.LMHead(tied=True),
)

# As Mamba, except: norms of what a token selects; not tied.
# Zuo et al., Falcon Mamba: The First Competitive Attention-free 7B Language Model, 2024.
# arXiv:2410.05355, section 3
FALCON_MAMBA = like(
    MAMBA,
    vocab_size=65_024,
    attention=replace(MAMBA_LAYER, norm=c.RMSNorm(parameters="none")),
    head=c.LMHead(),
)

# As Llama, except: Mamba, with norms, in all but every eighth layer, which has no positions;
# experts in every other layer.
# Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model, 2024. arXiv:2403.19887, section 3
JAMBA_LAYER = replace(MAMBA_LAYER, norm=c.RMSNorm())
JAMBA = like(
    LLAMA,
    vocab_size=65_536,
    norm=c.RMSNorm(),
    attention=(*(JAMBA_LAYER,) * 4, replace(HEADS, positions=(None,)), *(JAMBA_LAYER,) * 3),
    feed_forward=(
        GLU,
        c.MoE(expert=GLU, num_experts=2, top_k=2, router=c.Router(renormalise=False)),
    ),
)

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
    "mamba-130m": sized(MAMBA, 768, 24),
    "mamba-2.8b": sized(MAMBA, 2560, 64),
    "falcon-mamba-7b": sized(FALCON_MAMBA, 4096, 64),
    "jamba-v0.1": sized(JAMBA, 4096, 32, heads=32, kv=8, hidden=14_336, experts=16),
    "mamba-2-2.7b": sized(MAMBA_2, 2560, 64, value_heads=80),
    "bamba-9b": sized(BAMBA, 4096, 32, heads=32, kv=8, value_heads=128, hidden=14_336),
}
YEARS = dict.fromkeys(PRESETS, 2024) | {"mamba-130m": 2023, "mamba-2.8b": 2023}
