"""Position options (learned, sinusoidal, RoPE, score biases, Transformer-XL) and windows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Array, Float

from jaxformer import functional as F
from jaxformer.checks import check_fields, require, require_positive
from jaxformer.config.initialisation import Normal
from jaxformer.config.parameter import Parameter
from jaxformer.config.registry import Option, unimplemented_method
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
    """A bias added to attention scores, computed from query and key positions.

    An option has two methods. They know nothing of batches, caches, windows or devices, and are
    asked for whole matrices, for tiles of them, forwards and by `jax.vjp`, and for single queries:

        parameters(self, num_heads)      names of what is learned, a `Parameter` each
        __call__(self, params, query_positions, key_positions, *, causal)
                                         [heads, queries, keys], for [queries] and [keys]

    `params` are the arrays by name, and may be of some of the heads only; so is the answer, which
    has all of those. It is float32, as bfloat16 cannot tell distances above 256 from the next.
    A term that heads share is given their number by `constants`.
    Without `causal` keys after the query are seen, too; otherwise they are masked, and get any
    finite number. So do slots of a cache that hold nothing, whose position is the largest int32.
    """

    shared_across_layers = False  # whether layers of a stack have one set of parameters
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "attention")

    def constants(self, num_heads: int) -> Mapping[str, Float[Array, "N ..."]]:
        """Per-head constants by name, such as ALiBi slopes; they are merged into `params`."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """RoPE: rotate feature pairs by an angle proportional to the position.

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

    def rotary_dim(self, head_dim: int) -> int:
        """Number of features per head that are rotated."""
        return int(head_dim * self.fraction)


@dataclass(frozen=True, kw_only=True)
class Alibi(ScoreBias):
    """ALiBi: subtract slope * distance from the scores, with one slope per head.

    Attributes:
        scale: Multiplies every slope.
    """

    scale: float = 1.0

    def parameters(self, num_heads: int) -> Mapping[str, Parameter]:
        """No parameters."""
        return {}

    def constants(self, num_heads: int) -> Mapping[str, Float[Array, " N"]]:
        """ALiBi slopes, one per head."""
        return {"slopes": self.scale * F.alibi_slopes(num_heads)}

    def __call__(
        self, params: Any, query_positions: Array, key_positions: Array, *, causal: bool
    ) -> Float[Array, "N T S"]:
        """`F.alibi_bias`."""
        return F.alibi_bias(params["slopes"], query_positions, key_positions)


@dataclass(frozen=True, kw_only=True)
class T5Bias(ScoreBias):
    """T5 relative position bias: a learned number per head and distance bucket, for all layers.

    Attributes:
        num_buckets: Rows of the table.
        max_distance: Distances from here on share the last bucket.
    """

    num_buckets: int = 32
    max_distance: int = 128
    shared_across_layers = True

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

    def parameters(self, num_heads: int) -> Mapping[str, Parameter]:
        """The table of buckets and heads."""
        return {"embedding": Parameter((self.num_buckets, num_heads), "rows -> heads", Normal())}

    def __call__(
        self, params: Any, query_positions: Array, key_positions: Array, *, causal: bool
    ) -> Float[Array, "N T S"]:
        """`F.t5_bias`."""
        return F.t5_bias(
            params["embedding"],
            query_positions,
            key_positions,
            bidirectional=not causal,
            max_distance=self.max_distance,
        )

    def tiny(self) -> "T5Bias":
        """Return the option with eight buckets."""
        return replace(self, num_buckets=8, max_distance=14)


@dataclass(frozen=True, kw_only=True)
class Fire(ScoreBias):
    """FIRE: a bias from a small MLP of the log-distance, relative to the query's position.

        score[n, i, j] += f(log(c d + 1) / log(c max(L, i) + 1))[n]      d = i - j

    with f a network of one hidden layer; f, c and L are learned (see `functional.fire_bias`). Its
    argument lies between 0 and 1 in texts of any length.

    Attributes:
        hidden_dim: Width of the network.
        length: L at first, in tokens: from this position on distances are taken relative to it.

    References:
        Li et al., Functional Interpolation for Relative Positions Improves Long Context
        Transformers, 2023. arXiv:2310.04418, section 3
    """

    hidden_dim: int = 32
    length: float = 512.0

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "hidden_dim", "length")

    def parameters(self, num_heads: int) -> Mapping[str, Parameter]:
        """MLP kernels and biases, c, and the factor of `length`."""
        return {
            "hidden_kernel": Parameter((1, self.hidden_dim), "features -> features"),
            "hidden_bias": Parameter((self.hidden_dim,), "features"),
            "out_kernel": Parameter((self.hidden_dim, num_heads), "features -> heads"),
            "out_bias": Parameter((num_heads,), "heads"),
            "c": Parameter((), "", 0.1),
            "length_factor": Parameter((), "", 1.0),
        }

    def __call__(
        self, params: Any, query_positions: Array, key_positions: Array, *, causal: bool
    ) -> Float[Array, "N T S"]:
        """`F.fire_bias`."""
        network = dict(params)
        length = self.length * network.pop("length_factor")
        return F.fire_bias(query_positions, key_positions, length=length, **network)

    def tiny(self) -> "Fire":
        """Return the option with eight hidden features and length 8."""
        return replace(self, hidden_dim=8, length=8.0)


@dataclass(frozen=True, kw_only=True)
class TransformerXL:
    """Transformer-XL positions: add scores of the query with projected sinusoids of the distance.

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
    """Block-sparse causal attention with another block pattern in each head (Phi-3-small).

    Attributes:
        block_size: Tokens of a block.
        local_blocks: How many blocks back a query sees whole, its own included.
        stride: Beyond them it sees every stride-th block.
    """

    block_size: int = 64
    local_blocks: int = 16
    stride: int = 8

    def __post_init__(self):
        check_fields(self)
        require_positive(self, "block_size", "local_blocks", "stride")


Window = int | BlockSparse | None
