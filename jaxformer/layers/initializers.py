"""Build Flax initialisers from configuration."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer import functional as F
from jaxformer.config import Initialiser


def initializer(
    initialiser: Initialiser, *, num_input_axes: int = 1, divisor: float = 1.0
) -> Callable:
    """Build a Flax initialiser; the first `num_input_axes` axes count as inputs.

    Args:
        initialiser: The option.
        num_input_axes: Leading axes that a matrix product contracts; their sizes multiply to the
            fan-in.
        divisor: Divisor of every value.
    """
    return partial(_sample, initialiser=initialiser, num_input_axes=num_input_axes, divisor=divisor)


# flax asks every parameter's initialiser for its shape each time a model is traced; behind `jit`
# the answer is kept.
@partial(jax.jit, static_argnames=("shape", "dtype", "initialiser", "num_input_axes", "divisor"))
def _sample(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    initialiser: Initialiser,
    num_input_axes: int,
    divisor: float,
) -> jax.Array:
    return initialiser.sample(key, shape, dtype, num_input_axes, divisor)


def log_spaced_memory_init(min_memory: float, max_memory: float) -> Callable:
    """Initialiser of decay logits with log-spaced memory lengths over the heads.

    Consecutive heads differ by the same factor.
    """

    def init_fn(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.asarray(np.log(np.geomspace(min_memory, max_memory, shape[0]) - 1), dtype)

    return init_fn


def rope_frequency_init(base: float) -> Callable:
    """Initialiser that gives every head the RoPE frequencies."""

    def init_fn(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        frequencies = F.rope_frequencies(2 * shape[-1], base=base)
        return jnp.broadcast_to(frequencies, shape).astype(dtype)

    return init_fn
