"""Where a token stands, and what it may see: positions and windows."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import check_fields, require, require_positive
from jaxformer.config.option import Option, left_out
from jaxformer.config.rope_scaling import RopeScaling

RopeTarget = Literal["q", "k", "v", "o"]


# Positions added to the embedding


@dataclass(frozen=True, kw_only=True)
class Learned:
    """A table with one learned vector per position.

    Attributes:
        max_length: How many positions there are.
        offset: Rows of the table before that of position 0; 2 in OPT.
    """

    max_length: int
    offset: int = 0

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "max_length")
        require(self.offset >= 0, f"Learned.offset counts rows; got {self.offset}.")


@dataclass(frozen=True, kw_only=True)
class Sinusoid:
    """Sines and cosines of the position.

    Attributes:
        base: Ratio of the slowest to the fastest wavelength, nearly.
        layout: How sines and cosines are arranged (see `functional.sinusoidal_positions`).
        sin_first: Whether sines stand before cosines.
        offset: Number of the first position; padding id + 1 in fairseq.
    """

    base: float = 10_000.0
    layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved"
    sin_first: bool = True
    offset: int = 0

    def __post_init__(self):
        check_fields(self)
        require(self.base > 1, f"Sinusoid.base must be above 1; got {self.base}.")


# Positions inside attention


class ScoreBias(Option, protocol=True):
    """A term of attention's scores that follows from the positions of query and key."""

    parameters = left_out("parameters", "the model")
    __call__ = left_out("__call__", "attention")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotate feature pairs by an angle proportional to the position.

    Attributes:
        base: Ratio of the slowest to the fastest wavelength, nearly.
        fraction: Share of each head that is rotated, the first features; the rest passes through.
        pairing: Which features form a pair (see `functional.rotate`).
        scaling: How positions stretch beyond the length of training.
        targets: Which of query, key, value and output are turned; the output by the conjugate.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    pairing: Literal["halves", "neighbours"] = "halves"
    scaling: RopeScaling | None = None
    targets: tuple[RopeTarget, ...] = ("q", "k")

    def __post_init__(self):
        check_fields(self)
        require(
            0 < self.fraction <= 1,
            f"Rope.fraction is a share of the head, in (0, 1]; got {self.fraction}.",
        )
        require(self.base > 1, f"Rope.base must be above 1; got {self.base}.")
        require(
            len(set(self.targets)) == len(self.targets),
            f"Rope.targets names a target twice: {self.targets}.",
        )

    def width(self, head_dim: int) -> int:
        """Number of features of a head that are rotated."""
        return int(head_dim * self.fraction)


@dataclass(frozen=True, kw_only=True)
class Alibi(ScoreBias):
    """Subtract slope * distance from the scores, with one slope per head.

    Attributes:
        scale: Multiplies every slope.
    """

    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class T5Bias(ScoreBias):
    """Add a learned number per head and bucket of distance; one table serves all layers.

    Attributes:
        num_buckets: Rows of the table.
        max_distance: Distances from here on share the last bucket.
    """

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self):
        super().__post_init__()
        require(
            self.num_buckets >= 4 and self.num_buckets % 2 == 0,
            f"T5Bias.num_buckets splits by sign, and each half by near or far, so it must be even "
            f"and at least 4; got {self.num_buckets}.",
        )
        require(
            self.max_distance > self.num_buckets // 2,
            f"T5Bias.max_distance must exceed num_buckets / 2, the distances that have a bucket "
            f"each; got max_distance={self.max_distance}, num_buckets={self.num_buckets}.",
        )


@dataclass(frozen=True, kw_only=True)
class TransformerXL:
    """Add to the scores what a query makes of the projected sinusoid of the distance.

        score[i, j] = (query[i] + u) @ key[j] + (query[i] + v) @ W sinusoid(i - j)

    with u, v and W learned in every layer.

    Attributes:
        base: Ratio of the slowest to the fastest wavelength of the sinusoids, nearly.
    """

    base: float = 10_000.0

    def __post_init__(self):
        check_fields(self)
        require(self.base > 1, f"TransformerXL.base must be above 1; got {self.base}.")


Positions = Rope | ScoreBias | TransformerXL


# What a query may see


@dataclass(frozen=True, kw_only=True)
class BlockSparse:
    """Attention between blocks of tokens, another pattern for every head (Phi-3-small).

    Attributes:
        block: Tokens of a block.
        local_blocks: How many blocks back a query sees whole, its own included.
        stride: Beyond them it sees every stride-th block.
    """

    block: int = 64
    local_blocks: int = 16
    stride: int = 8

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "block", "local_blocks", "stride")


Window = int | BlockSparse | None
