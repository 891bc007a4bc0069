"""A mixer of a person's own file, as the attention branch of a layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.cache import of_layer, with_layer
from jaxformer.layers.guide import Guide
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import learned, mesh_axis, read_axes


class Mixer(nn.Module):
    """The parameters of an option, and what it makes of a text.

    Each device along `tensor` has those of its heads. A text stays on one device.
    """

    config: c.TransformerConfig
    mode: Mode
    parts: bool = False  # as in Linear

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], guide: Guide, cache: Any = None
    ) -> tuple[Float[Array, "*batch T D"], Any]:
        """What the option gives, and the cache with the new tokens where there is one."""
        option: Any = self.config.attention
        axes, declared = self.mode.axes, option.parameters(self.config.model_dim)
        if axes.context is not None:
            raise ValueError(
                f"{type(option).__name__} mixes a text on one device; got the axis "
                f"{axes.context!r} for its time."
            )
        over = [
            mesh_axis(name, size, axes)
            for one in declared.values()
            for name, size in zip(read_axes(one.axes).names, one.shape, strict=True)
        ]
        tensor = axes.tensor if axes.tensor in over else None
        params = {name: learned(self, name, one, self.mode) for name, one in declared.items()}
        kept = jax.tree.map(lambda a: of_layer(a, guide.layer), cache)

        def of_all(array: Array | None, otherwise: int | bool) -> Array:
            return jnp.broadcast_to(otherwise if array is None else array, x.shape[:-1])

        inputs = c.MixerInputs(
            positions=of_all(guide.queries, 0),
            segments=of_all(guide.segments, 0),
            valid=of_all(guide.real, True),
        )
        y, new = option(params, F.to_parts(x, tensor), inputs, kept)
        if cache is not None:
            new = jax.tree.map(lambda a, b: with_layer(a, b, guide.layer), cache, new)
        if not self.parts:
            return F.sum_parts(y, tensor), new
        if axes.tensor is not None and tensor is None:  # all have the whole: one of them tells it
            y = jnp.where(jax.lax.axis_index(axes.tensor) == 0, y, jnp.zeros_like(y))
        return y, new
