"""`QueryScaling` and `QueryPower`: queries that grow with the position."""

from dataclasses import dataclass

from jaxtyping import Array, Float32, Integer

from jaxformer import functional as F
from jaxformer.checks import Checked, Count, Positive, Size


@dataclass(frozen=True, kw_only=True)
class QueryScaling(Checked):
    """Multiply queries by a factor that grows with the position (Ministral 3, Llama 4).

        1 + beta * ln(1 + floor((position + offset) / original_max_length))

    Attributes:
        beta: Growth of the factor with the logarithm.
        original_max_length: Context length in training; up to it the factor is 1.
        offset: Number of the first position; 1 in Llama 4.
    """

    beta: Positive = 0.1
    original_max_length: Size
    offset: Count = 0

    def __call__(self, positions: Integer[Array, "*batch T"]) -> Float32[Array, "*batch T"]:
        """`F.query_scale`."""
        return F.query_scale(
            positions + self.offset, beta=self.beta, original_max_length=self.original_max_length
        )


@dataclass(frozen=True, kw_only=True)
class QueryPower(Checked):
    """Multiply queries by a power of the number of keys, relative to a length (Beam).

        (1 + (position + 1) / length) ** exponent

    Attributes:
        exponent: Growth of the logarithm of the factor with the logarithm of the number.
        length: Number of keys whose factor is 2 ** exponent.
    """

    exponent: Positive = 0.1
    length: Size = 2048

    def __call__(self, positions: Integer[Array, "*batch T"]) -> Float32[Array, "*batch T"]:
        """`F.query_power`."""
        return F.query_power(positions, exponent=self.exponent, length=self.length)
