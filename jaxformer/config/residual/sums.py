"""Residual options of one stream: sums of it and of a branch."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.checks import Positive
from jaxformer.config.residual.protocol import Place, Residual


@dataclass(frozen=True, kw_only=True)
class DeepNorm(Residual):
    """The stream multiplied by a constant: alpha * x + y, under norms after the sum ("post").

    Attributes:
        alpha: The constant, (2 * num_layers) ** 0.25 for a decoder.

    References:
        Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, 2022. arXiv:2203.00555
    """

    alpha: Positive

    def __call__(self, params: Mapping[str, Array], x: Array, y: Array) -> Array:
        """The sum."""
        return jnp.asarray(self.alpha, x.dtype) * x + y


@dataclass(frozen=True, kw_only=True)
class WeightedSum(Residual):
    """Constant weights of stream and branch, a * x + b * y, by the kind of branch (MiniMax).

    Attributes:
        attention: Weights a and b of branches of attention.
        recurrent: Weights a and b of recurrences instead of attention.
        feed_forward: Weights a and b of feed-forward branches.

    References:
        MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, 2025.
        arXiv:2501.08313, section 2
    """

    attention: tuple[float, float] = (1.0, 1.0)
    recurrent: tuple[float, float] = (1.0, 1.0)
    feed_forward: tuple[float, float] = (1.0, 1.0)

    def write(
        self, state: Array, held: Array, y: Array, params: Mapping[str, Array], place: Place
    ) -> Array:
        """Add the branch by the weights of its kind."""
        mixer = self.attention if place.attention.main.has_scores else self.recurrent
        pair = self.feed_forward if place.branch == "feed_forward" else mixer
        stream, branch = (jnp.asarray(weight, y.dtype) for weight in pair)
        return stream * held + branch * y


@dataclass(frozen=True, kw_only=True)
class DepthScaledSum(Residual):
    """The sum of the embedding and of all branches, over the root of their number (Beam).

        x = sqrt((n - 1) / n) * x + sqrt(1 / n) * y

    where n is 2 layer + 3 after the feed-forward network and 2 layer + 2 after any other branch, of
    layers numbered from 0. The stream keeps its size if its parts are independent and alike.

    References:
        Reflection AI, Beam 1.0, 2026 (released code)
    """

    def write(
        self, state: Array, held: Array, y: Array, params: Mapping[str, Array], place: Place
    ) -> Array:
        """Add the branch by the weights of its place."""
        count = jnp.float32(2 * place.layer + (3 if place.branch == "feed_forward" else 2))
        stream, branch = jnp.sqrt(1 - 1 / count), jnp.sqrt(1 / count)
        return stream.astype(y.dtype) * held + branch.astype(y.dtype) * y
