"""Build Flax initialisers from configuration."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from jaxformer import functional as F
from jaxformer.config import FanAverage, FanIn, Initialiser, Normal, Zeros


def initializer(choice: Initialiser, *, axes: int = 1, divisor: float = 1.0) -> Callable:
    """A flax initialiser whose first `axes` axes are inputs and whose others are outputs.

    Args:
        choice: The kind and its settings.
        axes: Number of leading axes that a product sums over; they count as inputs together.
        divisor: Divides every value.
    """
    return partial(_draw, choice=choice, axes=axes, divisor=divisor)


# flax asks every parameter's initialiser for its shape each time a model is traced; behind `jit`
# the answer is kept.
@partial(jax.jit, static_argnames=("shape", "dtype", "choice", "axes", "divisor"))
def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    choice: Initialiser,
    axes: int,
    divisor: float,
) -> jax.Array:
    match choice:
        case Normal(std=std):
            return nn.initializers.normal(std / divisor)(key, shape, dtype)
        case FanIn(gain=gain):
            scaled = _scaled(gain / divisor, "fan_in", "normal", axes, len(shape))
            return scaled(key, shape, dtype)
        case FanAverage(gain=gain):
            scaled = _scaled(gain / divisor, "fan_avg", "uniform", axes, len(shape))
            return scaled(key, shape, dtype)
        case Zeros():
            return nn.initializers.zeros(key, shape, dtype)


def spread_memories(shortest: float, longest: float) -> Callable:
    """Initialiser of decay logits with log-spaced memory lengths over the heads.

    From the first head to the last by equal factors.
    """

    def start(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.asarray(np.log(np.geomspace(shortest, longest, shape[0]) - 1), dtype)

    return start


def same_angles(base: float) -> Callable:
    """Initialiser that gives every head the RoPE frequencies."""

    def start(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        frequencies = F.rope_frequencies(2 * shape[-1], base=base)
        return jnp.broadcast_to(frequencies, shape).astype(dtype)

    return start


def _scaled(
    gain: float,
    mode: Literal["fan_in", "fan_avg"],
    distribution: Literal["normal", "uniform"],
    axes: int,
    ndim: int,
) -> Callable:
    """Flax variance scaling with variance gain ** 2 / fan."""
    inputs, outputs = tuple(range(axes)), tuple(range(axes, ndim))
    return nn.initializers.variance_scaling(
        gain**2, mode, distribution, in_axis=inputs, out_axis=outputs
    )
