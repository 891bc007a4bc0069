"""Module of a custom sequence mixer (`config.Mixer`)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.checks import OptionError, shown
from jaxformer.layers.attention.core import AttentionModule
from jaxformer.layers.cache import NO_STATE, LayerState, get_layer, set_layer
from jaxformer.layers.custom_option import apply_option


class CustomMixer(AttentionModule):
    """Parameters of a custom mixer, and its call.

    Heads are sharded over `tensor`. Sequences are not sharded.
    """

    attention: c.Mixer

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Apply the mixer; returns its output and the new state."""
        option: Any = self.attention
        cache, cache_update = state.cache, state.cache_update
        if (context := self.runtime.mesh_axes.context) is not None:
            raise ValueError(
                f"{type(option).__name__} is recurrent over the sequence, which cannot be sharded; "
                f"got the context axis {context!r}."
            )
        layer_cache = jax.tree.map(lambda a: get_layer(a, cache_update), cache)
        # By default, one document and no padding.
        arrays = (d if a is None else a for a, d in zip(inputs, (0, 0, True), strict=True))
        token_inputs = c.MixerInputs(*(jnp.broadcast_to(a, x.shape[:-1]) for a in arrays))

        def mixed(params: dict[str, Array], x: Array) -> tuple[Array, Any]:
            pair = option(params, x, token_inputs, layer_cache)
            if not isinstance(pair, tuple) or len(pair) != 2:
                name = type(option).__name__
                raise OptionError(f"{name} must return (vectors, cache); got {shown(pair)}.")
            check_returned_cache(option, layer_cache, pair[1])
            return pair

        y, new = apply_option(self, option, mixed, x, keep_partial_sums=self.keep_partial_sums)
        if cache is not None:
            new = jax.tree.map(lambda a, b: set_layer(a, b, cache_update), cache, new)
        return y, state._replace(cache=new)


def check_returned_cache(option: c.Mixer, cache: Any, new: Any) -> None:
    """Check that the returned cache has the structure, shapes and dtypes of the input."""

    def shape_text(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{jnp.shape(x)}", tree)

    if (before := shape_text(cache)) != (after := shape_text(new)):
        raise OptionError(
            f"{type(option).__name__} must return a cache like its input, {before}; got {after}."
        )
