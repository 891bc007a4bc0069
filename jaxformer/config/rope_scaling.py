"""RoPE scaling options: how frequencies change for contexts longer than in training; p-RoPE."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer import functional as F
from jaxformer.checks import FLOAT32_MAX, Checked, Fraction, Must, Positive, Size, require

Frequencies = Float[Array, " C"]
AttentionFactor = Annotated[
    Positive,
    Must(
        f"have a square of at most {FLOAT32_MAX:.2g}, as it multiplies queries and keys",
        lambda factor: factor**2 <= FLOAT32_MAX,
    ),
]


class Scaling(Checked):
    """Base of the scalings: scaled frequencies, attention factor, dependence on the length.

    Attributes:
        formula: Function of the frequencies and of the option's fields, for `scale_frequencies`.
        depends_on_length: Whether the frequencies change with the length of the sequence.
    """

    formula: ClassVar[Callable[..., Frequencies]]
    depends_on_length = False

    def scale_frequencies(
        self, frequencies: Frequencies, *, base: float, length: Int[Array, ""]
    ) -> Frequencies:
        """Return the scaled frequencies of a sequence of this length."""
        return self.formula(frequencies, **vars(self))

    @property
    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys."""
        return 1.0

    def invalidates_cache(self, length: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
        """Whether reaching this length changes the rotation of cached keys."""
        return jnp.zeros(length.shape, bool)


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Scaling):
    """Linear scaling (position interpolation): divide every frequency by `factor`.

    Attributes:
        factor: Ratio of the extended to the original context length.
    """

    factor: Positive
    formula = staticmethod(F.rope_scale_linear)


@dataclass(frozen=True, kw_only=True)
class NTKScaling(Scaling):
    """NTK-aware scaling: divide the lowest frequency by `factor`, keep the highest.

    Attributes:
        factor: Ratio of the extended to the original context length.
    """

    factor: Positive
    formula = staticmethod(F.rope_scale_ntk)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """Dynamic NTK scaling: the factor grows with the sequence length.

    Attributes:
        factor: How fast the NTK factor grows with the length.
        original_max_length: Context length in training; up to it frequencies are unchanged.
    """

    factor: Positive
    original_max_length: Size

    depends_on_length = True

    def scale_frequencies(
        self, frequencies: Frequencies, *, base: float, length: Int[Array, ""]
    ) -> Frequencies:
        """Return the scaled frequencies: `F.rope_scale_dynamic_ntk`."""
        return F.rope_scale_dynamic_ntk(frequencies, length=length, **vars(self))

    def invalidates_cache(self, length: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
        """Whether the length is above `original_max_length`: each token changes the factor."""
        return length > self.original_max_length


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Scaling):
    """Divide slow frequencies by `factor`, keep fast ones, interpolate between (Llama 3.1).

    Attributes:
        factor: Ratio of the extended to the original context length.
        low_freq_factor: Frequencies with fewer rotations over the training length are divided.
        high_freq_factor: Frequencies with more rotations are unchanged.
        original_max_length: Context length in training.
    """

    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: float = 4.0
    original_max_length: Size = 8192
    formula = staticmethod(F.rope_scale_llama3)

    def __post_init__(self):
        super().__post_init__()
        require(
            self.high_freq_factor >= self.low_freq_factor,
            "Llama3Scaling.high_freq_factor must be at least low_freq_factor; "
            f"got {self.high_freq_factor} and {self.low_freq_factor}.",
        )


@dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """YaRN: scale each frequency by its number of rotations over the training length.

    Attributes:
        factor: Ratio of the extended to the original context length.
        original_max_length: Context length in training.
        beta_fast: Frequencies with more rotations are unchanged.
        beta_slow: Frequencies with fewer rotations are divided by `factor`.
        attention_factor: Multiplies rotated queries and keys; None is 0.1 * ln(factor) + 1.
        truncate: Whether the bounds of the ramp between both are whole indices.
    """

    factor: Positive
    original_max_length: Size
    beta_fast: float = 32.0
    beta_slow: Positive = 1.0
    attention_factor: AttentionFactor | None = None
    truncate: bool = True

    def __post_init__(self):
        super().__post_init__()
        require(
            self.beta_fast > self.beta_slow,
            f"Yarn.beta_fast must exceed beta_slow; got {self.beta_fast} and {self.beta_slow}.",
        )

    def scale_frequencies(
        self, frequencies: Frequencies, *, base: float, length: Int[Array, ""]
    ) -> Frequencies:
        """Return the scaled frequencies: `F.rope_scale_yarn`."""
        return F.rope_scale_yarn(
            frequencies,
            base=base,
            factor=self.factor,
            original_max_length=self.original_max_length,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
        )

    @property
    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return F.yarn_attention_factor(self.factor)


@dataclass(frozen=True, kw_only=True)
class LongRope(Scaling):
    """LongRoPE: one divisor per feature pair, for short and for long sequences.

    Attributes:
        short_factors: Divisors for sequences up to `original_max_length`.
        long_factors: Divisors for longer sequences.
        original_max_length: Context length in training.
        max_length: Context length after the extension.
        attention_factor: Multiplies rotated queries and keys; None is
            sqrt(1 + ln(max_length / original_max_length) / ln(original_max_length)).
    """

    short_factors: tuple[Positive, ...]
    long_factors: tuple[Positive, ...]
    original_max_length: Size
    max_length: Size
    attention_factor: AttentionFactor | None = None

    def __post_init__(self):
        super().__post_init__()
        require(
            self.original_max_length > 1 or self.attention_factor is not None,
            "LongRope.original_max_length must be above 1 without attention_factor; "
            f"got {self.original_max_length}.",
        )

    depends_on_length = True

    def scale_frequencies(
        self, frequencies: Frequencies, *, base: float, length: Int[Array, ""]
    ) -> Frequencies:
        """Return the scaled frequencies: `F.rope_scale_longrope`."""
        return F.rope_scale_longrope(
            frequencies,
            jnp.asarray(self.short_factors, jnp.float32),
            jnp.asarray(self.long_factors, jnp.float32),
            length=length,
            original_max_length=self.original_max_length,
        )

    @property
    def attention_scaling(self) -> float:
        """Factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return F.longrope_attention_factor(self.max_length, self.original_max_length)

    def invalidates_cache(self, length: Int[Array, "*batch"]) -> Bool[Array, "*batch"]:
        """Whether the length is the first one with `long_factors`."""
        return length == self.original_max_length + 1


@dataclass(frozen=True, kw_only=True)
class PRope(Scaling):
    """p-RoPE: only the fastest frequencies of a head rotate; the other pairs have no position.

    Attributes:
        fraction: Fraction of the frequencies that is kept.
    """

    fraction: Fraction
    formula = staticmethod(F.rope_truncate)


RopeScaling = LinearScaling | NTKScaling | DynamicNTK | Llama3Scaling | Yarn | LongRope | PRope
