"""Phi 1 to 2: parallel blocks; Phi-3 and 4: Llama; Phi-3-small: block-sparse layers, muP scales."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import QKVO, like, sized

# Ids that Phi-3-small's tokenizer never produces, most of them padding of its vocabulary.
UNUSED_TOKEN_IDS = (100_256, 100_258, 100_259, 100_260, 100_264, 100_265, *range(100_267, 100_352))

# As Llama, except: a window in every layer, in the versions for texts of 4096 tokens.
# Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219, section 2
PHI_3 = like(LLAMA, vocab_size=32_064, windows=(2047,))

# As Llama, except: clamped GEGLU, LayerNorm, biases, block-sparse layers in turn with dense ones,
# and muP scales (same source).
PHI_3_SMALL = like(
    LLAMA,
    vocab_size=100_352,
    positions=(c.Rope(base=1e6),),
    windows=(c.BlockSparse(block_size=64, local_blocks=16, stride=8), None),
    scale=1 / 128,
    biases=QKVO,
    feed_forward=(c.ClampedGEGLU(hidden_dim=1, limit=20.0, bias=True),),
    norm=c.LayerNorm(),
    embedding=c.Embedding(scale=10.0),
    head=c.LMHead(tied=True, multiplier=1 / 8, masked_ids=UNUSED_TOKEN_IDS),
)

# As Llama, except: parallel blocks with one LayerNorm, no gate, biases, also of the head, half of a
# head turned.
# Gunasekar et al., Textbooks Are All You Need, 2023. arXiv:2306.11644, section 2.3
PHI = like(
    LLAMA,
    vocab_size=51_200,
    block="parallel_shared_norm",
    positions=(c.Rope(fraction=0.5),),
    biases=QKVO,
    feed_forward=(c.MLP(hidden_dim=1, activation="gelu_tanh", bias=True),),
    norm=c.LayerNorm(eps=1e-5),
    head=c.LMHead(bias=True),
)

# As Phi, except: 32 of the 80 features of a head turned.
# Javaheripi et al., Phi-2: The Surprising Power of Small Language Models, 2023.
# https://www.microsoft.com/en-us/research/blog/phi-2-the-surprising-power-of-small-language-models/
PHI_2 = like(PHI, head_dim=80, positions=(c.Rope(fraction=0.4),))

# As Phi-3, except: a larger vocabulary and no window.
# Abdin et al., Phi-4 Technical Report, 2024. arXiv:2412.08905, section 3
PHI_4 = like(LLAMA, vocab_size=100_352, positions=(c.Rope(base=250_000.0),))

PRESETS = {
    "phi-1": sized(PHI, 2048, 24, heads=32),
    "phi-1.5": sized(PHI, 2048, 24, heads=32),  # arXiv:2309.05463
    "phi-2": sized(PHI_2, 2560, 32, heads=32),
    "phi-3-mini": sized(PHI_3, 3072, 32, heads=32, hidden=8192),
    "phi-3-small": sized(PHI_3_SMALL, 4096, 32, heads=32, kv=8, hidden=14_336),
    "phi-3-medium": sized(PHI_3, 5120, 40, heads=40, kv=10, hidden=17_920),
    "phi-4": sized(PHI_4, 5120, 40, heads=40, kv=10, hidden=17_920),
}
YEARS = dict.fromkeys(("phi-1", "phi-1.5", "phi-2"), 2023)
