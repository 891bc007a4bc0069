"""LaMDA: sizes, relative positions and gated activation as published; the rest as in T5 v1.1."""

from jaxformer import config as c


def lamda() -> c.TransformerConfig:
    """LaMDA: decoder with T5 relative position bias and GeGLU.

    Norm, its position, the scale of the scores and the head are not published: they are as in
    T5 v1.1.

    References:
        Thoppilan et al., LaMDA: Language Models for Dialog Applications, 2022. arXiv:2201.08239,
        section 3
    """
    return c.TransformerConfig(
        vocab_size=32_000,
        model_dim=8192,
        num_layers=64,
        attention=c.MultiHead(
            num_heads=128, num_kv_heads=128, head_dim=128, positions=(c.T5Bias(),), scale=1.0
        ),
        feed_forward=(c.GLU(hidden_dim=65_536, activation="gelu_tanh"),),
        norm=c.RMSNorm(eps=1e-6),
    )


PRESETS = {"lamda-137b": lamda()}
