"""RoPE of layers: rotations, when they invalidate a cache; and `RotaryEmbedding`."""

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
        return F.rope_rotations(positions, rope.frequencies(head_dim, length))

    return of_row(positions, length)


def rope_invalidates_cache(
    config: c.TransformerConfig, length: Int[Array, "*batch"]
) -> Bool[Array, "*batch"]:
    """Whether reaching this length changes the rotation of cached keys (dynamic NTK, LongRoPE)."""
    invalidated = jnp.zeros(length.shape, bool)
    for rope in (layer.rope for layer in dict.fromkeys(config.layers)):
        if rope is not None and rope.scaling is not None:
            invalidated |= rope.scaling.invalidates_cache(length)
    return invalidated
