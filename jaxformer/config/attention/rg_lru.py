"""`RGLRU`: a gated linear recurrence of features behind a short convolution (Griffin)."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxformer.checks import Size
from jaxformer.config.attention.checks import ConvolutionWidth
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    ConvolutionCache,
    LinearAttentionCache,
)
from jaxformer.config.feed_forward import Activation


@dataclass(frozen=True, kw_only=True)
class RGLRU(RecurrentDefaults):
    """A real-gated linear recurrent unit, beside a gate of its output (Griffin).

        v = convolution(W_value x);    i = sigmoid(W_input v + b);    r = sigmoid(W_decay v + b')
        a[t] = exp(-8 * softplus(rate) * r[t])
        h[t] = a[t] * h[t-1] + sqrt(1 - a[t] ** 2) * i[t] * v[t]
        out = W_out (h * activation(W_gate x))

    (see `functional.rg_lru`). W_input and W_decay are block-diagonal: each head of v has matrices
    of its own. At the first position of a document the root is 1. The cache is h, in float32, and
    the last inputs of the convolution. Documents do not affect others.

    Attributes:
        num_heads: Heads; tensor parallelism shards them.
        head_dim: Width of a head.
        convolution_width: Tokens of the convolution.
        activation: Activation of the gate of the output, a name as in `MLP`.

    References:
        De et al., Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
        Language Models, 2024. arXiv:2402.19427, section 2
    """

    num_heads: Size
    head_dim: Size
    convolution_width: ConvolutionWidth = 4
    activation: Activation = "gelu_tanh"

    biases = "convolution", "in", "out"  # "in" are the value and the gate of the output
    has_decays = True
    chunk = 0

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        numbers = 3 * model_dim + 2 * self.head_dim + self.convolution_width + 1
        return 2 * length * numbers * self.heads_width

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        features = self.heads_width / tensor
        return ActivationWidths(4 * features, 4 * features, features, 0)

    def empty_layer_cache(self, shape: CacheShape) -> LinearAttentionCache:
        """Return the empty state of one layer, float32, and the inputs of its convolution."""
        heads = self.num_heads, self.head_dim
        state = shape._replace(num_slots=1, dtype=jnp.float32)
        inputs = shape._replace(num_slots=self.convolution_width - 1).zeros(*heads)
        return LinearAttentionCache(state.zeros(*heads), (ConvolutionCache(inputs),))
