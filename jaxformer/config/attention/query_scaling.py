"""`QueryScaling`: queries that grow with the position."""

from dataclasses import dataclass, replace

from jaxtyping import Array, Float32, Integer

from jaxformer import functional as F
from jaxformer.checks import check_fields, require, require_positive
from jaxformer.config.tiny import TINY_MAX_LENGTH


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Multiply queries by a factor that grows with the position (Ministral 3, Llama 4).

        1 + beta * ln(1 + floor((position + offset) / original_max_length))

    Attributes:
        beta: Growth of the factor with the logarithm.
        original_max_length: Context length in training; up to it the factor is 1.
        offset: Number of the first position; 1 in Llama 4.
    """

    beta: float = 0.1
    original_max_length: int
    offset: int = 0

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "beta", "original_max_length")
        require(self.offset >= 0, f"QueryScaling.offset must be at least 0; got {self.offset}.")

    def __call__(self, positions: Integer[Array, "*batch T"]) -> Float32[Array, "*batch T"]:
        """`F.query_scale`."""
        return F.query_scale(
            positions + self.offset, beta=self.beta, original_max_length=self.original_max_length
        )

    def tiny(self) -> "QueryScaling":
        """Return the option at test size."""
        return replace(self, original_max_length=TINY_MAX_LENGTH // 4)
