"""Modules of RWKV-4: mixes of neighbouring tokens, time mixing and channel mixing."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache, LinearAttentionCache
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers.attention.core import AttentionModule, HeadParameter
from jaxformer.layers.attention.linear_attention import LinearAttentionTrace
from jaxformer.layers.cache import NO_STATE, CacheUpdate, LayerState, get_layer, set_layer
from jaxformer.layers.linear import Linear
from jaxformer.layers.parameters import sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, sow_and_perturb


class TokenShift(nn.Module):
    """Mixes of each token with the one before it, mix * x[t] + (1 - mix) * x[t-1]."""

    mixes: tuple[str, ...]
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: c.MixerInputs,
        cache: ConvolutionCache | None,
        cache_update: CacheUpdate | None,
    ) -> tuple[dict[str, Float[Array, "*batch T D"]], ConvolutionCache | None]:
        """Mix; returns the mixes by name, and the last token."""
        width = x.shape[-1]
        before = F.causal_convolution(
            x,
            jnp.stack([jnp.ones(width), jnp.zeros(width)]),
            initial_state=cache and get_layer(cache.inputs, cache_update)[..., 0, :, :],
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=self.runtime.mesh_axes.context,
        )
        now, last = (y.astype(jnp.float32) for y in (x, before.output))

        def mixed(name: str) -> Float[Array, "*batch T D"]:
            mix = sharded_parameter(self, name, mix_init, (width,), "features")
            mix = jnp.broadcast_to(F.pvary_like(mix, x), x.shape)
            return (mix * now + (1 - mix) * last).astype(x.dtype)

        y = {name: mixed(name) for name in self.mixes}
        if cache is None:
            return y, None
        state = before.state[..., None, :, :].astype(cache.inputs.dtype)
        return y, ConvolutionCache(set_layer(cache.inputs, state, cache_update))


class TimeMixing(AttentionModule):
    """Time mixing; see `config.TimeMixing`.

    Features are sharded over `tensor`, sequences over `context`, with states handed along.
    """

    attention: c.TimeMixing

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Average the values; returns the output and the new state."""
        cfg, runtime, cache = self.attention, self.runtime, state.cache
        features = cfg.width, 1
        x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)
        shift = TokenShift(cfg.mixes, runtime, name="shift")
        mixes, last = shift(x, inputs, cache and cache.convolutions[0], state.cache_update)
        key, value, receptance = (
            self.projection("value", features, name=name)(mixed) for name, mixed in mixes.items()
        )
        rate = jnp.exp(HeadParameter((cfg.width,), rate_init, runtime, name="rate")())
        decay = -jnp.broadcast_to(rate, key.shape[:-1])
        trace = LinearAttentionTrace(decay, receptance, key, value)
        _, receptance, key, value = sow_and_perturb(self, "attention_trace", trace)
        y, sums = F.wkv(
            key[..., 0],
            value[..., 0].astype(jnp.float32),
            rate,
            HeadParameter((cfg.width,), bonus_init, runtime, name="bonus")(),
            initial_state=cache and get_layer(cache.state, state.cache_update)[..., 0, :],
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=runtime.mesh_axes.context,
        )
        y = (jax.nn.sigmoid(receptance.astype(jnp.float32)) * y[..., None]).astype(runtime.dtype)
        y = self.output_projection(features, name="out")(y)
        if cache is None or last is None:
            return y, state
        states = set_layer(cache.state, sums[..., None, :], state.cache_update)
        return y, state._replace(cache=LinearAttentionCache(states, (last,)))


class ChannelMixing(AttentionModule):
    """Channel mixing; see `config.ChannelMixing`. Hidden features are sharded over `tensor`."""

    attention: c.ChannelMixing

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Apply the network to the mixes; returns the output and the new state."""
        cfg, runtime, init = self.attention, self.runtime, self.config.initialisation
        features, tensor = (cfg.hidden_dim, 1), runtime.mesh_axes.tensor
        shift = TokenShift(cfg.mixes, runtime, name="shift")
        mixes, last = shift(x, inputs, state.cache, state.cache_update)
        key = F.copy_to_tensor_parallel(mixes["key"], tensor)
        hidden = self.projection("feed_forward_in", features, name="key")(key)
        out = self.output_projection(features, keep_partial_sums=True, name="out")
        y = out(ACTIVATIONS["relu_squared"](hidden)).astype(jnp.float32)
        receptance = Linear(
            x.shape[-1:], init.projection, runtime, "model -> features", name="receptance"
        )
        gate = jax.nn.sigmoid(receptance(mixes["receptance"]).astype(jnp.float32))
        y = F.copy_to_tensor_parallel(gate, tensor) * y
        if not self.keep_partial_sums:
            y = F.reduce_from_tensor_parallel(y, tensor)
        return y.astype(runtime.dtype), state._replace(cache=last)


def mix_init(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Initialise the share of the present token, from 0 in the first feature to almost 1."""
    return jnp.arange(shape[0], dtype=dtype) / shape[0]


def rate_init(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Initialise the logarithms of the rates, evenly from -5 to 3."""
    return jnp.linspace(-5, 3, shape[0], dtype=dtype)


def bonus_init(_: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Initialise the bonuses: a third of features each at half below, at and half above log 0.3."""
    return jnp.log(0.3) + 0.5 * ((jnp.arange(shape[0], dtype=dtype) + 1) % 3 - 1)
