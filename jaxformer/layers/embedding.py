"""Token and position vectors."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode, dropout
from jaxformer.layers.norms import Norm


class Table(nn.Module):
    """A learned row per number."""

    rows: int
    width: int
    initial: c.Initialiser

    @nn.compact
    def __call__(self) -> Float[Array, "rows width"]:
        return self.param(
            "embedding", initializer(self.initial), (self.rows, self.width), jnp.float32
        )


class Embedder(nn.Module):
    """From token ids to the vectors that the first layer reads."""

    config: c.TransformerConfig
    vocab_size: int
    mode: Mode

    def setup(self):
        cfg, init = self.config.embedding, self.config.initialisation
        width = self.config.model_dim
        self.tokens = Table(self.vocab_size, cfg.dim or width, init.embedding)
        if cfg.dim is not None:
            self.projection = Linear((width,), init.projection, self.mode)
        if isinstance(cfg.positions, c.Learned):
            rows = cfg.positions.max_length + cfg.positions.offset
            self.positions = Table(rows, width, init.embedding)
        if cfg.norm is not None:
            self.norm = Norm(cfg.norm)

    def __call__(
        self, tokens: Int[Array, "*batch T"], positions: Int[Array, "*any T"]
    ) -> Float[Array, "*batch T D"]:
        cfg = self.config.embedding
        x = F.embed(self.tokens().astype(self.mode.dtype), tokens)
        if cfg.scale != 1:
            x = x * jnp.asarray(cfg.scale, x.dtype)
        if cfg.dim is not None:
            x = self.projection(x)
        if cfg.positions is not None:
            x = x + jnp.broadcast_to(self.place(positions).astype(x.dtype), x.shape)
        if cfg.norm is not None:
            x = self.norm(x)
        return dropout(self, x, self.config.dropout.embedding, self.mode)

    def place(self, positions: Int[Array, "*any T"]) -> Float[Array, "*any T D"]:
        """What is added for the position."""
        match self.config.embedding.positions:
            case c.Learned(offset=offset):
                return F.learned_positions(self.positions(), positions, offset=offset)
            case c.Sinusoid() as s:
                return F.sinusoidal_positions(
                    positions + s.offset,
                    self.config.model_dim,
                    base=s.base,
                    layout=s.layout,
                    sin_first=s.sin_first,
                )
            case None:
                raise ValueError("This model adds no positions to its embedding.")


class Head(nn.Module):
    """From the last vectors to float32 logits; a tied head multiplies by the token table."""

    config: c.TransformerConfig
    mode: Mode

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], table: Float[Array, "V E"]
    ) -> Float[Array, "*batch T V"]:
        cfg, init, dtype = self.config.head, self.config.initialisation, self.mode.dtype
        width, vocab_size = self.config.embedding.dim, self.config.vocab_size
        if width is not None:
            x = Linear((width,), init.projection, self.mode, name="projection")(x)
        if cfg.tied:
            kernel = table.T
        else:
            draw = initializer(init.head or init.projection)
            kernel = self.param("kernel", draw, (x.shape[-1], vocab_size), jnp.float32)
        bias = None
        if cfg.bias:
            bias = self.param("bias", nn.initializers.zeros, (vocab_size,), jnp.float32)
        logits = F.linear(x.astype(dtype), kernel.astype(dtype), bias)
        logits = logits.astype(jnp.float32) * cfg.multiplier
        if cfg.softcap is not None:
            logits = F.soft_cap(logits, cfg.softcap)
        if cfg.masked_ids:
            logits = logits.at[..., jnp.asarray(cfg.masked_ids)].set(-jnp.inf)
        return logits
