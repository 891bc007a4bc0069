"""What an option of a person's own file learns, and makes of vectors, on one device or several."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.checks import named_errors, require_like
from jaxformer.config import FanIn, FeedForward, Initialiser, Mixer, ScoreBias, Zeros
from jaxformer.config.parameter import Parameter, read_axes
from jaxformer.layers.initializers import initializer
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import mesh_axes, parameter


def learned(
    module: nn.Module,
    option: FeedForward | Mixer | ScoreBias,
    declared: Mapping[str, Parameter],
    mode: Mode,
) -> dict[str, Float[Array, "..."]]:
    """The parameters of an option by name, as `parameter` gives them."""
    return {
        name: parameter(
            module,
            name,
            _start(f"{type(option).__name__}'s start of {name!r}", one),
            one.shape,
            one.axes,
            mode,
            dtype=mode.dtype,
        )
        for name, one in declared.items()
    }


def _start(giver: str, declared: Parameter) -> Callable[..., Array]:
    """The initialiser of a parameter."""
    axes, start = read_axes(declared.axes), declared.start
    if start is None:
        start = FanIn() if axes.outputs else Zeros()
    if isinstance(start, Initialiser):
        return initializer(start, axes=axes.inputs)
    if not callable(start):
        return nn.initializers.constant(start)

    def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        with named_errors(giver):
            numbers = jnp.asarray(start(key, shape, dtype))
        require_like(giver, "an array", numbers, shape, jnp.dtype(dtype))
        return numbers

    return draw


def apply_option(
    module: nn.Module,
    option: FeedForward | Mixer,
    function: Callable[[dict[str, Array], Array], tuple[Array, Any]],
    x: Float[Array, "*batch T D"],
    mode: Mode,
    *,
    parts: bool,
) -> tuple[Float[Array, "*batch T D"], Any]:
    """Apply a custom option to x, and sum its outputs over tensor-parallel devices.

    Args:
        module: Whose the parameters are.
        option: Which says what is learned.
        function: From this device's arrays and vectors to vectors, and whatever else it keeps.
        x: Vectors that all devices have.
        mode: How the model runs.
        parts: As in `Linear`: whoever calls this adds up.

    Returns:
        The vectors, and what else the function kept.

    Raises:
        ValueError: Experts, on devices that have some of them each; a result that is not of the
            shape and dtype of the vectors.
    """
    axes, declared = mode.axes, option.parameters(x.shape[-1])
    over = [
        axis
        for one in declared.values()
        for axis in mesh_axes(read_axes(one.axes).names, one.shape, axes)
    ]
    if axes.expert is not None and axes.expert in over:
        raise ValueError(
            f"The experts of an option of one's own stay together; got the axis {axes.expert!r}."
        )
    params = learned(module, option, declared, mode)
    tensor = axes.tensor if axes.tensor in over else None
    y, kept = function(params, F.to_parts(x, tensor))
    require_like(type(option).__name__, "[rows, tokens, width]", y, x.shape, x.dtype)
    if not parts:
        return F.sum_parts(y, tensor), kept
    if axes.tensor is not None and tensor is None:  # all have the whole: one of them tells it
        y = jnp.where(jax.lax.axis_index(axes.tensor) == 0, y, jnp.zeros_like(y))
    return y, kept
