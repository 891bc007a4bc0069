"""RG-LRU module (Griffin): convolution, gates by head, the recurrence, a gate of the output."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import LinearAttentionCache
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers.attention.core import AttentionModule, HeadParameter
from jaxformer.layers.cache import NO_STATE, LayerState, get_layer, set_layer
from jaxformer.layers.convolution import Convolution
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, sow_and_perturb

RATE = 8.0  # of softplus(rate)
DECAYS = 0.9, 0.999  # limits of the initial decays


class RGLRUTrace(NamedTuple):
    """Logarithms of the decays and what the recurrence reads, sown for `inspect`."""

    log_decay: Float32[Array, "*batch T N H"]
    value: Float[Array, "*batch T N H"]


class HeadGate(nn.Module):
    """Sigmoid of a projection of each head, sigmoid(kernel[n] x[n] + bias[n]), in float32."""

    num_heads: int
    kernel_init: c.Initialiser
    runtime: RuntimeConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch T N H"]) -> Float32[Array, "*batch T N H"]:
        H = x.shape[-1]
        shape, axes = (self.num_heads, H, H), "blocks features -> features"
        kernel = sharded_parameter(
            self, "kernel", self._draw, shape, axes, dtype=self.runtime.dtype
        )
        bias = sharded_parameter(self, "bias", zeros, shape[:2], "blocks features")
        logits = jnp.einsum("...nh,nhk->...nk", x.astype(kernel.dtype), kernel)
        return jax.nn.sigmoid(logits.astype(jnp.float32) + jnp.broadcast_to(bias, x.shape))

    def _draw(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """The inputs of each output are those of one head."""
        heads, inputs, outputs = shape
        kernel = initializer(self.kernel_init)(key, (inputs, heads, outputs), dtype)
        return jnp.swapaxes(kernel, 0, 1)


class RGLRU(AttentionModule):
    """RG-LRU; see `config.RGLRU`.

    Heads are sharded over `tensor`, sequences over `context`, with states handed along.
    """

    attention: c.RGLRU

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Convolve and decay; returns the output and the new state."""
        cfg, runtime, cache = self.attention, self.runtime, state.cache
        heads = cfg.num_heads, cfg.head_dim
        x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)
        value = self.projection("value", heads, bias="in", name="value")(x)
        convolution = Convolution(
            *heads, cfg.convolution_width, runtime, bias=True, name="convolution"
        )
        value, taps = convolution(
            value, inputs, cache and cache.convolutions[0], state.cache_update
        )
        y, last = self._recur(
            value, inputs, cache and get_layer(cache.state, state.cache_update)[..., 0, :]
        )
        gate = self.projection("value", heads, bias="in", name="gate")(x)
        y = y.astype(runtime.dtype) * ACTIVATIONS[cfg.activation](gate)
        y = self.output_projection(heads, name="out")(y)
        if cache is None or taps is None:
            return y, state
        states = set_layer(cache.state, last[..., None, :], state.cache_update)
        return y, state._replace(cache=LinearAttentionCache(states, (taps,)))

    def _recur(
        self, value: Float[Array, "*batch T N H"], inputs: c.MixerInputs, initial_state: Any
    ) -> tuple[Float[Array, "*batch T N H"], Float32[Array, "*batch N H"]]:
        """The recurrence of the values under their gates, and the state after the last."""
        cfg, runtime = self.attention, self.runtime
        input_gate, decay_gate = (
            HeadGate(cfg.num_heads, self.config.initialisation.projection, runtime, name=name)(
                value
            )
            for name in ("input_gate", "decay_gate")
        )
        rate = HeadParameter((cfg.num_heads, cfg.head_dim), rate_init, runtime, name="rate")()
        rate = RATE * jax.nn.softplus(rate)
        trace = RGLRUTrace(-jnp.broadcast_to(rate, value.shape) * decay_gate, value)
        value = sow_and_perturb(self, "attention_trace", trace).value

        def flat(y: Array) -> Array:
            return y.reshape(*y.shape[:-2], -1)

        y, last = F.rg_lru(
            flat(value).astype(jnp.float32),
            flat(input_gate),
            flat(decay_gate),
            rate.ravel(),
            first=inputs.positions == 0,
            initial_state=None if initial_state is None else flat(initial_state),
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=runtime.mesh_axes.context,
        )
        return y.reshape(value.shape), last.reshape(*last.shape[:-1], *value.shape[-2:])


def rate_init(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Initialise the rates so that the decays where the gate is 1 lie evenly between two limits."""
    log_decay = jnp.log(jax.random.uniform(key, shape, dtype, *DECAYS))
    return jnp.log(jnp.expm1(-log_decay / RATE))  # the inverse of softplus
