"""Parameters of custom options, and their application to sharded vectors."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.checks import named_errors, require_like
from jaxformer.config import FanIn, FeedForward, Mixer, Residual, ScoreBias, Zeros
from jaxformer.config.parameter import Parameter, parse_logical_axes
from jaxformer.layers.parameters import initializer, mesh_axes, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig


def option_parameters(
    module: nn.Module,
    option: FeedForward | Mixer | Residual | ScoreBias,
    declared: Mapping[str, Parameter],
    dtype: DTypeLike,
) -> dict[str, Float[Array, "..."]]:
    """Declare the parameters of an option; return this device's shards by name."""
    return {
        name: sharded_parameter(
            module,
            name,
            _initialiser(f"{type(option).__name__}'s start of {name!r}", one),
            one.shape,
            one.axes,
            dtype=dtype,
        )
        for name, one in declared.items()
    }


def _initialiser(method_name: str, declared: Parameter) -> Callable[..., Array]:
    """The initialiser of a parameter."""
    axes, start = parse_logical_axes(declared.axes), declared.init
    if start is None:
        start = FanIn() if axes.num_output_axes else Zeros()
    if hasattr(start, "sample"):  # an `Initialiser`
        return initializer(start, num_input_axes=axes.num_input_axes)
    if not callable(start):
        return nn.initializers.constant(start)

    def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        with named_errors(method_name):
            numbers = jnp.asarray(start(key, shape, dtype))
        require_like(method_name, "an array", numbers, shape, jnp.dtype(dtype))
        return numbers

    return draw


def apply_option(
    module: nn.Module,
    option: FeedForward | Mixer,
    option_fn: Callable[[dict[str, Array], Array], tuple[Array, Any]],
    x: Float[Array, "*batch T D"],
    *,
    keep_partial_sums: bool,
) -> tuple[Float[Array, "*batch T D"], Any]:
    """Apply a custom option to x, and sum its outputs over tensor-parallel devices.

    Args:
        module: The module that owns the parameters.
        option: The option that declares them.
        option_fn: From this device's parameters and x to vectors and a cache.
        x: Vectors, the same on all tensor-parallel devices.
        keep_partial_sums: As in `Linear`: the caller sums over tensor-parallel devices.

    Returns:
        The vectors and the cache.

    Raises:
        ValueError: A parameter is sharded over `expert`, or the vectors have another shape or dtype
            than x.
    """
    runtime: RuntimeConfig = module.runtime
    axes, declared = runtime.mesh_axes, option.parameters(x.shape[-1])
    sharded_over = [
        axis
        for parameter in declared.values()
        for axis in mesh_axes(parse_logical_axes(parameter.axes).names, parameter.shape, axes)
    ]
    if axes.expert is not None and axes.expert in sharded_over:
        raise ValueError(
            f"Experts of a custom option cannot be sharded; got the mesh axis {axes.expert!r}."
        )
    params = option_parameters(module, option, declared, runtime.dtype)
    tensor = axes.tensor if axes.tensor in sharded_over else None
    y, cache = option_fn(params, F.copy_to_tensor_parallel(x, tensor))
    require_like(type(option).__name__, "[rows, tokens, width]", y, x.shape, x.dtype)
    if not keep_partial_sums:
        return F.reduce_from_tensor_parallel(y, tensor), cache
    if axes.tensor is not None and tensor is None:  # replicated: one device contributes it
        y = jnp.where(jax.lax.axis_index(axes.tensor) == 0, y, jnp.zeros_like(y))
    return y, cache
