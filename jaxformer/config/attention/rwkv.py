"""`TimeMixing` and `ChannelMixing`: the two branches of RWKV-4, each a layer of its own."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxformer.checks import Size
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    ConvolutionCache,
    LinearAttentionCache,
)


class TokenShiftDefaults(RecurrentDefaults):
    """Base of kinds that read mixes of each token with the one before it; a head is a feature.

    Attributes:
        mixes: Names of the mixes.
    """

    mixes: tuple[str, ...]
    biases = ()
    head_dim = 1
    chunk = 0

    def empty_shift_cache(self, shape: CacheShape) -> ConvolutionCache:
        """Return room for the token before the first, which every device has."""
        return ConvolutionCache(shape._replace(num_slots=1).zeros(1, shape.model_dim))


@dataclass(frozen=True, kw_only=True)
class TimeMixing(TokenShiftDefaults):
    """An average of values under weights that decay by a rate of each feature (RWKV-4).

        x_key[t] = mix_key * x[t] + (1 - mix_key) * x[t-1], and so on
        y = wkv(W_key x_key, W_value x_value)
        out = W_out (sigmoid(W_receptance x_receptance) * y)

    (see `functional.wkv`). The rates are the exp of their parameters. Each feature is a head of
    width 1: tensor parallelism shards the features. The cache is the sums of the averages, in
    float32, and the last token. Documents do not affect others. RWKV-4 has `ChannelMixing` in
    every second layer, and no feed-forward networks.

    Attributes:
        width: Features that have an average, usually the width of the model.

    References:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023. arXiv:2305.13048,
        sections 3.1.1 and 3.1.2
    """

    width: Size

    has_decays = True
    mixes = "key", "value", "receptance"

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of features, which tensor parallelism shards."""
        return self.width

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        recurrence = 4  # two sums decay and are written
        return 2 * length * ((4 * model_dim + recurrence) * self.width + 6 * model_dim)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, features sharded over `tensor`."""
        features = self.width / tensor
        return ActivationWidths(3 * features, 4 * model_dim + 8 * features, features, 0)

    def empty_layer_cache(self, shape: CacheShape) -> LinearAttentionCache:
        """Return the empty sums of one layer, float32, and room for a token."""
        state = shape._replace(num_slots=1, dtype=jnp.float32)
        return LinearAttentionCache(state.zeros(self.width, 3), (self.empty_shift_cache(shape),))


@dataclass(frozen=True, kw_only=True)
class ChannelMixing(TokenShiftDefaults):
    """A network of each token and the one before it, under a gate (RWKV-4).

        x_key[t] = mix_key * x[t] + (1 - mix_key) * x[t-1], and so on
        out = sigmoid(W_receptance x_receptance) * (W_out relu(W_key x_key) ** 2)

    It stands in place of attention, since it has a cache: the last token. Tensor parallelism shards
    the hidden features. Documents do not affect others.

    Attributes:
        hidden_dim: Hidden features, usually four times the width of the model.

    References:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023. arXiv:2305.13048,
        section 3.1.3
    """

    hidden_dim: Size

    mixes = "key", "receptance"

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of hidden features, which tensor parallelism shards."""
        return self.hidden_dim

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        return 2 * length * model_dim * (2 * self.hidden_dim + model_dim + 4)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, hidden features sharded over `tensor`."""
        hidden = self.hidden_dim / tensor
        return ActivationWidths(hidden + model_dim, 4 * model_dim + hidden, hidden, 0)

    def empty_layer_cache(self, shape: CacheShape) -> ConvolutionCache:
        """Return room for a token."""
        return self.empty_shift_cache(shape)
