"""RoPE as a module, for your own attention."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import functional as F


class RotaryEmbedding(nn.Module):
    """Rotary position embedding without parameters.

    Feature pairs are neighbours, (0, 1), (2, 3), ...; pair k turns by
    position * theta ** (-2 k / head_dim).

    Attributes:
        theta: The base of the frequencies.
        head_dim: Width of the vectors; even.
        max_length: Positions run from 0 to max_length - 1; one outside, where it can be seen
            (not while tracing), is refused.

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
                f"RotaryEmbedding was built for width {self.head_dim}; got {x.shape[-1]}."
            )
        F.check_positions(token_positions, self.max_length)
        positions = jnp.broadcast_to(token_positions, x.shape[:-1])
        rotations = F.rope_rotations(positions, F.rope_frequencies(self.head_dim, base=self.theta))
        one_head = jnp.expand_dims(x, -2)
        return F.rotate(one_head, rotations, pairing="neighbours").squeeze(-2)
