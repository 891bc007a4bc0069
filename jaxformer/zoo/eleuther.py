"""GPT-J, GPT-NeoX and Pythia: parallel branches, RoPE on a quarter of each head.

Vocabularies are as large as the released embeddings, padded beyond the tokenizer's 50,257 (GPT-J),
50,277 (GPT-NeoX) and 50,277 (Pythia).
"""

from jaxformer import config as c
from jaxformer.zoo.gpt import GPT_2
from jaxformer.zoo.sizes import like, sized

# As GPT-2, except: RoPE over neighbouring features, no biases of attention, one norm for both
# branches, and a head that has a bias and is not tied.
# Wang and Komatsuzaki, GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model, 2021
GPT_J = like(
    GPT_2,
    vocab_size=50_400,
    positions=(c.Rope(fraction=0.25, pairing="neighbours"),),
    biases=(),
    block="parallel_shared_norm",
    embedding=c.Embedding(),
    head=c.LMHead(bias=True),
)

# As GPT-2, except: RoPE over halves, a norm for each branch, and a head that is not tied.
# Black et al., GPT-NeoX-20B: An Open-Source Autoregressive Language Model, 2022. arXiv:2204.06745,
# section 2.1
GPT_NEOX = like(
    GPT_2,
    vocab_size=50_432,
    positions=(c.Rope(fraction=0.25),),
    block="parallel",
    embedding=c.Embedding(),
    head=c.LMHead(),
)

# As GPT-NeoX, except: GELU itself.
# Biderman et al., Pythia, 2023. arXiv:2304.01373
PYTHIA = like(
    GPT_NEOX, vocab_size=50_304, feed_forward=(c.MLP(hidden_dim=1, activation="gelu", bias=True),)
)

PRESETS = {
    "gpt-j-6b": sized(GPT_J, 4096, 28, heads=16),
    "gpt-neox-20b": sized(GPT_NEOX, 6144, 44, heads=64),
    "pythia-70m": sized(PYTHIA, 512, 6, heads=8),
    "pythia-160m": sized(PYTHIA, 768, 12, heads=12),
    "pythia-410m": sized(PYTHIA, 1024, 24, heads=16),
    "pythia-1b": sized(PYTHIA, 2048, 16, heads=8),
    "pythia-1.4b": sized(PYTHIA, 2048, 24, heads=16),
    "pythia-2.8b": sized(PYTHIA, 2560, 32, heads=32),
    "pythia-6.9b": sized(PYTHIA, 4096, 32, heads=32, vocab=50_432),
    "pythia-12b": sized(PYTHIA, 5120, 36, heads=40, vocab=50_688),
}
