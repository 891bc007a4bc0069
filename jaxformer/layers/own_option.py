"""What an option of a person's own file makes of vectors, where devices share its parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.config.option import Parameter
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import learned, mesh_axis, read_axes


def apply_option(
    module: nn.Module,
    parameters: Mapping[str, Parameter],
    function: Callable[[dict[str, Array], Array], tuple[Array, Any]],
    x: Float[Array, "*batch T D"],
    mode: Mode,
    *,
    parts: bool,
) -> tuple[Float[Array, "*batch T D"], Any]:
    """The function of its parameters and vectors; what devices along `tensor` give is added up.

    Args:
        module: Whose the parameters are.
        parameters: What is learned.
        function: From this device's arrays and vectors to vectors, and whatever else it keeps.
        x: Vectors that all devices have.
        mode: How the model runs.
        parts: As in `Linear`: whoever calls this adds up.

    Returns:
        The vectors, and what else the function kept.

    Raises:
        ValueError: Experts, on devices that have some of them each.
    """
    axes = mode.axes
    over = [
        mesh_axis(name, size, axes)
        for one in parameters.values()
        for name, size in zip(read_axes(one.axes).names, one.shape, strict=False)
    ]
    if axes.expert is not None and axes.expert in over:
        raise ValueError(
            f"The experts of an option of one's own stay together; got the axis {axes.expert!r}."
        )
    own = {name: learned(module, name, one, mode) for name, one in parameters.items()}
    tensor = axes.tensor if axes.tensor in over else None
    y, kept = function(own, F.to_parts(x, tensor))
    if not parts:
        return F.sum_parts(y, tensor), kept
    if axes.tensor is not None and tensor is None:  # all have the whole: one of them tells it
        y = jnp.where(jax.lax.axis_index(axes.tensor) == 0, y, jnp.zeros_like(y))
    return y, kept
