"""Parameter initialisation: distributions, and which group of parameters uses which."""

from dataclasses import dataclass
from typing import Literal

import jax
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer.checks import Checked, Positive

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Normal(Checked):
    """Normal with a fixed standard deviation.

    Attributes:
        std: The standard deviation.
    """

    std: Positive = 0.02

    def sample(
        self, key: jax.Array, shape: Shape, dtype: DTypeLike, num_input_axes: int, divisor: float
    ) -> Float[Array, "..."]:
        """Sample an array, divided by `divisor`."""
        return initializers.normal(self.std / divisor)(key, shape, dtype)


class VarianceScaling(Checked):
    """Base of initialisers whose variance is gain ** 2 / a number of inputs or outputs."""

    gain: Positive
    mode: Literal["fan_in", "fan_avg"]
    distribution: Literal["normal", "uniform"]

    def sample(
        self, key: jax.Array, shape: Shape, dtype: DTypeLike, num_input_axes: int, divisor: float
    ) -> Float[Array, "..."]:
        """Sample an array, divided by `divisor`; its first `num_input_axes` axes are inputs."""
        axes = range(len(shape))
        return initializers.variance_scaling(
            (self.gain / divisor) ** 2,
            self.mode,
            self.distribution,
            in_axis=axes[:num_input_axes],
            out_axis=axes[num_input_axes:],
        )(key, shape, dtype)


@dataclass(frozen=True, kw_only=True)
class FanIn(VarianceScaling):
    """Normal with standard deviation gain / sqrt(number of inputs).

    Attributes:
        gain: Factor of the standard deviation; 1 keeps the variance of the inputs.
    """

    gain: Positive = 1.0
    mode = "fan_in"
    distribution = "normal"


@dataclass(frozen=True, kw_only=True)
class FanAverage(VarianceScaling):
    """Uniform with variance gain ** 2 / mean(number of inputs, number of outputs) (Glorot).

    Attributes:
        gain: Factor of the standard deviation; Glorot uses 1.
    """

    gain: Positive = 1.0
    mode = "fan_avg"
    distribution = "uniform"


@dataclass(frozen=True, kw_only=True)
class Zeros:
    """All zero."""

    def sample(
        self, key: jax.Array, shape: Shape, dtype: DTypeLike, num_input_axes: int, divisor: float
    ) -> Float[Array, "..."]:
        """Return zeros."""
        return initializers.zeros(key, shape, dtype)


Initialiser = Normal | FanIn | FanAverage | Zeros


@dataclass(frozen=True, kw_only=True)
class Initialisation(Checked):
    """Initialiser of each group of parameters; None means `projection`.

    Attributes:
        embedding: Embeddings of tokens and learned positions.
        projection: Every other kernel.
        query: Kernels of the queries.
        head: Kernel of the logits.
        residual: "depth" divides projections into the residual stream by sqrt(2 * num_layers), so
            that its variance does not grow with depth.

    References:
        Yang et al., Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
        Transfer, 2022. arXiv:2203.03466, appendix D.2 (queries and the head may start at zero)
    """

    embedding: Initialiser = Normal()
    projection: Initialiser = FanIn()
    query: Initialiser | None = None
    head: Initialiser | None = None
    residual: Literal["plain", "depth"] = "depth"
