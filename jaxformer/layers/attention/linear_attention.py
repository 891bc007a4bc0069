"""Linear attention module: convolutions, steps and weights, the state, a gated norm."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import ones
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache, LinearAttentionCache
from jaxformer.layers.attention.core import AttentionModule, HeadParameter, local_kv_heads
from jaxformer.layers.cache import NO_STATE, CacheUpdate, LayerState, get_layer, set_layer
from jaxformer.layers.convolution import Convolution
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import local_shard, log_uniform_init, step_bias_init
from jaxformer.layers.runtime import sow_and_perturb

RATES = 1.0, 16.0  # initial rates of the decay, drawn evenly between these
STEPS = 1e-3, 0.1  # initial steps
UNIT_EPS = 1e-6  # added to the squared length of queries and keys


class LinearAttentionTrace(NamedTuple):
    """Logarithms of the decays (zeros without a decay) and vectors, sown for `inspect`."""

    log_decay: Float[Array, "*batch T N"] | Float[Array, "*batch T N H"]
    query: Float[Array, "*batch T K H"]
    key: Float[Array, "*batch T K H"]
    value: Float[Array, "*batch T N Hv"]


class LinearAttention(AttentionModule):
    """Linear attention; see `config.LinearAttention`.

    Heads are sharded over `tensor`, sequences over `context`, with states handed along. Key heads
    are replicated as key-value heads are: each device reads the key head of its heads.
    """

    attention: c.LinearAttention

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: c.MixerInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Write tokens into the cached state and read it; returns the output and the new state."""
        cfg, runtime = self.attention, self.runtime
        cache, cache_update = state.cache, state.cache_update
        shared_x = F.copy_to_tensor_parallel(x, runtime.mesh_axes.tensor)
        (query, key, value), convolutions = self._vectors(shared_x, inputs, cache, cache_update)
        if cfg.unit_vectors:
            query, key = _unit_vectors(query), _unit_vectors(key)
        log_decay, beta = self._decay_and_beta(x, shared_x)
        decays = jnp.zeros(value.shape[:-1]) if log_decay is None else log_decay
        trace = LinearAttentionTrace(decays, query, key, value)
        _, query, key, value = sow_and_perturb(self, "attention_trace", trace)
        scale = cfg.key_dim**-0.5 if cfg.scale is None else cfg.scale
        y, last = F.linear_attention(
            query.astype(jnp.float32) * scale,
            key,
            value.astype(jnp.float32),
            log_decay=log_decay,
            beta=beta,
            delta_rule=cfg.delta_rule,
            initial_state=cache and get_layer(cache.state, cache_update),
            segments=inputs.segments,
            valid=inputs.valid,
            axis_name=runtime.mesh_axes.context,
        )
        if cfg.skip:
            skip = HeadParameter((cfg.num_heads,), ones, runtime, name="skip")()
            y = y + jnp.broadcast_to(skip[:, None], y.shape) * value.astype(jnp.float32)
        y = self._gated_norm(y, x, shared_x).astype(runtime.dtype)
        out = self.output_projection((cfg.num_heads, cfg.value_dim), name="out")
        if cache is None:
            return out(y), state
        new = LinearAttentionCache(set_layer(cache.state, last, cache_update), convolutions)
        return out(y), state._replace(cache=new)

    def _vectors(
        self,
        x: Float[Array, "*batch T D"],
        inputs: c.MixerInputs,
        cache: LinearAttentionCache | None,
        cache_update: CacheUpdate | None,
    ) -> tuple[list[Float[Array, "*batch T N H"]], tuple[ConvolutionCache, ...]]:
        """Queries, keys and values, and the caches of their convolutions, if there are any."""
        cfg, vectors, convolutions = self.attention, list[Array](), list[Any]()
        keys, values = (cfg.num_key_heads, cfg.key_dim), (cfg.num_heads, cfg.value_dim)
        for i, name in enumerate(("query", "key", "value")):
            shape, axis = (values, "heads") if name == "value" else (keys, "kv_heads")
            y = self._linear(name, shape, axis)(x)
            if axis == "kv_heads":
                y = local_kv_heads(y, cfg.num_key_heads, self.runtime)
            if cfg.convolution_width is not None:
                convolve = Convolution(
                    *shape,
                    cfg.convolution_width,
                    self.runtime,
                    bias="convolution" in cfg.biases,
                    heads_axis=axis,
                    name=f"{name}_convolution",
                )
                y, state = convolve(y, inputs, cache and cache.convolutions[i], cache_update)
                convolutions.append(state)
            vectors.append(jax.nn.silu(y))
        return vectors, tuple(convolutions)

    @nn.nowrap
    def _linear(self, name: str, features: tuple[int, ...], axis: str = "heads") -> Linear:
        """A projection from the model width to heads."""
        return self.projection(name, features, f"model -> {axis}", bias="in", name=name)

    def _low_rank(
        self,
        name: str,
        features: tuple[int, ...],
        rank: int | None,
        x: Float[Array, "*batch T D"],
        shared_x: Float[Array, "*batch T D"],
    ) -> Float[Array, "..."]:
        """A projection to heads, by way of `rank` features if it is not None."""
        if rank is None:
            return self._linear(name, features)(shared_x)
        init, runtime = self.config.initialisation.projection, self.runtime
        down = Linear((rank,), init, runtime, "model -> features", name=f"{name}_down")(x)
        axes = " ".join(["heads", *["features"] * (len(features) - 1)])
        up = Linear(features, init, runtime, f"features -> {axes}", name=name)
        return up(F.copy_to_tensor_parallel(down, runtime.mesh_axes.tensor))

    def _decay_and_beta(
        self, x: Float[Array, "*batch T D"], shared_x: Float[Array, "*batch T D"]
    ) -> tuple[Array | None, Float[Array, "*batch T N"] | None]:
        """Logarithms of the decays, and the weights of the tokens, float32."""
        cfg, runtime = self.attention, self.runtime
        log_decay = beta = None
        if cfg.slopes is not None:
            slopes = local_shard(jnp.asarray(cfg.slopes), runtime.mesh_axes.tensor, axis=0)
            log_decay = jnp.broadcast_to(-slopes, (*x.shape[:-1], *slopes.shape))
        if (decay := cfg.steps) is not None:
            features = (cfg.num_heads,) if decay.over == "head" else (cfg.num_heads, cfg.key_dim)
            logits = self._low_rank("step", features, decay.rank, x, shared_x).astype(jnp.float32)
            bias = HeadParameter(features, step_bias_init(*STEPS), runtime, name="step_bias")()
            step = jax.nn.softplus(logits + jnp.broadcast_to(bias, logits.shape))
            if decay.min_step > 0 or decay.max_step is not None:
                step = jnp.clip(step, decay.min_step, decay.max_step)
            rate = HeadParameter((cfg.num_heads,), log_uniform_init(*RATES), runtime, name="rate")()
            rate = jnp.exp(rate).reshape(-1, *(1,) * (len(features) - 1))
            log_decay = -step * jnp.broadcast_to(rate, step.shape)
            beta = step if cfg.beta == "step" else None
        if cfg.beta == "sigmoid":
            logits = self._linear("beta", (cfg.num_heads,))(shared_x)
            beta = cfg.max_beta * jax.nn.sigmoid(logits.astype(jnp.float32))
        return log_decay, beta

    def _gated_norm(
        self,
        y: Float[Array, "*batch T N H"],
        x: Float[Array, "*batch T D"],
        shared_x: Float[Array, "*batch T D"],
    ) -> Float[Array, "*batch T N H"]:
        cfg, output = self.attention, self.attention.output
        gate = None
        if output.activation is not None:
            values = cfg.num_heads, cfg.value_dim
            logits = self._low_rank("gate", values, output.rank, x, shared_x).astype(jnp.float32)
            gate = jax.nn.silu(logits) if output.activation == "silu" else jax.nn.sigmoid(logits)
        if gate is not None and output.placement == "before_norm":
            y = y * gate
        if output.norm is not None:
            options: dict[str, Any] = {}
            shape: tuple[int, ...] = y.shape
            if output.over == "all":
                options = dict(logical_axes="heads", num_features=cfg.heads_width)
                shape = *y.shape[:-2], -1
            elif output.over == "group":
                groups = cfg.num_key_heads
                options = dict(num_heads=groups, num_features=cfg.heads_width // groups)
                options["logical_axes"] = "features heads" if groups == 1 else "heads features"
                shape = *y.shape[:-2], max(1, y.shape[-2] * groups // cfg.num_heads), -1
            norm = Norm(output.norm, self.runtime, name="norm", **options)
            y = norm(y.reshape(shape)).reshape(y.shape)
        if gate is not None and output.placement == "after_norm":
            y = y * gate
        return y


def _unit_vectors(x: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
    """Vectors of length 1, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
