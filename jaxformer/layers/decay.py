"""Decay attention module, a linear recurrence."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.cache import StateCache, of_layer, with_layer
from jaxformer.layers.guide import Guide
from jaxformer.layers.heads import PerHead, out_of_heads
from jaxformer.layers.initializers import same_angles, spread_memories
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode
from jaxformer.layers.watch import watch


class Decayed(NamedTuple):
    """Decay rates and segments, sown for `inspect`."""

    rates: F.DecayRates
    segments: Int[Array, "*batch T"] | None


class Decay(nn.Module):
    """Decay attention: chunkwise for sequences, one recurrence step per token with a cache.

    Each device along `tensor` has a part of the heads. A text stays on one device, since its state
    goes from token to token.
    """

    config: c.TransformerConfig
    mode: Mode
    parts: bool = False  # as in Linear

    def setup(self):
        cfg, init = self.choice, self.config.initialisation
        if self.mode.axes.context is not None:
            raise ValueError(
                "The state of Decay goes from token to token, so a text stays on one device; got "
                f"the axis {self.mode.axes.context!r} for its time."
            )
        heads = (cfg.num_heads, cfg.head_dim)
        self.value = Linear(
            heads,
            init.value or init.projection,
            self.mode,
            "model -> heads features",
            bias="value" in cfg.biases,
        )
        self.memory = PerHead(
            (cfg.num_heads,), spread_memories(cfg.shortest, cfg.longest), self.mode
        )
        if cfg.angles is not None and cfg.angles.learned:
            shape = (cfg.num_heads, cfg.head_dim // 2)
            self.angles = PerHead(shape, same_angles(cfg.angles.base), self.mode)
        self.out = out_of_heads(self.config, heads, self.mode, self.parts)

    @property
    def choice(self) -> c.Decay:
        """The `config.Decay` option of this layer."""
        match self.config.attention:
            case c.Decay() as attention:
                return attention
        raise ValueError(f"Decay reads its own choices; got {self.config.attention}.")

    def __call__(
        self, x: Float[Array, "*batch T D"], guide: Guide, cache: StateCache | None = None
    ) -> tuple[Float[Array, "*batch T D"], StateCache | None]:
        """Decay attention over the sequence and the cached state; returns the new cache too."""
        attention = self.choice
        value = self.value(F.to_parts(x, self.mode.axes.tensor)).astype(jnp.float32)
        rates = F.decay_rates(self.memory())
        watch(self, "attended", Decayed(rates, guide.segments))
        output, state = F.linear_recurrence(
            value * jnp.broadcast_to(rates.gain[:, None], value.shape),
            rates.gamma,
            self.theta(rates.gamma.shape[0]),
            initial=None if cache is None else of_layer(cache.state, guide.layer)[..., 0, :],
            segments=guide.segments,
            valid=guide.real,
            pairing="halves" if attention.angles is None else attention.angles.pairing,
        )
        y = self.out(output.astype(self.mode.dtype))
        if cache is None:
            return y, None
        return y, StateCache(with_layer(cache.state, state[..., None, :], guide.layer))

    def theta(self, num_heads: int) -> Float[Array, "N C"] | None:
        """Rotation angles per token of this device's heads, or None."""
        attention = self.choice
        match attention.angles:
            case None:
                return None
            case c.Angles(learned=True):
                return self.angles()
            case c.Angles(base=base):
                frequencies = F.rope_frequencies(attention.head_dim, base=base)
                return jnp.broadcast_to(frequencies, (num_heads, *frequencies.shape))
