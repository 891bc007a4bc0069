"""Multi-head latent attention module (MLA)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import LatentCache
from jaxformer.layers.attention.core import (
    ScoreOptions,
    apply_rope,
    attend,
    gate_heads,
    make_output_gate,
    make_output_projection,
)
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.attention.multi_head import HeadKernel
from jaxformer.layers.cache import CacheUpdate, update_cache
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig

SHARED_HEAD_AXES = "model -> kv_heads features"  # one head, which all devices have
PER_HEAD_AXES = "features -> heads features"


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA); see `config.Latent`.

    Without a cache, keys and values are expanded; with one, the form with fewer FLOPs is used, for
    one new token always the absorbed one. Query heads are sharded over `tensor`; the latent is
    replicated.
    """

    config: c.TransformerConfig
    attention: c.Latent
    positions: c.Positions | None
    runtime: RuntimeConfig
    causal: bool = True
    keep_partial_sums: bool = False  # as in Linear

    def setup(self):
        cfg, init, runtime = self.attention, self.config.initialisation, self.runtime
        kernel_init = init.projection
        per_query = (cfg.num_heads, cfg.nope_dim + cfg.rope_dim)
        if cfg.query_latent_dim is None:
            self.query = Linear(
                per_query, init.query or kernel_init, runtime, "model -> heads features"
            )
        else:
            self.query_latent = self.shared_projection(cfg.query_latent_dim, "query_latent")
            self.query_latent_norm = Norm(cfg.norm, runtime)
            self.query = Linear(per_query, init.query or kernel_init, runtime, PER_HEAD_AXES)
        self.latent = self.shared_projection(cfg.latent_dim, "latent")
        self.latent_norm = Norm(cfg.norm, runtime)
        self.rotary_key = self.shared_projection(cfg.rope_dim, "rotary_key")
        key, value = init.key or kernel_init, init.value or kernel_init
        self.key = HeadKernel(
            (cfg.latent_dim, cfg.num_heads, cfg.nope_dim), key, runtime, PER_HEAD_AXES
        )
        self.value = HeadKernel(
            (cfg.latent_dim, cfg.num_heads, cfg.value_dim), value, runtime, PER_HEAD_AXES
        )
        heads = cfg.num_heads, cfg.value_dim
        self.output_gate = make_output_gate(self.config, cfg.output_gate, heads, self.runtime)
        self.out = make_output_projection(
            self.config, cfg.biases, heads, self.runtime, self.keep_partial_sums
        )

    @nn.nowrap
    def shared_projection(self, width: int, name: str) -> Linear:
        """Make a projection to one head that all query heads read."""
        kernel_init, bias = (self.config.initialisation.projection, name in self.attention.biases)
        return Linear((1, width), kernel_init, self.runtime, SHARED_HEAD_AXES, bias=bias)

    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: AttentionInputs,
        cache: LatentCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T D"], LatentCache | None]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        cfg = self.attention
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        rotary_key = apply_rope(self.positions, "k", self.rotary_key(x), inputs)
        new = LatentCache(self.latent_norm(self.latent(x)), rotary_key)
        use_absorbed = cache is not None and F.prefer_absorbed(
            x.shape[-2], cfg.latent_dim, cfg.nope_dim, cfg.value_dim
        )
        kv, cache = update_cache(new, cache, cache_update)
        query, kv = self.project_query(x, inputs), LatentCache(*(y.astype(x.dtype) for y in kv))
        attend = self.attend_absorbed if use_absorbed else self.attend_expanded
        heads = attend(query, kv, inputs)
        return self.out(gate_heads(self.output_gate, x, heads)), cache

    def project_query(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Q"]:
        """Project x to queries: nope_dim features, then rope_dim features with RoPE."""
        cfg = self.attention
        if cfg.query_latent_dim is not None:
            x = self.query_latent_norm(self.query_latent(x)).squeeze(-2)
        nope_query, rope_query = jnp.split(self.query(x), [cfg.nope_dim], axis=-1)
        return jnp.concatenate(
            [nope_query, apply_rope(self.positions, "q", rope_query, inputs)], axis=-1
        )

    def attend_expanded(
        self, query: Float[Array, "*batch T N Q"], kv: LatentCache, inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend with keys and values expanded from the latents."""
        latent, rotary_key = (y.squeeze(-2) for y in kv)
        key, value = self.key(query.dtype), self.value(query.dtype)
        return self.attend(query, *F.expand_latent(latent, rotary_key, key, value), inputs)

    def attend_absorbed(
        self, query: Float[Array, "*batch T N Q"], kv: LatentCache, inputs: AttentionInputs
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend to the latents directly, with the key kernel absorbed into the query."""
        query = F.absorb_query(query, self.key(query.dtype))
        latent_mean = self.attend(query, jnp.concatenate(kv, axis=-1), kv.latent, inputs)
        return F.up_project_values(latent_mean, self.value(query.dtype))

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
        return attend(
            self,
            query,
            key,
            value,
            inputs,
            runtime=self.runtime,
            dropout_rate=self.config.dropout.attention,
            score_options=ScoreOptions(scale=scale),
        )
