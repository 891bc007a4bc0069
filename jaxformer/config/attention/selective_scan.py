"""`SelectiveScan`: a state per feature that decays by a step of its own (Mamba 1)."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxformer.checks import Distinct, Size
from jaxformer.config.attention.checks import ConvolutionWidth
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    ConvolutionCache,
    LinearAttentionCache,
)
from jaxformer.config.norms import Norm


@dataclass(frozen=True, kw_only=True)
class SelectiveScan(RecurrentDefaults):
    """A selective state space: each feature has a state, whose decay depends on the token.

        v = silu(convolution(W_value x));    r, B, C = split(W_selection v)
        step = softplus(W_step norm(r) + bias)
        h[t, c] = exp(-exp(rate[c]) * step[t, c]) * h[t-1, c] + step[t, c] * v[t, c] * norm(B[t])
        y[t, c] = h[t, c] . norm(C[t]) + skip[c] * v[t, c];    out = W_out (y * silu(W_gate x))

    (see `functional.selective_scan`). Each feature is a head of width 1: tensor parallelism shards
    the features. The cache is h, in float32, and the last inputs of the convolution. Documents do
    not affect others.

    Attributes:
        width: Features that have a state, usually twice the width of the model.
        step_rank: Width of r, from which the steps are projected.
        state_dim: Size of each feature's state.
        norm: Norms of r, B and C; None is none (Mamba). Jamba has RMSNorm, Falcon Mamba RMSNorm
            without parameters.
        convolution_width: Width of the convolution in tokens.
        biases: Layers with a bias; "in" are the value and the gate.

    References:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
        arXiv:2312.00752, sections 3.2 and 3.4
        Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model, 2024. arXiv:2403.19887,
        section 6.4 (norms)
    """

    width: Size
    step_rank: Size
    state_dim: Size = 16
    norm: Norm | None = None
    convolution_width: ConvolutionWidth = 4
    biases: Distinct[Literal["in", "convolution", "out"]] = ("convolution",)

    has_decays = True
    head_dim = 1
    chunk = 0

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """Number of features, which tensor parallelism shards."""
        return self.width

    @property
    def selection_width(self) -> int:
        """Width of r, B and C together."""
        return self.step_rank + 2 * self.state_dim

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer, including its projections."""
        kernels = 3 * model_dim + self.selection_width + self.step_rank
        recurrence = 3 * self.state_dim  # decay, write and read
        return 2 * length * (kernels + self.convolution_width + recurrence) * self.width

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, features sharded over `tensor`."""
        features = self.width / tensor
        return ActivationWidths(3 * features + self.selection_width, 10 * features, features, 0)

    def empty_layer_cache(self, shape: CacheShape) -> LinearAttentionCache:
        """Return the empty state of one layer, float32, and the inputs of its convolution."""
        state = shape._replace(num_slots=1, dtype=jnp.float32)
        inputs = shape._replace(num_slots=self.convolution_width - 1).zeros(self.width, 1)
        return LinearAttentionCache(
            state.zeros(self.width, self.state_dim), (ConvolutionCache(inputs),)
        )
