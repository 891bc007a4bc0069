"""`NoAttention`: the option of a layer that has a feed-forward network only."""

from dataclasses import dataclass

from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape
from jaxformer.config.positions import Positions


@dataclass(frozen=True, kw_only=True)
class NoAttention(RecurrentDefaults):
    """A layer without attention: x + feed_forward(norm(x)).

    References:
        NVIDIA, Nemotron-H: A Family of Accurate and Efficient Hybrid Mamba-Transformer Models,
        2025. arXiv:2504.03624, section 2.1
    """

    is_branch = False
    is_recurrent = False
    num_heads = 0
    heads_width = 0
    biases = ()

    def flops(self, model_dim: int, length: int) -> int:
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
