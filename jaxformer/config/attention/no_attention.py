"""`NoAttention`: the option of a layer that has a feed-forward network only."""

from dataclasses import dataclass

from jaxformer.config.attention.defaults import AttentionDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape
from jaxformer.config.positions import Positions, Window


@dataclass(frozen=True, kw_only=True)
class NoAttention(AttentionDefaults):
    """A layer without attention: x + feed_forward(norm(x)).

    References:
        NVIDIA, Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models,
        2025. arXiv:2504.03624, section 2.1
    """

    is_branch = False
    has_scores = False
    has_weights = False
    num_heads = 0
    rope_head_dim = 0
    heads_width = 0
    biases = ()

    @property
    def positions(self) -> tuple[None, ...]:
        """(None,): there are no positions."""
        return (None,)

    @property
    def windows(self) -> tuple[Window, ...]:
        """(1,): there is no cache."""
        return (1,)

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """0."""
        return 0

    def activation_widths(
        self, model_dim: int, positions: Positions | None, tensor: int
    ) -> ActivationWidths:
        """Zeros."""
        return ActivationWidths(0, 0, 0, 0)

    def empty_layer_cache(self, positions: Positions | None, shape: CacheShape) -> tuple[()]:
        """Return a cache without arrays."""
        return ()

    def tiny(self) -> "NoAttention":
        """Return the option at test size: the same."""
        return self
