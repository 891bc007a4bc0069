"""Decay attention module, a linear recurrence with a state of constant size."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import StateCache
from jaxformer.layers.attention.core import AttentionModule, HeadParameter
from jaxformer.layers.cache import NO_STATE, LayerState, get_layer, set_layer
from jaxformer.layers.parameters import log_spaced_memory_init, rope_frequency_init
from jaxformer.layers.runtime import sow_and_perturb


class DecayTrace(NamedTuple):
    """Decay rates, segments and values, sown for `inspect`."""

    rates: F.DecayRates
    segments: Int[Array, "*batch T"] | None
    value: Float[Array, "*batch T N H"]


class DecayAttention(AttentionModule):
    """Decay attention: chunkwise for sequences, one recurrence step per token with a cache.

    Heads are sharded over `tensor`, sequences over `context`, with states handed along.
    """

    attention: c.Decay

    def setup(self):
        cfg = self.attention
        heads = (cfg.num_heads, cfg.head_dim)
        self.value = self.projection("value", heads)
        self.memory = HeadParameter(
            (cfg.num_heads,), log_spaced_memory_init(cfg.min_memory, cfg.max_memory), self.runtime
        )
        if cfg.angles is not None and cfg.angles.learned:
            shape = (cfg.num_heads, cfg.head_dim // 2)
            self.angles = HeadParameter(shape, rope_frequency_init(cfg.angles.base), self.runtime)
        self.out = self.output_projection(heads)

    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Decay attention over the sequence and the cached state; returns the new one too."""
        cache = state.cache
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        value = self.value(x).astype(jnp.float32)
        rates = F.decay_rates(self.memory())
        trace = DecayTrace(rates, inputs.segments, value)
        value = sow_and_perturb(self, "attention_trace", trace).value
        output, last = F.linear_recurrence(
            value * jnp.broadcast_to(rates.gain[:, None], value.shape),
            rates.gamma,
            self.theta(rates.gamma.shape[0]),
            initial_state=cache and get_layer(cache.state, state.cache_update)[..., 0, :],
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=self.runtime.mesh_axes.context,
        )
        y = self.out(output.astype(self.runtime.dtype))
        if cache is None:
            return y, state
        new = set_layer(cache.state, last[..., None, :], state.cache_update)
        return y, state._replace(cache=StateCache(new))

    def theta(self, num_heads: int) -> Float[Array, "N C"] | None:
        """Rotation angles per token of this device's heads, or None."""
        angles = self.attention.angles
        if angles is None:
            return None
        if angles.learned:
            return self.angles()
        frequencies = F.rope_frequencies(self.attention.head_dim, base=angles.base)
        return jnp.broadcast_to(frequencies, (num_heads, *frequencies.shape))
