"""nanochat: norms without parameters, also of the embedding, QK-norm, and ReLU squared."""

from jaxformer import config as c
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like, sized

# As Llama, except: norms without parameters, one of them after the embedding; QK-norm; ReLU squared
# without a gate; logits capped at 15. The width is 64 times the depth.
# Karpathy, nanochat: The best ChatGPT that $100 can buy, 2025. github.com/karpathy/nanochat
NORM = c.RMSNorm(eps=1e-6, parameters="none")
NANOCHAT = like(
    LLAMA,
    vocab_size=65_536,
    qk_norm=c.QKNorm(norm=NORM),
    feed_forward=(c.MLP(hidden_dim=1, activation="relu_squared"),),
    norm=NORM,
    embedding=c.Embedding(norm=NORM),
    head=c.LMHead(softcap=15.0),
)

PRESETS = {"nanochat-d32": sized(NANOCHAT, 2048, 32, heads=16)}
YEARS = dict.fromkeys(PRESETS, 2025)
