"""`ShortConvolution`: a gated causal convolution of a few tokens in place of attention."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.checks import Distinct, Size
from jaxformer.config.attention.checks import ConvolutionWidth
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape, ConvolutionCache


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(RecurrentDefaults):
    """A depthwise causal convolution of a few tokens between two gates (LFM 2).

        y = out(output_gate(x) * convolution(input_gate(x) * value(x)))

    The cache holds the last width - 1 inputs of the convolution. Documents do not affect others.

    Attributes:
        num_heads: Groups of channels; tensor parallelism shards them.
        head_dim: Channels of a group.
        width: Taps of the convolution, the present token's included; from 2 to 256.
        biases: Layers with a bias; "in" are both gates and the value.

    References:
        Liquid AI, LFM2 Technical Report, 2025. arXiv:2511.23404, section 2
    """

    num_heads: Size
    head_dim: Size
    width: ConvolutionWidth = 3
    biases: Distinct[Literal["in", "convolution", "out"]] = ()

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        return 2 * length * (4 * model_dim + self.width) * self.heads_width

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        channels = self.heads_width / tensor
        return ActivationWidths(3 * channels, 2 * channels, channels, 0)

    def empty_layer_cache(self, shape: CacheShape) -> ConvolutionCache:
        """Return the empty cache of one layer."""
        shape = shape._replace(num_slots=self.width - 1)
        return ConvolutionCache(shape.zeros(self.num_heads, self.head_dim))
