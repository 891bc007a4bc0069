"""Sets of attention projections with biases, as in released models."""

from jaxformer.config.attention.multi_head import Projection

QKV: tuple[Projection, ...] = ("query", "key", "value")
QKVO: tuple[Projection, ...] = (*QKV, "out")
