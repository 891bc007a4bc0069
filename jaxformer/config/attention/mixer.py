"""`Mixer`: the protocol of custom sequence mixers that replace attention."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int

from jaxformer.checks import require
from jaxformer.config.attention.defaults import RecurrentDefaults
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape
from jaxformer.config.parameter import projected_width
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.config.tiny import TINY_HEAD_DIM


class MixerInputs(NamedTuple):
    """Inputs of a mixer besides the token vectors: positions, segments, and which tokens are valid.

    Attributes:
        positions: Position of each token.
        segments: Document number of each token; with a cache there is one document.
        valid: False for padding, which must not change the cache.
    """

    positions: Int[Array, "*batch T"]
    segments: Int[Array, "*batch T"]
    valid: Bool[Array, "*batch T"]


class Mixer(Option, RecurrentDefaults, protocol=True):
    """A custom sequence mixer that replaces attention in every layer.

    An option has a field `num_heads` and these methods; the last two are optional:

        parameters(self, model_dim)       dict from names to `Parameter`
        __call__(self, params, x, inputs, cache)
                                          from [*batch, T, D] to [*batch, T, D], and the cache
        empty_cache(self, batch, capacity, dtype)
                                          arrays [*batch, heads, ...], which `generate` needs
        flops(self, model_dim, length)    FLOPs of the matrix products for one sequence

    A token may depend only on itself and on earlier tokens of its document (`inputs.segments`).
    `params` are the arrays by name, in the dtype of the computation. Under tensor parallelism each
    device gets its shard of "heads", and the outputs of the devices are summed: so the last matrix
    product must contract "heads". The sequence is not sharded: a mesh with a context axis is an
    error. In training the cache is None, and None is returned.

    `capacity` is 1 for a recurrent state. A cache with one slot per token sets `windows = (None,)`;
    then `capacity` is its number of slots, and longer sequences are an error.
    """

    num_heads: int
    shards_sequence = False
    biases = ()
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    empty_cache = unimplemented_method("empty_cache", "a cache")
    flops = unimplemented_method("flops", "costs")

    def __post_init__(self) -> None:
        """Check `num_heads` and `windows`."""
        super().__post_init__()
        name, heads = type(self).__name__, getattr(self, "num_heads", None)
        require(
            type(heads) is int and heads > 0,
            f"{name}.num_heads must be an integer of at least 1; got {heads!r}.",
        )
        require(
            self.windows in ((1,), (None,)),
            f"{name}.windows must be (1,), for a recurrent state, or (None,), for one cache slot "
            f"per token; got {self.windows!r}.",
        )

    @property
    def heads_width(self) -> int:
        """Total width of all heads at test size; a mixer does not declare another."""
        return self.num_heads * TINY_HEAD_DIM

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        products = projected_width(self.parameters(model_dim)) / tensor
        return ActivationWidths(products, 2 * products, products, 0)

    def empty_layer_cache(self, shape: CacheShape) -> Any:
        """Return the empty cache of one layer."""
        return self.empty_cache(shape.batch, shape.num_slots, shape.dtype)
