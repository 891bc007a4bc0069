"""Both ends of a model: the token embedding and the LM head."""

from __future__ import annotations

from dataclasses import dataclass

from jaxformer.checks import check_fields, require_positive
from jaxformer.config.norms import Norm
from jaxformer.config.positions import Learned, Sinusoid


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Token embedding: scale, positions, norm, and an optional low-rank width.

    Attributes:
        scale: Multiplies the rows of the table; sqrt(model_dim) in the first transformer.
        positions: What is added for the position.
        norm: Norm of the sum.
        dim: Width of the table's rows where a projection brings them to model_dim.
    """

    scale: float = 1.0
    positions: Learned | Sinusoid | None = None
    norm: Norm | None = None
    dim: int | None = None

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "dim")


@dataclass(frozen=True, kw_only=True)
class LMHead:
    """LM head: logits from the final hidden vectors.

        logits = softcap(multiplier * (x @ kernel + bias))

    Attributes:
        tied: Whether the kernel is the token table.
        bias: Whether a bias is added.
        multiplier: Multiplies the logits.
        softcap: Logits y become c * tanh(y / c).
        masked_ids: Token ids that never receive probability.
    """

    tied: bool = False
    bias: bool = False
    multiplier: float = 1.0
    softcap: float | None = None
    masked_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "softcap")
