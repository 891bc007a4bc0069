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
        scale: Multiplies the token vectors; sqrt(model_dim) in the original transformer.
        positions: Positions added to the token vectors.
        norm: Norm of the sum.
        dim: Width of the token vectors before a projection to model_dim; None has no projection.
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
        tied: Whether the kernel is the token embedding.
        bias: Whether a bias is added.
        multiplier: Multiplies the logits.
        softcap: Cap c of the logits: y becomes c * tanh(y / c).
        masked_ids: Token ids with probability 0.
        unit_rows: Whether the kernel's vector of each token is divided by its length (Baichuan 2).
    """

    tied: bool = False
    bias: bool = False
    multiplier: float = 1.0
    softcap: float | None = None
    masked_ids: tuple[int, ...] = ()
    unit_rows: bool = False

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "softcap")
