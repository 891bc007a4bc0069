"""Gopher and Chinchilla: GPT-2 with RMSNorm and Transformer-XL relative positions.

The papers do not name the activation; ReLU is from the lecture. Sharing of u and v across layers,
biases and tying are not published: here each layer has its own u and v, there are no other biases,
and the head is tied. The published totals need a W in every layer.
"""

from jaxformer import config as c


def gopher(*, model_dim: int, num_heads: int) -> c.TransformerConfig:
    """Gopher or Chinchilla: 80 layers, heads of 128.

    References:
        Rae et al., Scaling Language Models: Methods, Analysis & Insights from Training Gopher,
        2021. arXiv:2112.11446, section 3.1
        Hoffmann et al., Training Compute-Optimal Large Language Models, 2022. arXiv:2203.15556,
        section 4.1
    """
    return c.TransformerConfig(
        vocab_size=32_000,
        model_dim=model_dim,
        num_layers=80,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=128,
            positions=(c.TransformerXL(),),
        ),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="relu"),),
        norm=c.RMSNorm(),
        head=c.LMHead(tied=True),
    )


PRESETS = {
    "gopher-280b": gopher(model_dim=16_384, num_heads=128),
    "chinchilla-70b": gopher(model_dim=8192, num_heads=64),
}
