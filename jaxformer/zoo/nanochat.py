"""nanochat: norms without parameters, also of the embedding, QK-norm, and ReLU squared."""

from jaxformer import config as c


def nanochat(*, depth: int) -> c.TransformerConfig:
    """The width is 64 times the depth; logits are capped at 15.

    References:
        Karpathy, nanochat: The best ChatGPT that $100 can buy, 2025. github.com/karpathy/nanochat
    """
    norm, model_dim = c.RMSNorm(eps=1e-6, parameters="none"), 64 * depth
    return c.TransformerConfig(
        vocab_size=65_536,
        model_dim=model_dim,
        num_layers=depth,
        attention=c.MultiHead(
            num_heads=model_dim // 128,
            num_kv_heads=model_dim // 128,
            head_dim=128,
            positions=(c.Rope(),),
            qk_norm=c.QKNorm(norm=norm, over="head"),
        ),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="relu_squared"),),
        norm=norm,
        embedding=c.Embedding(norm=norm),
        head=c.LMHead(softcap=15.0),
    )


PRESETS = {"nanochat-d32": nanochat(depth=32)}
YEARS = dict.fromkeys(PRESETS, 2025)
