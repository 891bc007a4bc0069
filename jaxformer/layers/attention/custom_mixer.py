"""Module of a custom sequence mixer (`config.Mixer`)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.checks import OptionError, shown
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.cache import get_layer, set_layer
from jaxformer.layers.custom_option import apply_option
from jaxformer.layers.runtime import RuntimeConfig


class CustomMixer(nn.Module):
    """Parameters of a custom mixer, and its call.

    Each device along `tensor` has those of its heads. A text stays on one device.
    """

    config: c.TransformerConfig
    runtime: RuntimeConfig
    keep_partial_sums: bool = False  # as in Linear

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, cache: Any = None
    ) -> tuple[Float[Array, "*batch T D"], Any]:
        """Apply the mixer; returns its output and the new cache."""
        option: Any = self.config.attention
        if (context := self.runtime.mesh_axes.context) is not None:
            raise ValueError(
                f"{type(option).__name__} mixes a text on one device; got the axis {context!r} for "
                "its time."
            )
        layer_cache = jax.tree.map(lambda a: get_layer(a, inputs.layer_index), cache)

        def broadcast_to_tokens(array: Array | None, default: int | bool) -> Array:
            return jnp.broadcast_to(default if array is None else array, x.shape[:-1])

        mixer_inputs = c.MixerInputs(
            positions=broadcast_to_tokens(inputs.query_positions, 0),
            segments=broadcast_to_tokens(inputs.segments, 0),
            valid=broadcast_to_tokens(inputs.valid, True),
        )

        def mixed(params: dict[str, Array], x: Array) -> tuple[Array, Any]:
            pair = option(params, x, mixer_inputs, layer_cache)
            if not isinstance(pair, tuple) or len(pair) != 2:
                name = type(option).__name__
                raise OptionError(f"{name} gives a pair, vectors and cache; got {shown(pair)}.")
            check_kept(option, layer_cache, pair[1])
            return pair

        y, new = apply_option(
            self, option, mixed, x, self.runtime, keep_partial_sums=self.keep_partial_sums
        )
        if cache is not None:
            new = jax.tree.map(lambda a, b: set_layer(a, b, inputs.layer_index), cache, new)
        return y, new


def check_kept(option: c.Mixer, cache: Any, new: Any) -> None:
    """Refuse a cache that is not given back as it was given: its arrays, shapes and dtypes."""

    def shape_text(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.result_type(x)}{jnp.shape(x)}", tree)

    if (before := shape_text(cache)) != (after := shape_text(new)):
        raise OptionError(
            f"{type(option).__name__} gives back its cache as it was given, here {before}; got "
            f"{after}."
        )
