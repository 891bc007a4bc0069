"""`Residual`: what flows through the depth, and the options of it that are built in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer import functional as F
from jaxformer.checks import Positive, Size
from jaxformer.config.parameter import Parameter, parse_logical_axes
from jaxformer.config.registry import Option, unimplemented_method


class Place(NamedTuple):
    """Where a residual connection stands.

    Attributes:
        layer: Number of the layer from 0, traced in a loop over layers.
        branch: "attention", "cross_attention" or "feed_forward"; "branches" of parallel branches
            whose sum is written once; "layer" of an option around whole layers.
        attention: Attention kind of the layer.
    """

    layer: Any
    branch: str
    attention: Any


class Residual(Option, protocol=True):
    """What flows through the depth, and how branches read and write it; without one, the sum x + y.

    An option has the short form `__call__`, or each of the four functions that differs:

        __call__(self, params, x, y)                 the stream after a branch, from it and y
        begin(self, x, params)                       the state, once, from the embeddings
        read(self, state, params, place)             what the branch reads, and what write needs
        write(self, state, held, y, params, place)   the state after the branch
        end(self, state, params)                     the stream, once, before the final norm

    By default begin and end are the identity, read is (state, state), and write is __call__ with
    what read held. `x` and `y` are ``[*batch, T, D]``, y after its dropout, norm and
    `residual_multiplier`. The state is any tree of arrays ``[*batch, T, ...]`` whose shapes depend
    on no layer; `inspect` shows and patches the first array as the stream. `place` is a `Place`.

        parameters(self, model_dim)                  dict from names to `Parameter`: of read, write
        model_parameters(self, model_dim)            of begin and end, once in the stack
        flops(self, model_dim, length)               FLOPs of one read and write

    A token must be treated alone: caches and context parallelism pass only some tokens. Every
    device has all of the state, so the axes of parameters are "model" and "features". Parallel
    branches whose outputs are summed first read and write once.

    Attributes:
        per: Whether read and write stand around each "branch", or around a whole "layer".
        norms_input: Whether read does what the norm before the branch would do.
        in_float32: Whether the functions take parameters in float32, whatever the dtype of x.
    """

    per: ClassVar[Literal["branch", "layer"]] = "branch"
    norms_input: ClassVar[bool] = False
    in_float32: ClassVar[bool] = False
    __call__ = unimplemented_method("__call__", "the model")

    def parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Return no parameters."""
        return {}

    def model_parameters(self, model_dim: int) -> Mapping[str, Parameter]:
        """Return no parameters."""
        return {}

    def begin(self, x: Array, params: Mapping[str, Array]) -> Any:
        """Return the embeddings as the state."""
        return x

    def read(self, state: Any, params: Mapping[str, Array], place: Place) -> tuple[Array, Any]:
        """Return the state as what the branch reads, and hold it."""
        return state, state

    def write(
        self, state: Any, held: Any, y: Array, params: Mapping[str, Array], place: Place
    ) -> Any:
        """Join what was held and the branch by the short form."""
        return self(params, held, y)

    def end(self, state: Any, params: Mapping[str, Array]) -> Array:
        """Return the state as the stream."""
        return state

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the products of the tokens with the matrices of `parameters`."""
        matrices = (x for x in self.parameters(model_dim).values() if parse_logical_axes(x.axes)[1])
        return sum(2 * length * math.prod(x.shape) for x in matrices)

    @property
    def is_short(self) -> bool:
        """Whether the stream itself is the state, and is what every branch reads."""
        own = type(self)
        return own.begin is Residual.begin and own.read is Residual.read and self.per == "branch"

    def state_width(self, model_dim: int) -> int:
        """Numbers of a token that the layers hand on."""
        x = jax.ShapeDtypeStruct((1, 1, model_dim), jnp.float32)
        params = {
            name: jax.ShapeDtypeStruct(one.shape, jnp.float32)
            for name, one in self.model_parameters(model_dim).items()
        }
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.begin, x, params)))


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


@dataclass(frozen=True, kw_only=True)
class HyperConnections(Residual):
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

    def begin(self, x: Array, params: Mapping[str, Array]) -> Array:
        """Return copies of the embedding, ``[*batch, T, streams, D]``."""
        return jnp.repeat(x[..., None, :], self.num_streams, axis=-2)

    def read(
        self, state: Array, params: Mapping[str, Array], place: Place
    ) -> tuple[Array, tuple[Array, Array]]:
        """Return the weighted sum of the streams; hold the mixed streams and the write weights."""
        number = 2 * place.layer + int(place.branch == "feed_forward")
        return F.hyper_connections(state, params, first=number % self.num_streams)

    def write(
        self,
        state: Array,
        held: tuple[Array, Array],
        y: Array,
        params: Mapping[str, Array],
        place: Place,
    ) -> Array:
        """Add the branch to the mixed streams by their weights."""
        mixed, weights = held
        return mixed + weights[..., None] * y[..., None, :]

    def end(self, state: Array, params: Mapping[str, Array]) -> Array:
        """Return the sum of the streams."""
        return jnp.sum(state, axis=-2)
