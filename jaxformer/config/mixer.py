"""`Mixer`: the protocol for your own sequence mixer in the place of attention."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from jaxformer.checks import require
from jaxformer.config.positions import Window
from jaxformer.config.registry import Option, unimplemented_method


class MixerInputs(NamedTuple):
    """What a mixer gets besides the token vectors: positions, segments, and which tokens are valid.

    Attributes:
        positions: Of each token.
        segments: The document of each, a number; with a cache there is one document.
        valid: Which tokens are no padding. Padding leaves a cache as it was.
    """

    positions: Int[Array, "*batch T"]
    segments: Int[Array, "*batch T"]
    valid: Bool[Array, "*batch T"]


class Mixer(Option, protocol=True):
    """A custom sequence mixer, used in every layer in the place of attention.

    An option has a field `num_heads` and these methods; the last two may be left out:

        parameters(self, model_dim)           names of what is learned, a `Parameter` each
        __call__(self, params, x, inputs, cache)
                                              [*batch, T, D] from [*batch, T, D], and the cache
        empty_cache(self, batch, room, dtype) arrays [*batch, heads, ...] that `generate` hands on
        flops(self, model_dim, length)        of the products for one text, for costs and plans

    A token is to see itself and those before it in its own document (`inputs.segments`), no others.
    `params` are the arrays by name, in the dtype of the computation. Where several devices share
    "heads", each is given those of its own, and what they give is added up: so the last product is
    one with "heads" among its inputs. The cache is None in training, and given back so.

    `room` is 1, for a state. A cache with a place for each token sets `windows = (None,)`; then
    `room` is how many there may be, and more are refused.
    """

    num_heads: int
    biases = ()
    positions = (None,)
    rope_head_dim = 0
    windows: tuple[Window, ...] = (1,)
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "the model")
    empty_cache = unimplemented_method("empty_cache", "a cache")
    flops = unimplemented_method("flops", "costs")

    def __post_init__(self) -> None:
        """Refuse heads and windows that nothing can follow from."""
        super().__post_init__()
        name, heads = type(self).__name__, getattr(self, "num_heads", None)
        require(
            type(heads) is int and heads > 0,
            f"{name}.num_heads must be a whole number of at least 1; got {heads!r}.",
        )
        require(
            self.windows in ((1,), (None,)),
            f"{name}.windows is (1,), for a state, or (None,), for a place for each token; "
            f"got {self.windows!r}.",
        )
