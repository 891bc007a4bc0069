"""Switch Transformer: T5 with one expert a token in every second layer."""

from jaxformer import config as c
from jaxformer.zoo.sizes import like, sized
from jaxformer.zoo.t5 import T5

# As T5, except: experts in every second layer, which accept 64 tokens of a row.
# Fedus et al., Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient
# Sparsity, 2021. arXiv:2101.03961, section 2
DENSE = c.MLP(hidden_dim=1, activation="relu")
ROUTER = c.Router(renormalise=False, capacity=64)
SWITCH = like(T5, feed_forward=(DENSE, c.MoE(expert=DENSE, num_experts=8, top_k=1, router=ROUTER)))

PRESETS = {
    f"switch-base-{number}": sized(SWITCH, 768, 12, heads=12, experts=number)
    for number in (8, 64, 128)
}
