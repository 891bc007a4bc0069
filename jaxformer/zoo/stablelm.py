"""StableLM 2: LayerNorms and a quarter of each head rotated; parallel branches at 12B."""

from dataclasses import replace

from jaxformer import config as c
from jaxformer.zoo.projection_biases import QKV

NORM = c.LayerNorm(eps=1e-5)


def stablelm_2(
    *, model_dim: int, num_layers: int, num_kv_heads: int, hidden_dim: int
) -> c.TransformerConfig:
    """32 heads.

    References:
        Bellagente et al., Stable LM 2 1.6B Technical Report, 2024. arXiv:2402.17834, section 3
    """
    return c.TransformerConfig(
        vocab_size=100_352,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=c.MultiHead(
            num_heads=32,
            num_kv_heads=num_kv_heads,
            head_dim=model_dim // 32,
            positions=(c.Rope(fraction=0.25),),
        ),
        feed_forward=(c.GLU(hidden_dim=hidden_dim),),
        norm=NORM,
    )


def stablelm_2_1_6b() -> c.TransformerConfig:
    """Serial blocks, biases of queries, keys and values."""
    body = stablelm_2(model_dim=2048, num_layers=24, num_kv_heads=32, hidden_dim=5632)
    return replace(body, attention=replace(body.multi_head, biases=QKV))


def stablelm_2_12b() -> c.TransformerConfig:
    """Both branches under one norm, and QK-norm with a scale for each head."""
    body = stablelm_2(model_dim=5120, num_layers=40, num_kv_heads=8, hidden_dim=13_824)
    qk_norm = c.QKNorm(norm=replace(NORM, parameters="scale"), over="each_head")
    return replace(
        body, attention=replace(body.multi_head, qk_norm=qk_norm), block="parallel_shared_norm"
    )


PRESETS = {"stablelm-2-1.6b": stablelm_2_1_6b(), "stablelm-2-12b": stablelm_2_12b()}
YEARS = dict.fromkeys(PRESETS, 2024)
