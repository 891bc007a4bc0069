"""Switch Transformer: T5 with one expert a token in every second layer."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.t5 import t5


def switch_base(*, num_experts: int) -> c.TransformerConfig:
    """T5-Base whose experts accept 64 tokens of a row.

    References:
        Fedus et al., Switch Transformers: Scaling to Trillion Parameter Models with Simple and
        Efficient Sparsity, 2021. arXiv:2101.03961, section 2
    """
    dense = c.MLP(hidden_dim=3072, activation="relu")
    body = t5(model_dim=768, num_layers=12, num_heads=12, hidden_dim=dense.hidden_dim)
    router = c.Router(renormalise=False, capacity=64)
    moe = c.MoE(expert=dense, num_experts=num_experts, top_k=1, router=router)
    return replace(body, feed_forward=(dense, moe))


PRESETS = {f"switch-base-{number}": switch_base(num_experts=number) for number in (8, 64, 128)}
