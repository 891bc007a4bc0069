"""Residual options of one stream: sums of it and of a branch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import NotNegative, Positive, Size
from jaxformer.config.parameter import Parameter
from jaxformer.config.residual.protocol import Params, Place, Residual
from jaxformer.config.tiny import shrink


def _along(vector: Array, x: Array) -> Array:
    """A number for each feature, for all tokens of x."""
    return jnp.broadcast_to(vector, x.shape)


@dataclass(frozen=True, kw_only=True)
class DeepNorm(Residual):
    """The stream multiplied by a constant: alpha * x + y, under norms after the sum ("post").

    Attributes:
        alpha: The constant, (2 * num_layers) ** 0.25 for a decoder.

    References:
        Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, 2022. arXiv:2203.00555
    """

    alpha: Positive

    def __call__(self, params: Params, x: Array, y: Array) -> Array:
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

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
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

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Add the branch by the weights of its place."""
        count = jnp.float32(2 * place.layer + (3 if place.branch == "feed_forward" else 2))
        stream, branch = jnp.sqrt(1 - 1 / count), jnp.sqrt(1 / count)
        return stream.astype(y.dtype) * held + branch.astype(y.dtype) * y


@dataclass(frozen=True, kw_only=True)
class BranchScale(Residual):
    """A learned scale of each branch, x + scale * y: LayerScale, or ReZero with one number.

    Attributes:
        over: Whether the scale is a number for each "feature" (LayerScale), or one for all of a
            "branch" (ReZero).
        start: Initial value: 0 for ReZero; small for LayerScale, the smaller the deeper the model.

    References:
        Touvron et al., Going Deeper with Image Transformers, 2021. arXiv:2103.17239, section 3
        Bachlechner et al., ReZero is All You Need: Fast Convergence at Large Depth, 2020.
        arXiv:2003.04887
    """

    over: Literal["feature", "branch"] = "feature"
    start: float = 1e-4

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The scale."""
        shape, axes = ((model_dim,), "model") if self.over == "feature" else ((1,), "features")
        return {"scale": Parameter(shape, axes, self.start)}

    def __call__(self, params: Params, x: Array, y: Array) -> Array:
        """The sum."""
        return x + _along(params["scale"], y) * y


@dataclass(frozen=True, kw_only=True)
class ResidualGate(Residual):
    """A gate of each feature between stream and branch, a * x + b * y (Muse Spark).

        b = sigmoid(gate / temperature),  a = sqrt(max(1 - b ** 2, 0.001))

    The stream keeps its size if it and the branch are independent and alike; a norm after the
    branch makes them so. Gates and sum are in float32.

    Attributes:
        temperature: Divides the gate.

    References:
        Meta, Muse Spark, 2026 (released code)
    """

    in_float32 = True

    temperature: Positive = 0.3

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The gate before its sigmoid."""
        return {"gate": Parameter((model_dim,), "model", 0.0)}

    def __call__(self, params: Params, x: Array, y: Array) -> Array:
        """The weighted sum."""
        gate = params["gate"] / self.temperature
        b = jax.nn.sigmoid(gate)
        a = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-gate) * (1 + b), 1e-3))
        total = _along(a, x) * x.astype(jnp.float32) + _along(b, y) * y.astype(jnp.float32)
        return total.astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class ResidualScaling(Residual):
    """Scales and biases of each feature of stream and branch, in a float32 stream (ZAYA).

        x = (x + stream_bias) * stream_scale + (y + branch_bias) * branch_scale

    The embeddings have a bias and a scale too. Whatever the dtype of the model, the stream is in
    float32, and branches read it in the dtype of the model.

    References:
        Zyphra, ZAYA1, 2025 (released code)
    """

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Biases and scales of stream and branch."""
        return _biases_and_scales(model_dim, "stream", "branch")

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Bias and scale of the embeddings."""
        return _biases_and_scales(model_dim, "stream")

    def begin(self, x: Array, params: Params) -> Array:
        """Return the scaled embeddings, in float32."""
        return _scaled(x, params, "stream").astype(jnp.float32)

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the stream in the dtype of the model."""
        return self.end(state, params), state

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Add the scaled branch to the scaled stream."""
        wide = {name: x.astype(jnp.float32) for name, x in params.items()}
        return _scaled(held, wide, "stream") + _scaled(y.astype(jnp.float32), wide, "branch")

    def end(self, state: Array, params: Params) -> Array:
        """Return the stream in the dtype of the model."""
        return state.astype(params["stream_scale"].dtype)


def _biases_and_scales(model_dim: int, *of: str) -> Mapping[str, Parameter]:
    starts = {"bias": 0.0, "scale": 1.0}
    return {f"{x}_{k}": Parameter((model_dim,), "model", v) for x in of for k, v in starts.items()}


def _scaled(x: Array, params: Params, name: str) -> Array:
    return (x + _along(params[f"{name}_bias"], x)) * _along(params[f"{name}_scale"], x)


@dataclass(frozen=True, kw_only=True)
class SphericalInterpolation(Residual):
    """A step from the stream towards the branch, both of length one (nGPT).

        a = unit(x);  x = a + rate * (unit(branch(a)) - a)
        rate = abs(parameter) * initial_rate / parameter_scale

    A branch has no other norm before it, and the final norm has no more to do than unit(x). nGPT
    also keeps the vectors of all matrices at length one: `OptimizerConfig.unit_vectors`.

    Attributes:
        initial_rate: First rate, of the order of one over the number of layers.
        parameter_scale: First value of the parameter; None is 1 / sqrt(model_dim). A larger scale
            makes the rates learn more slowly.
        eps: Added to the square of a length.

    References:
        Loshchilov et al., nGPT: Normalized Transformer with Representation Learning on the
        Hypersphere, 2024. arXiv:2410.01131, section 2.2
    """

    norms_input = True
    in_float32 = True

    initial_rate: Positive = 0.05
    parameter_scale: Positive | None = None
    eps: NotNegative = 1e-6

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The rates, up to a factor."""
        return {"rate": Parameter((model_dim,), "model", self._scale(model_dim))}

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the stream at length one, and hold it."""
        x = self.end(state, params)
        return x, x

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Go a part of the way to the branch."""
        rate = jnp.abs(params["rate"]) * (self.initial_rate / self._scale(y.shape[-1]))
        start, target = (x.astype(jnp.float32) for x in (held, F.unit_vectors(y, eps=self.eps)))
        return (start + _along(rate, y) * (target - start)).astype(y.dtype)

    def end(self, state: Array, params: Params) -> Array:
        """Return the stream at length one."""
        return F.unit_vectors(state, eps=self.eps)

    def _scale(self, model_dim: int) -> float:
        return self.parameter_scale or model_dim**-0.5


@dataclass(frozen=True, kw_only=True)
class Laurel(Residual):
    """A learned map of low rank beside attention, in what is added to the stream (Gemma 3n).

        n = norm(x);  x = (x + attention(n) + n + norm(n left right)) / sqrt(2)

    The norm before attention is a parameter of this option. Other branches are added as usual.

    Attributes:
        rank: Inner width of the map.
        norm_eps: Epsilon of both RMS norms.

    References:
        Menghani, Kumar and Kumar, LAuReL: Learned Augmented Residual Layer, 2024. arXiv:2411.07501,
        section 2; the norms and the constant are Gemma 3n's (released code)
    """

    norms_input = True
    tiny = shrink

    rank: Size = 64
    norm_eps: Positive = 1e-6

    def of_branch(self, branch: str) -> Residual | None:
        """Of attention only."""
        return self if branch == "attention" else None

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The norms and the map."""
        return {
            "norm": Parameter((model_dim,), "model", 1.0),
            "left": Parameter((model_dim, self.rank), "model -> features"),
            "right": Parameter((self.rank, model_dim), "features -> model"),
            "post_norm": Parameter((model_dim,), "model", 1.0),
        }

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the normalised stream; hold it and the stream."""
        x = F.rms_norm(state, params["norm"], eps=self.norm_eps)
        return x, (state, x)

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Add attention and the low-rank map of its input."""
        x, normed = held
        mapped = normed @ params["left"] @ params["right"]
        mapped = F.rms_norm(mapped, params["post_norm"], eps=self.norm_eps)
        return (x + y + normed + mapped) * jnp.asarray(0.5**0.5, x.dtype)
