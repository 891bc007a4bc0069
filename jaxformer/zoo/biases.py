"""The sets of attention projections that have biases in released models."""

from jaxformer.config.attention import Projection

QKV: tuple[Projection, ...] = ("query", "key", "value")
ALL: tuple[Projection, ...] = (*QKV, "out")
