"""Selective scan module (Mamba 1): convolution, what each token selects, the states, a gate."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import ones
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import LinearAttentionCache
from jaxformer.layers.attention.core import AttentionModule, HeadParameter
from jaxformer.layers.attention.linear_attention import STEPS, LinearAttentionTrace
from jaxformer.layers.cache import NO_STATE, LayerState, get_layer, set_layer
from jaxformer.layers.convolution import Convolution
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import step_bias_init
from jaxformer.layers.runtime import sow_and_perturb


class SelectiveScan(AttentionModule):
    """Selective scan; see `config.SelectiveScan`.

    Features are sharded over `tensor`, sequences over `context`, with states handed along. Devices
    add up what a token selects, r, B and C, of all features.
    """

    attention: c.SelectiveScan

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Write tokens into the cached states and read them; returns the output and new states."""
        cfg, runtime, cache = self.attention, self.runtime, state.cache
        features = cfg.width, 1
        x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)
        has_bias = "convolution" in cfg.biases
        convolution = Convolution(
            *features, cfg.convolution_width, runtime, bias=has_bias, name="convolution"
        )
        value = self.projection("value", features, bias="in", name="value")(x)
        value, taps = convolution(
            value, inputs, cache and cache.convolutions[0], state.cache_update
        )
        value = jax.nn.silu(value)
        step, write, read = self._select(value)
        rate = jnp.exp(HeadParameter((cfg.width, cfg.state_dim), rate_init, runtime, name="rate")())
        log_decay = -step * jnp.broadcast_to(jnp.mean(rate, axis=-1), step.shape)
        trace = LinearAttentionTrace(log_decay, read[..., None, :], write[..., None, :], value)
        _, read, write, value = sow_and_perturb(self, "attention_trace", trace)
        y, last = F.selective_scan(
            value[..., 0].astype(jnp.float32),
            step,
            rate,
            write[..., 0, :],
            read[..., 0, :],
            initial_state=cache and get_layer(cache.state, state.cache_update)[..., 0, :],
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=runtime.mesh_axes.context,
        )
        skip = HeadParameter((cfg.width,), ones, runtime, name="skip")()
        y = y[..., None] + jnp.broadcast_to(skip[:, None], value.shape) * value
        gate = self.projection("value", features, bias="in", name="gate")(x)
        y = (y * jax.nn.silu(gate.astype(jnp.float32))).astype(runtime.dtype)
        y = self.output_projection(features, name="out")(y)
        if cache is None or taps is None:
            return y, state
        states = set_layer(cache.state, last[..., None, :], state.cache_update)
        return y, state._replace(cache=LinearAttentionCache(states, (taps,)))

    def _select(
        self, value: Float[Array, "*batch T N 1"]
    ) -> tuple[Float[Array, "*batch T N"], Float[Array, "*batch T M"], Float[Array, "*batch T M"]]:
        """The steps of the features, float32, and what a token writes and reads."""
        cfg, runtime = self.attention, self.runtime
        init, features = self.config.initialisation.projection, (cfg.width, 1)
        selected = Linear(
            (cfg.selection_width,),
            init,
            runtime,
            "heads features -> features",
            input_shape=features,
            name="selection",
        )(value)
        ends = cfg.step_rank, cfg.step_rank + cfg.state_dim
        parts = dict(zip(("step", "write", "read"), jnp.split(selected, ends, -1), strict=True))
        if cfg.norm is not None:
            parts = {
                name: Norm(cfg.norm, runtime, name=f"{name}_norm")(x) for name, x in parts.items()
            }
        step, write, read = (
            F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor) for x in parts.values()
        )
        logits = Linear(features, init, runtime, "features -> heads features", name="step")(step)
        logits = logits[..., 0].astype(jnp.float32)
        bias = HeadParameter((cfg.width,), step_bias_init(*STEPS), runtime, name="step_bias")()
        return jax.nn.softplus(logits + jnp.broadcast_to(bias, logits.shape)), write, read


def rate_init(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Initialise the logarithms of the rates of each feature, which are 1, 2, ..."""
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[-1] + 1, dtype=dtype)), shape)
