"""RoPE of layers: rotations, scaled frequencies, attention factor; and `RotaryEmbedding`."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Complex64, Float, Int

from jaxformer import config as c
from jaxformer import functional as F


class RotaryEmbedding(nn.Module):
    """Rotary position embedding without parameters.

    Feature pairs are neighbours, (0, 1), (2, 3), ...; pair k is rotated by
    position * theta ** (-2 k / head_dim).

    Attributes:
        theta: The base of the frequencies.
        head_dim: Width of the vectors; even.
        max_length: Positions must be from 0 to max_length - 1; this is checked outside jit.

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.2.2
    """

    theta: float
    head_dim: int
    max_length: int

    def __call__(
        self, x: Float[Array, "*batch T H"], token_positions: Int[Array, "*any T"]
    ) -> Float[Array, "*batch T H"]:
        if x.shape[-1] != self.head_dim:
            raise ValueError(
                f"RotaryEmbedding has head_dim {self.head_dim}; got {x.shape[-1]} features."
            )
        F.check_positions(token_positions, self.max_length)
        positions = jnp.broadcast_to(token_positions, x.shape[:-1])
        rotations = F.rope_rotations(positions, F.rope_frequencies(self.head_dim, base=self.theta))
        one_head = jnp.expand_dims(x, -2)
        return F.rotate(one_head, rotations, pairing="neighbours").squeeze(-2)


def token_rotations(
    rope: c.Rope, head_dim: int, positions: Int[Array, "*batch T"], length: Int[Array, "*batch"]
) -> Complex64[Array, "*batch T C"]:
    """Compute the RoPE rotations of these positions, scaled for the length of each row."""

    @partial(jnp.vectorize, signature="(t),()->(t,c)")
    def of_row(positions: Int[Array, " T"], length: Int[Array, ""]) -> Complex64[Array, "T C"]:
        return F.rope_rotations(positions, scaled_rope_frequencies(rope, head_dim, length))

    return of_row(positions, length)


def scaled_rope_frequencies(
    rope: c.Rope, head_dim: int, length: Int[Array, ""]
) -> Float[Array, " C"]:
    """Compute RoPE frequencies with the configured scaling."""
    width = rope.rotary_dim(head_dim)
    unscaled = F.rope_frequencies(width, base=rope.base)
    match rope.scaling:
        case None:
            return unscaled
        case c.LinearScaling() as s:
            return F.rope_scale_linear(unscaled, factor=s.factor)
        case c.NTKScaling() as s:
            return F.rope_scale_ntk(unscaled, factor=s.factor)
        case c.DynamicNTK() as s:
            return F.rope_scale_dynamic_ntk(
                unscaled, length=length, factor=s.factor, original_max_length=s.original_max_length
            )
        case c.Llama3Scaling() as s:
            return F.rope_scale_llama3(
                unscaled,
                factor=s.factor,
                low_freq_factor=s.low_freq_factor,
                high_freq_factor=s.high_freq_factor,
                original_max_length=s.original_max_length,
            )
        case c.Yarn() as s:
            return F.rope_scale_yarn(
                unscaled,
                base=rope.base,
                factor=s.factor,
                original_max_length=s.original_max_length,
                beta_fast=s.beta_fast,
                beta_slow=s.beta_slow,
            )
        case c.LongRope() as s:
            return F.rope_scale_longrope(
                unscaled,
                jnp.asarray(s.short_factors, jnp.float32),
                jnp.asarray(s.long_factors, jnp.float32),
                length=length,
                original_max_length=s.original_max_length,
            )


def rope_attention_factor(rope: c.Rope) -> float:
    """RoPE attention factor, which multiplies rotated queries and keys (YaRN, LongRoPE; else 1)."""
    match rope.scaling:
        case c.Yarn() as s:
            configured, computed = s.attention_factor, F.yarn_attention_factor(s.factor)
        case c.LongRope() as s:
            configured = s.attention_factor
            computed = F.longrope_attention_factor(s.max_length, s.original_max_length)
        case _:
            return 1.0
    return computed if configured is None else configured


def rope_invalidates_cache(
    config: c.TransformerConfig, length: Int[Array, "*batch"]
) -> Bool[Array, "*batch"]:
    """Whether reaching this length changes the rotation of cached keys (dynamic NTK, LongRoPE)."""
    invalidated = jnp.zeros(length.shape, bool)
    for rope in config.attention.positions:
        match rope:
            case c.Rope(scaling=c.DynamicNTK(original_max_length=original)):
                invalidated |= length > original
            case c.Rope(scaling=c.LongRope(original_max_length=original)):
                invalidated |= length == original + 1
    return invalidated
