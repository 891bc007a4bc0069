"""From `config.Initialiser` to functions that draw parameters."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jaxformer.config import FanAverage, FanIn, Initialiser, Normal, Zeros


def initializer(choice: Initialiser, *, axes: int = 1, divisor: float = 1.0) -> Callable:
    """A flax initialiser whose first `axes` axes are inputs and whose others are outputs.

    Args:
        choice: The kind and its settings.
        axes: Number of leading axes that a product sums over; they count as inputs together.
        divisor: Divides every value.
    """

    def draw(key: jax.Array, shape: tuple[int, ...], dtype=jax.numpy.float32) -> jax.Array:
        inputs, outputs = tuple(range(axes)), tuple(range(axes, len(shape)))

        def scaled(gain: float, mode: Any, distribution: Any):
            return nn.initializers.variance_scaling(
                gain**2 / divisor**2, mode, distribution, in_axis=inputs, out_axis=outputs
            )

        match choice:
            case Normal(std=std):
                return nn.initializers.normal(std / divisor)(key, shape, dtype)
            case FanIn(gain=gain):
                return scaled(gain, "fan_in", "normal")(key, shape, dtype)
            case FanAverage(gain=gain):
                return scaled(gain, "fan_avg", "uniform")(key, shape, dtype)
            case Zeros():
                return nn.initializers.zeros(key, shape, dtype)

    return draw
