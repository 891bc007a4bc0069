"""Multi-head latent attention module (MLA), with expanded keys and values or absorbed kernels."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import LatentCache
from jaxformer.layers.attention.core import AttentionModule, ScoreOptions, attend
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.attention.multi_head import HeadKernel
from jaxformer.layers.cache import NO_STATE, LayerState, update_cache
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import apply_dropout

PER_HEAD_AXES = "features -> heads features"


class LatentAttention(AttentionModule):
    """Multi-head latent attention (MLA); see `config.Latent`.

    Without a cache, keys and values are expanded; with one, the form with fewer FLOPs is used, for
    one new token always the absorbed one. Query heads are sharded over `tensor`; the latent is
    replicated.
    """

    attention: c.Latent

    def setup(self):
        cfg, init, runtime = self.attention, self.config.initialisation.projection, self.runtime
        per_query = (cfg.num_heads, cfg.nope_dim + cfg.rope_dim)
        if cfg.query_latent_dim is None:
            self.query = self.projection("query", per_query)
        else:
            self.query_latent = self.shared_projection("query_latent", cfg.query_latent_dim)
            self.query_latent_norm = Norm(cfg.norm, runtime)
            self.query = self.projection("query", per_query, "features -> heads")
        self.latent = self.shared_projection("latent", cfg.latent_dim)
        self.latent_norm = Norm(cfg.norm, runtime)
        self.rotary_key = self.shared_projection("rotary_key", cfg.rope_dim)
        for_kernels = init, runtime, PER_HEAD_AXES
        self.key = HeadKernel((cfg.latent_dim, cfg.num_heads, cfg.nope_dim), *for_kernels)
        self.value = HeadKernel((cfg.latent_dim, cfg.num_heads, cfg.value_dim), *for_kernels)
        heads = cfg.num_heads, cfg.value_dim
        self.output_gate, self.output_gate_bias = self.output_gate_parts(heads)
        self.out = self.output_projection(heads)

    @nn.nowrap
    def shared_projection(self, role: str, width: int) -> Linear:
        """Make a projection to one head, which all devices have and all query heads read."""
        return self.projection(role, (1, width), "model -> kv_heads")

    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Self-attention over the sequence and the cache; returns the output and the new state."""
        cfg = self.attention
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        rotary_key = self.apply_rope("k", self.rotary_key(x), inputs)
        new = LatentCache(self.latent_norm(self.latent(x)), rotary_key)
        use_absorbed = state.cache is not None and F.prefer_absorbed(
            x.shape[-2], cfg.latent_dim, cfg.nope_dim, cfg.value_dim
        )
        kv, cache = update_cache(new, state.cache, state.cache_update)
        query, kv = self.project_query(x, inputs), LatentCache(*(y.astype(x.dtype) for y in kv))
        attend = self.attend_absorbed if use_absorbed else self.attend_expanded
        heads = attend(query, kv, inputs)
        return self.project_heads(x, heads), state._replace(cache=cache)

    def project_query(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Q"]:
        """Project x to queries: nope_dim features, then rope_dim with RoPE; scale both."""
        cfg = self.attention
        if cfg.query_latent_dim is not None:
            x = self.query_latent_norm(self.query_latent(x)).squeeze(-2)
        nope_query, rope_query = jnp.split(self.query(x), [cfg.nope_dim], axis=-1)
        rope_query = self.apply_rope("q", rope_query, inputs)
        return self.scale_query(jnp.concatenate([nope_query, rope_query], axis=-1), inputs)

    def attend_expanded(
        self, query: Float[Array, "*batch T N Q"], kv: LatentCache, inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend with keys and values expanded from the latents."""
        latent, rotary_key = (y.squeeze(-2) for y in kv)
        to_key, to_value = self.key(query.dtype), self.value(query.dtype)
        key, value = F.expand_latent(latent, rotary_key, to_key.kernel, to_value.kernel)
        if (lora := self.runtime.adapter) is not None:
            latent = apply_dropout(self, latent, lora.dropout)
        key, value = to_key.add_update(key, latent), to_value.add_update(value, latent)
        return self.attend(query, key, value, inputs)

    def attend_absorbed(
        self, query: Float[Array, "*batch T N Q"], kv: LatentCache, inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend to the latents directly, with the key kernel absorbed into the query."""
        key, value = (x(query.dtype).merged() for x in (self.key, self.value))
        query = F.absorb_query(query, key)
        latent_mean = self.attend(query, jnp.concatenate(kv, axis=-1), kv.latent, inputs)
        return F.up_project_values(latent_mean, value)

    def attend(
        self,
        query: Float[Array, "*batch T N Q"],
        key: Float[Array, "*batch S K Q"],
        value: Float[Array, "*batch S K Hv"],
        inputs: AttentionInputs,
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend with the scale of the expanded keys."""
        cfg = self.attention
        scale = (cfg.nope_dim + cfg.rope_dim) ** -0.5 if cfg.scale is None else cfg.scale
        return attend(self, query, key, value, inputs, score_options=ScoreOptions(scale=scale))
