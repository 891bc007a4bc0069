"""Position options (learned, sinusoidal, RoPE, score biases, Transformer-XL) and windows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxtyping import Array, Float, Int

from jaxformer import functional as F
from jaxformer.checks import (
    AboveOne,
    Checked,
    Count,
    Distinct,
    Fraction,
    Must,
    Positive,
    Size,
    require,
)
from jaxformer.config.initialisation import Normal
from jaxformer.config.parameter import Parameter
from jaxformer.config.registry import Option, unimplemented_method
from jaxformer.config.rope_scaling import LongRope, RopeScaling
from jaxformer.config.tiny import TINY_HEAD_DIM, shrink

RopeTarget = Literal["q", "k", "v", "o"]


# Positions added to the embedding


@dataclass(frozen=True, kw_only=True)
class Learned(Checked):
    """A table with one learned vector per position.

    Attributes:
        max_length: Number of positions.
        offset: Rows of the table before the row of position 0; 2 in OPT.
    """

    max_length: Size
    offset: Count = 0

    @property
    def num_rows(self) -> int:
        """Rows of the learned table."""
        return self.max_length + self.offset

    def __call__(
        self, positions: Int[Array, "*any T"], model_dim: int, table: Float[Array, "R D"]
    ) -> Float[Array, "*any T D"]:
        """`F.learned_positions`."""
        return F.learned_positions(table, positions, offset=self.offset)


@dataclass(frozen=True, kw_only=True)
class Sinusoid(Checked):
    """Sines and cosines of the position.

    Attributes:
        layout: Order of sines and cosines (see `functional.sinusoidal_positions`).
        offset: Number of the first position; padding id + 1 in fairseq.
    """

    layout: Literal["interleaved", "halves", "tensor2tensor"] = "interleaved"
    offset: int = 0

    max_length = None  # no limit
    num_rows = 0

    def __call__(
        self, positions: Int[Array, "*any T"], model_dim: int, table: None
    ) -> Float[Array, "*any T D"]:
        """`F.sinusoidal_positions`."""
        return F.sinusoidal_positions(positions + self.offset, model_dim, layout=self.layout)


# Positions inside attention


class ScoreBias(Option, protocol=True):
    """A bias added to attention scores, computed from query and key positions.

    An option implements two methods, and `constants` if it has any:

        parameters(self, num_heads)      dict from names to `Parameter`
        __call__(self, params, query_positions, key_positions, *, causal)
                                         bias [heads, queries, keys] of [queries] and [keys]

    Attention calls it for full matrices, for tiles, for single queries, and inside `jax.vjp`.
    `params` are the arrays by name, and under tensor parallelism hold only the device's heads, as
    must the result. The result is float32: bfloat16 rounds distances above 256. A bias that is
    equal for all heads learns the number of heads from `constants`. With `causal`, keys after the
    query are masked, and their bias may be any finite number. So may the bias of empty cache slots;
    their position is the largest int32.
    """

    shared_across_layers = False  # whether all layers of a stack share one set of parameters
    parameters = unimplemented_method("parameters", "the model")
    __call__ = unimplemented_method("__call__", "attention")

    def constants(self, num_heads: int) -> Mapping[str, Float[Array, "N ..."]]:
        """Return per-head constants by name, such as ALiBi slopes; `params` includes them."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Rope(Checked):
    """RoPE: rotate feature pairs by an angle proportional to the position.

    Attributes:
        base: Ratio of the longest to the shortest wavelength, approximately.
        fraction: Fraction of each head that is rotated, the first features; the rest is unchanged.
        pairing: Whether neighbouring features form a pair, or features of both halves.
        scaling: Scaling for contexts longer than in training.
        targets: Which of query, key, value and output are rotated; the output by the inverse.
    """

    base: AboveOne = 10_000.0
    fraction: Fraction = 1.0
    pairing: Literal["halves", "neighbours"] = "halves"
    scaling: RopeScaling | None = None
    targets: Distinct[RopeTarget] = ("q", "k")

    def tiny(self) -> "Rope":
        """Return the option at test size, for heads of `TINY_HEAD_DIM` features."""
        pairs = max(1, round(TINY_HEAD_DIM * self.fraction / 2))
        if self.fraction < 1:
            pairs = min(pairs, TINY_HEAD_DIM // 2 - 1)
        scaling = self.scaling and shrink(self.scaling)
        if isinstance(scaling, LongRope):
            indices = [int(i * len(scaling.short_factors) / pairs) for i in range(pairs)]
            short, long = scaling.short_factors, scaling.long_factors
            scaling = replace(
                scaling,
                short_factors=tuple(short[i] for i in indices),
                long_factors=tuple(long[i] for i in indices),
            )
        return replace(self, fraction=2 * pairs / TINY_HEAD_DIM, scaling=scaling)

    def rotary_dim(self, head_dim: int) -> int:
        """Number of features per head that are rotated."""
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int, length: Int[Array, ""]) -> Float[Array, " C"]:
        """Frequencies of a head's feature pairs, scaled for a sequence of this length."""
        unscaled = F.rope_frequencies(self.rotary_dim(head_dim), base=self.base)
        if self.scaling is None:
            return unscaled
        return self.scaling.scale_frequencies(unscaled, base=self.base, length=length)

    @property
    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys (YaRN, LongRoPE; else 1)."""
        return 1.0 if self.scaling is None else self.scaling.attention_scaling

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of the sequence."""
        return self.scaling is not None and self.scaling.depends_on_length


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
        num_buckets: Number of distance buckets.
        max_distance: Distances from this one on share the last bucket.
    """

    num_buckets: Size = 32
    max_distance: Size = 128
    shared_across_layers = True

    def __post_init__(self):
        super().__post_init__()
        require(
            self.num_buckets >= 4 and self.num_buckets % 2 == 0,
            "T5Bias.num_buckets is split by sign and then into near and far buckets, so it must be "
            f"even and at least 4; got {self.num_buckets}.",
        )
        require(
            self.max_distance > self.num_buckets // 2,
            "T5Bias.max_distance must exceed num_buckets / 2, the number of exact buckets; got "
            f"max_distance={self.max_distance}, num_buckets={self.num_buckets}.",
        )

    def parameters(self, num_heads: int) -> Mapping[str, Parameter]:
        """The learned table [num_buckets, num_heads]."""
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

    with f an MLP of one hidden layer; f, c and L are learned (see `functional.fire_bias`). The
    argument of f is between 0 and 1 at any length.

    Attributes:
        hidden_dim: Hidden features of the MLP.
        length: Initial threshold L in tokens: beyond it distances are relative to the position.

    References:
        Li et al., Functional Interpolation for Relative Positions Improves Long Context
        Transformers, 2023. arXiv:2310.04418, section 3
    """

    hidden_dim: Size = 32
    length: Positive = 512.0

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
class TransformerXL(Checked):
    """Transformer-XL positions: add scores of the query with projected sinusoids of the distance.

        score[i, j] = (query[i] + u) @ key[j] + (query[i] + v) @ W sinusoid(i - j)

    with u, v and W learned in every layer.
    """


QKRope = Annotated[
    Rope,
    Must(
        "have no targets but q and k, as values and outputs cannot be rotated",
        lambda rope: not {"v", "o"} & set(rope.targets),
    ),
]
Positions = Rope | ScoreBias | TransformerXL


def as_rope(positions: Positions | None) -> Rope | None:
    """Return the option if it is RoPE, else None."""
    return positions if isinstance(positions, Rope) else None


def as_transformer_xl(positions: Positions | None) -> TransformerXL | None:
    """Return the option if it is a `TransformerXL`, else None."""
    return positions if isinstance(positions, TransformerXL) else None


# Attention windows


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Checked):
    """Block-sparse causal attention with a different block pattern in each head (Phi-3-small).

    Attributes:
        block_size: Tokens per block.
        local_blocks: Recent blocks that a query attends to, including its own block.
        stride: Of the earlier blocks, the query attends to every stride-th.
    """

    block_size: Size = 64
    local_blocks: Size = 16
    stride: Size = 8

    size = None  # there is no bound on the distance

    @property
    def pattern(self) -> F.BlockSparsePattern:
        """The pattern, for `F.MaskRule`."""
        return F.BlockSparsePattern(self.block_size, self.local_blocks, self.stride)


@dataclass(frozen=True, kw_only=True)
class Chunks(Checked):
    """Attention within chunks of positions: a query attends to the keys of its own chunk (Llama 4).

    A document's first chunk begins at its position 0.

    Attributes:
        size: Positions of a chunk.
    """

    size: Size = 8192

    pattern = None  # all heads see the same keys


Window = Size | Chunks | BlockSparse | None


def window_size(window: Window) -> int | None:
    """Return how many keys up to its own a query attends to at most; None is no bound."""
    return window if window is None or isinstance(window, int) else window.size
