"""OPT: GPT with ReLU; position table offset by 2 rows, vocabulary padded to 50,272."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.gpt import gpt


def opt(*, model_dim: int, num_layers: int, num_heads: int) -> c.TransformerConfig:
    """Pre-norm with biases everywhere but on the tied head.

    References:
        Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022. arXiv:2205.01068,
        section 2.1
    """
    return replace(
        gpt(vocab_size=50_272, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="relu", bias=True),),
        embedding=c.Embedding(positions=c.Learned(max_length=2048, offset=2)),
    )


def opt_350m() -> c.TransformerConfig:
    """OPT-350m: post-norm, no final norm, embedding width 512."""
    body = opt(model_dim=1024, num_layers=24, num_heads=16)
    return replace(
        body, norm_placement="post", final_norm=False, embedding=replace(body.embedding, dim=512)
    )


PRESETS = {
    "opt-125m": opt(model_dim=768, num_layers=12, num_heads=12),
    "opt-350m": opt_350m(),
    "opt-1.3b": opt(model_dim=2048, num_layers=24, num_heads=32),
    "opt-6.7b": opt(model_dim=4096, num_layers=32, num_heads=32),
    "opt-175b": opt(model_dim=12_288, num_layers=96, num_heads=96),
}
