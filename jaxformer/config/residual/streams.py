"""Residual options of several streams: branches read a mixture and write to all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import NotNegative, Positive, Size, require
from jaxformer.config.parameter import Parameter
from jaxformer.config.residual.protocol import Params, Place, Residual
from jaxformer.config.tiny import shrink


class Streams(Residual, protocol=True):
    """Streams that begin as copies of the embedding, and take a branch's output by weights."""

    num_streams: Size

    def begin(self, x: Array, params: Params) -> Array:
        """Return copies of the embedding, ``[*batch, T, streams, D]``."""
        return jnp.repeat(x[..., None, :], self.num_streams, axis=-2)

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Add the branch to the mixed streams by their weights, in the weights' dtype."""
        mixed, weights = held
        wide = mixed.astype(weights.dtype), y.astype(weights.dtype)
        return (wide[0] + weights[..., None] * wide[1][..., None, :]).astype(y.dtype)


@dataclass(frozen=True, kw_only=True)
class HyperConnections(Streams):
    """Several streams: each branch reads a weighted sum of them and writes to each with a weight.

        x = sum over i of a[i] h[i]
        h[k] = sum over i of A[i, k] h[i] + b[k] branch(x)

    The streams begin as copies of the embedding, and their sum is what the final norm reads. At
    first a branch reads one stream, each branch the next, and writes to all: A is the identity and
    b is one, which is the sum x + y in each stream. With `dynamic`, tanh of a product with the
    normalised streams, times a learned scale, is added to each weight (`F.hyper_connections`).

    Attributes:
        num_streams: Streams of a token.
        dynamic: Whether weights depend on the streams.

    References:
        Zhu et al., Hyper-Connections, 2024. arXiv:2409.19606, sections 2 and 3, appendix J
    """

    in_float32 = True

    num_streams: Size = 2
    dynamic: bool = True

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of reading, mixing and writing, and the maps from the streams to them."""
        n, features = self.num_streams, "features features"
        static = {
            "read": Parameter((n,), "features", 0.0),
            "mix": Parameter((n, n), features, 0.0),
            "write": Parameter((n,), "features", 1.0),
        }
        if not self.dynamic:
            return static
        return static | {
            "norm": Parameter((model_dim,), "model", 1.0),
            "weights": Parameter((model_dim, n + 2), "model -> features", 0.0),
            "input_scale": Parameter((1,), "features", 0.01),
            "output_scale": Parameter((1,), "features", 0.01),
        }

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the weighted sum of the streams; hold the mixed streams and the write weights."""
        number = 2 * place.layer + int(place.branch == "feed_forward")
        return F.hyper_connections(state, params, first=number % self.num_streams)

    def end(self, state: Array, params: Params) -> Array:
        """Return the sum of the streams."""
        return jnp.sum(state, axis=-2)


def _weights_of_streams(model_dim: int, num_streams: int, starts: tuple[Any, ...]) -> Any:
    """Parameters of weights of all streams: a kernel, and starts and a scale of each group."""
    n, base = num_streams, np.concatenate([np.ravel(x) for x in starts])
    return {
        "kernel": Parameter((n, model_dim, base.size), "features model -> features"),
        "scale": Parameter((len(starts),), "features", 0.01),
        "base": Parameter(base.shape, "features", lambda _, shape, dtype: jnp.asarray(base, dtype)),
    }


@dataclass(frozen=True, kw_only=True)
class SigmoidStreams(Streams, protocol=True):
    """Streams whose sum at the end, and that a branch reads, has weights by sigmoids.

    Attributes:
        num_streams: Streams of a token.
        eps: Added to weights and sums.
        norm_eps: Epsilon of the norm of all streams.
    """

    in_float32 = True

    num_streams: Size = 4
    eps: NotNegative = 1e-6
    norm_eps: Positive = 1e-6

    @property
    def start(self) -> np.ndarray:
        """Biases with which the weights of the streams are one over their number."""
        return np.full(self.num_streams, -np.log(max(self.num_streams - 1, 1e-3)))

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of the sum at the end."""
        return _weights_of_streams(model_dim, self.num_streams, (self.start,))

    def end(self, state: Array, params: Params) -> Array:
        """Return the weighted sum of the streams."""
        return F.weighted_streams(state, params, eps=self.eps, norm_eps=self.norm_eps)


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(SigmoidStreams):
    """Hyper-connections whose mixture of streams is doubly stochastic (mHC; DeepSeek V4).

        x = sum over i of a[i] h[i]
        h[k] = sum over i of C[i, k] h[i] + b[k] branch(x)

    where a, b and C depend on all streams, a and b by sigmoids, and rows and columns of C sum to
    one by Sinkhorn's iterations (`F.manifold_hyper_connections`). The streams begin as copies of
    the embedding. At first a is nearly one over their number and b is nearly one, which is the sum
    x + y in each stream.

    Attributes:
        iterations: Iterations of Sinkhorn's algorithm.
        output: What the final norm reads: a "weighted" sum of the streams, or their "mean".

    References:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2025. arXiv:2512.24880, section 4
    """

    iterations: Size = 20
    output: Literal["weighted", "mean"] = "weighted"

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of reading, writing and mixing."""
        n = self.num_streams
        return _weights_of_streams(model_dim, n, (self.start, np.zeros(n), 4 * np.eye(n)))

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of the sum at the end; the mean has none."""
        return {} if self.output == "mean" else super().model_parameters(model_dim)

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the weighted sum of the streams; hold the mixed streams and the write weights."""
        return F.manifold_hyper_connections(
            state, params, iterations=self.iterations, eps=self.eps, norm_eps=self.norm_eps
        )

    def end(self, state: Array, params: Params) -> Array:
        """Return the weighted sum or the mean of the streams."""
        return jnp.mean(state, axis=-2) if self.output == "mean" else super().end(state, params)


@dataclass(frozen=True, kw_only=True)
class IdentityHyperConnections(SigmoidStreams):
    """Hyper-connections that mix no streams: each keeps what it has (Hunyuan 4).

        x = sum over i of a[i] h[i]
        h[k] = h[k] + b[k] branch(x)

    where a and b depend on all streams by sigmoids (`F.identity_hyper_connections`). The streams
    begin as copies of the embedding, and a sum with weights alike is what the final norm reads. At
    first a is nearly one over their number and b is nearly half of `magnitude`.

    Attributes:
        magnitude: Largest weight b.

    References:
        Tencent, Hunyuan 4, 2026 (released code)
    """

    magnitude: Positive = 2.0

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Weights of reading and writing."""
        starts = self.start, np.zeros(self.num_streams)
        return _weights_of_streams(model_dim, self.num_streams, starts)

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the weighted sum of the streams; hold the streams and the write weights."""
        return F.identity_hyper_connections(
            state, params, magnitude=self.magnitude, eps=self.eps, norm_eps=self.norm_eps
        )


@dataclass(frozen=True, kw_only=True)
class GatedStreams(Streams):
    """Streams that are normalised and gated feature by feature before each branch (Qwen 4).

        x = mean over i of A[i] * N(h)[i]
        h[k] = h[k] + b[k] branch(x)

    where the gates A, of low rank, and b depend on all normalised streams (`F.gated_streams`). A
    branch has no other norm before it. The streams begin as copies of the embedding, and one more
    such mean is the stream at the end, so released models have no final norm. At first b is one.

    Attributes:
        num_streams: Streams of a token.
        rank: Hidden width of the gates.
        norm_eps: Epsilon of the norm of each stream.

    References:
        Qwen, Qwen 4 (experimental), 2026 (released code)
    """

    norms_input = True
    tiny = shrink

    num_streams: Size = 4
    rank: Size = 320
    norm_eps: Positive = 1e-6

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Norm and gates of the mean at the end."""
        n, rank = self.num_streams, self.rank
        return {
            "norm": Parameter((n, model_dim), "features model", 0.0),
            "down": Parameter((n, model_dim, rank), "features model -> features"),
            "up": Parameter((rank, n, model_dim), "features -> features model"),
        }

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Norm and gates of what a branch reads, and weights of what it writes."""
        n = self.num_streams
        write = Parameter((n, model_dim, n), "features model -> features", 0.0)
        return {**self.model_parameters(model_dim), "write": write}

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the gated mean of the normalised streams; hold the streams and write weights."""
        x, weights = F.gated_streams(state, params, eps=self.norm_eps)
        return x, (state, weights)

    def end(self, state: Array, params: Params) -> Array:
        """Return the gated mean of the normalised streams."""
        return F.gated_streams(state, params, eps=self.norm_eps)[0]


@dataclass(frozen=True, kw_only=True)
class OtherStreams(Residual):
    """A branch reads the first of several streams, and all others get its output (Gemma 3n).

        h[i] = h[i] + branch(scale * h[0]),  i > 0

    References:
        Gemma team, Gemma 3n, 2025. https://ai.google.dev/gemma/docs/gemma-3n
    """

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """The scale."""
        return {"scale": Parameter((model_dim,), "model", 1.0)}

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the scaled first stream; hold all."""
        first = state[..., 0, :]
        return first * jnp.broadcast_to(params["scale"], first.shape), state

    def write(self, state: Any, held: Array, y: Array, params: Params, place: Place) -> Array:
        """Add the branch to all streams but the first."""
        output = jnp.broadcast_to(y[..., None, :], held[..., 1:, :].shape)
        return jnp.concatenate([held[..., :1, :], held[..., 1:, :] + output], axis=-2)


@dataclass(frozen=True, kw_only=True)
class AltUp(Residual):
    """A wider state, of which a layer changes one stream and corrects the others by it (Gemma 3n).

    Each layer runs on the first of the streams that are predicted from those before it, with the
    plain sum inside, and each stream moves by a share of what the layer's output differs from this
    prediction (`F.altup_predict`, `F.altup_correct`). Further streams begin as projections of the
    embedding of the embedding's length. At the end they are projected back, again of one length,
    and the mean of all is the stream. At first each stream is predicted as it is, and moves by all.

    Attributes:
        num_streams: Streams of a token.
        branches: How the branches inside a layer join its stream; None is their sum.
        layer_embedding: How the branch of `LayerEmbedding` reads and joins the streams after a
            layer; None adds it to the layer's stream.
        norm_eps: Epsilon of the router's norm.

    References:
        Baykal et al., Alternating Updates for Efficient Transformers, 2023. arXiv:2301.13310,
        section 3
    """

    per = "layer"
    tiny = shrink

    num_streams: Size = 4
    branches: Residual | None = None
    layer_embedding: Residual | None = None
    norm_eps: Positive = 1e-6

    def __post_init__(self):
        super().__post_init__()
        inner = self.branches
        is_plain = inner is None or (inner.per == "branch" and type(inner).begin is Residual.begin)
        require(is_plain, f"AltUp.branches must have one stream; got {inner}.")

    def of_branch(self, branch: str) -> Residual | None:
        """Itself around a layer, `branches` inside, and `layer_embedding` after it."""
        if branch == "layer_embedding":
            return self.layer_embedding
        return self if branch == "layer" else self.branches and self.branches.of_branch(branch)

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Router, and the maps from it to weights of prediction and correction."""
        n = self.num_streams
        return {
            "norm": Parameter((model_dim,), "model", 1.0),
            "router": Parameter((model_dim, n), "model -> features"),
            "predict": Parameter((n, n, n), "features -> features features", 0.0),
            "correct": Parameter((n, n), "features -> features", 0.0),
        }

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Projections to the further streams and back."""
        matrix = Parameter((model_dim, model_dim), "model -> features")
        names = "project", "unproject"
        return {f"{name}_{i}": matrix for name in names for i in range(1, self.num_streams)}

    def begin(self, x: Array, params: Params) -> Array:
        """Return the embedding, and its projections of the same length."""
        return jnp.stack([x, *self._projected([x] * self.num_streams, params, "project")], axis=-2)

    def read(self, state: Array, params: Params, place: Place) -> tuple[Array, Array]:
        """Return the first stream of the prediction; hold the prediction."""
        predicted = F.altup_predict(state, params, eps=self.norm_eps)
        return predicted[..., 0, :], predicted

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Array:
        """Correct the predicted streams by the layer's output."""
        return F.altup_correct(held, y, params, eps=self.norm_eps)

    def end(self, state: Array, params: Params) -> Array:
        """Return the mean of the first stream and of the others, projected to its length."""
        streams = [state[..., i, :] for i in range(self.num_streams)]
        projected = self._projected(streams, params, "unproject")
        return jnp.mean(jnp.stack([streams[0], *projected]), axis=0)

    def _projected(self, streams: list[Array], params: Params, name: str) -> Any:
        """Projections of all streams but the first, of the first's length."""
        for i, stream in enumerate(streams[1:], start=1):
            yield F.match_length(stream @ params[f"{name}_{i}"], streams[0])
