"""`Residual`: what flows through the depth, and how branches read and write it."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.config.parameter import Parameter, parse_logical_axes
from jaxformer.config.registry import Option, unimplemented_method

Params = Mapping[str, Array]


class Place(NamedTuple):
    """Where a residual connection stands.

    Attributes:
        layer: Number of the layer from 0, traced in a loop over layers.
        branch: "attention", "cross_attention", "feed_forward" or "layer_embedding"; "branches" of
            parallel branches whose sum is written once; "layer" of an option around whole layers.
        attention: Attention kind of the layer.
        embedding: What `begin` got, ``[*batch, T, D]``: memory has it once for all layers.
    """

    layer: Any
    branch: str
    attention: Any
    embedding: Any = None


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
        model_flops(self, model_dim, length)         of begin and end
        of_branch(self, branch)                      the option of this branch; None is the sum

    A token must be treated alone: caches and context parallelism pass only some tokens. Every
    device has all of the state, so the axes of parameters are "model" and "features". Parallel
    branches whose outputs are summed first read and write once. The branch "layer_embedding" of
    `LayerEmbedding` is the sum in the layer's stream, unless `of_branch` has an option for it; that
    one reads and writes the state after the layer.

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

    def begin(self, x: Array, params: Params) -> Any:
        """Return the embeddings as the state."""
        return x

    def read(self, state: Any, params: Params, place: Place) -> tuple[Array, Any]:
        """Return the state as what the branch reads, and hold it."""
        return state, state

    def write(self, state: Any, held: Any, y: Array, params: Params, place: Place) -> Any:
        """Join what was held and the branch by the short form."""
        return self(params, held, y)

    def end(self, state: Any, params: Params) -> Array:
        """Return the state as the stream."""
        return state

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of the products of the tokens with the matrices of `parameters`."""
        return _matrix_flops(self.parameters(model_dim), length)

    def model_flops(self, model_dim: int, length: int) -> int:
        """FLOPs of begin and end, by the matrices of `model_parameters`."""
        return _matrix_flops(self.model_parameters(model_dim), length)

    def of_branch(self, branch: str) -> "Residual | None":
        """The option that joins a branch, or the whole "layer"; None is the sum."""
        if branch == "layer_embedding":
            return None
        return self if (self.per == "layer") == (branch == "layer") else None

    def resized(self, num_layers: int) -> "Residual":
        """Return the option at test size, for another number of layers."""
        return self.tiny()

    @property
    def is_short(self) -> bool:
        """Whether the stream itself is the state, and is what every branch reads."""
        own = type(self)
        return own.begin is Residual.begin and own.read is Residual.read and self.per == "branch"

    def state_shapes(self, model_dim: int) -> Any:
        """Shapes of the state of one token, ``[1, 1, ...]``."""
        x = jax.ShapeDtypeStruct((1, 1, model_dim), jnp.float32)
        params = {
            name: jax.ShapeDtypeStruct(one.shape, jnp.float32)
            for name, one in self.model_parameters(model_dim).items()
        }
        return jax.eval_shape(self.begin, x, params)

    def saved_width(self, model_dim: int) -> int:
        """Numbers of a token that each layer saves for its backward pass, besides the stream."""
        return self.state_width(model_dim) - model_dim

    def shared_width(self, model_dim: int) -> int:
        """Numbers of a token that memory has once for all layers, with their gradients."""
        return 0

    def state_width(self, model_dim: int) -> int:
        """Numbers of a token that the layers hand on."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state_shapes(model_dim)))


def _matrix_flops(parameters: Mapping[str, Parameter], length: int) -> int:
    matrices = (x for x in parameters.values() if parse_logical_axes(x.axes)[1])
    return sum(2 * length * math.prod(x.shape) for x in matrices)
