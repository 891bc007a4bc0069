"""`NoAttention`: the option of a layer that has a feed-forward network only."""

from dataclasses import dataclass

from jaxformer.config.attention.defaults import SideBySide


@dataclass(frozen=True, kw_only=True)
class NoAttention(SideBySide):
    """A layer without attention: x + feed_forward(norm(x)).

    References:
        NVIDIA, Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models,
        2025. arXiv:2504.03624, section 2.1
    """

    has_scores = has_weights = False
    parts = ()
    positions = (None,)
    windows = (1,)
