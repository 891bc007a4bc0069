"""A decoder of your own in Flax linen: RMSNorm, RoPE, causal attention, SwiGLU, a tied head.

    x = embedding[tokens]
    x = x + attention(rms_norm(x)), then x = x + swiglu(rms_norm(x))    in each block
    logits = rms_norm(x) @ embedding.T

The modules own the parameters; `jaxformer.functional` has the formulas. Change any line.
"""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Complex, Float, Int

from jaxformer import functional as F


class RMSNorm(nn.Module):
    """Divides each vector by its root mean square, and scales the features."""

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return F.rms_norm(x, self.param("scale", nn.initializers.ones, x.shape[-1:]))


class Block(nn.Module):
    """Attention among the tokens, then a gated hidden layer for each token."""

    num_heads: int
    hidden_dim: int
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rotations: Complex[Array, "B T C"], mask: F.AttentionMask
    ) -> Float[Array, "B T D"]:
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        model_dim, heads = x.shape[-1], (*x.shape[:-1], self.num_heads, -1)

        y = RMSNorm(name="attention_norm")(x)
        query = dense(model_dim, name="query")(y).reshape(heads)
        key = dense(model_dim, name="key")(y).reshape(heads)
        value = dense(model_dim, name="value")(y).reshape(heads)
        query, key = F.rotate(query, rotations), F.rotate(key, rotations)
        output = F.dot_product_attention(query, key, value, mask)  # picks the device's kernel
        x = x + dense(model_dim, name="out")(output.reshape(x.shape))

        y = RMSNorm(name="feed_forward_norm")(x)
        gate, value = dense(self.hidden_dim, name="gate")(y), dense(self.hidden_dim, name="up")(y)
        return x + dense(model_dim, name="down")(F.swiglu(gate, value))


class Transformer(nn.Module):
    """Logits of the next token; with targets, the loss of each token."""

    vocab_size: int
    model_dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    dtype: DTypeLike = jnp.float32  # of the computation; parameters are float32

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        targets: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, "B T"]:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        frequencies = F.rope_frequencies(self.model_dim // self.num_heads)
        rotations = F.rope_rotations(positions, frequencies)
        # Not an array [T, T]: kernels compute it from positions and document numbers.
        rule = F.MaskRule(causal=True, contiguous_positions=True)
        mask = F.AttentionMask(positions, positions, segments, segments, rule)

        embed = nn.Embed(self.vocab_size, self.model_dim, dtype=self.dtype, name="embed")
        x = embed(tokens)
        for i in range(self.num_layers):
            block = Block(self.num_heads, self.hidden_dim, self.dtype, name=f"block_{i}")
            x = block(x, rotations, mask)
        x, table = RMSNorm(name="final_norm")(x), embed.embedding.astype(self.dtype)
        if targets is None:
            return F.linear_logits(x, table, vocabulary_axis=0)
        return F.linear_cross_entropy(x, table, targets, vocabulary_axis=0)
