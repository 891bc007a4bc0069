"""PaLM: parallel branches under one norm, multi-query attention, logits divided by sqrt(model_dim).

The norm is LayerNorm without biases, as in the paper. The pairing of RoPE and eps are not
published: here neighbours, as in the paper it cites, and 1e-5.
"""

from jaxformer import config as c


def palm(*, model_dim: int, num_layers: int, num_heads: int) -> c.TransformerConfig:
    """SwiGLU of four times the width, multi-query attention with heads of 256, tied.

    References:
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311,
        section 2
    """
    return c.TransformerConfig(
        vocab_size=256_000,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=256,
            positions=(c.Rope(pairing="neighbours"),),
        ),
        feed_forward=(c.GLU(hidden_dim=4 * model_dim),),
        block="parallel_shared_norm",
        norm=c.LayerNorm(parameters="scale"),
        head=c.LMHead(tied=True, multiplier=model_dim**-0.5),
    )


PRESETS = {
    "palm-8b": palm(model_dim=4096, num_layers=32, num_heads=16),
    "palm-62b": palm(model_dim=8192, num_layers=64, num_heads=32),
    "palm-540b": palm(model_dim=18_432, num_layers=118, num_heads=48),
}
