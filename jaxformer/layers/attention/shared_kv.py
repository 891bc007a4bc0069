"""Shared-KV attention module."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import KVCache, SharedCache
from jaxformer.config.positions import position_terms
from jaxformer.layers.attention.core import (
    ScoreOptions,
    apply_qk_norm,
    apply_rope,
    attend,
    gate_heads,
    local_kv_heads,
    make_output_gate,
    make_output_projection,
    make_qk_norm,
)
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.cache import CacheUpdate, update_cache
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig


class SharedKVAttention(nn.Module):
    """Attention with one projection for key and value; see `config.SharedKV`.

    The cache holds the rotated vector, or key and value if their norms or rotations differ.
    Heads are sharded as in `MultiHeadAttention`.
    """

    config: c.TransformerConfig
    attention: c.SharedKV
    positions: c.Positions | None
    runtime: RuntimeConfig
    causal: bool = True
    keep_partial_sums: bool = False  # as in Linear

    def setup(self):
        cfg, init = self.attention, self.config.initialisation
        self.query = Linear(
            (cfg.num_heads, cfg.head_dim),
            init.query or init.projection,
            self.runtime,
            "model -> heads features",
            bias="query" in cfg.biases,
        )
        self.key_value = Linear(
            (cfg.num_kv_heads, cfg.head_dim),
            init.projection,
            self.runtime,
            "model -> kv_heads features",
            bias="key_value" in cfg.biases,
        )
        heads = cfg.num_heads, cfg.head_dim
        self.output_gate = make_output_gate(self.config, cfg.output_gate, heads, self.runtime)
        self.out = make_output_projection(
            self.config, cfg.biases, heads, self.runtime, self.keep_partial_sums
        )
        if cfg.qk_norm is not None:
            norm = partial(make_qk_norm, cfg.qk_norm, head_dim=cfg.head_dim, runtime=self.runtime)
            self.query_norm = norm("heads", cfg.num_heads)
            self.key_norm = norm("kv_heads", cfg.num_kv_heads)
        if cfg.value_norm is not None:
            self.value_norm = Norm(cfg.value_norm, self.runtime)

    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: AttentionInputs,
        cache: KVCache | SharedCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T D"], KVCache | SharedCache | None]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        cfg = self.attention
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        query = self.query(x)
        key_value = value = self.key_value(x)
        if cfg.qk_norm is not None:
            query = apply_qk_norm(cfg.qk_norm, self.query_norm, query)
            key_value = apply_qk_norm(cfg.qk_norm, self.key_norm, key_value)
        value = key_value if cfg.value_norm is None else self.value_norm(value)
        query = apply_rope(self.positions, "q", query, inputs)
        value = local_kv_heads(
            apply_rope(self.positions, "v", value, inputs), cfg.num_kv_heads, self.runtime
        )
        new: KVCache | SharedCache
        if cfg.num_cached_arrays(self.positions) == 2:
            key = local_kv_heads(
                apply_rope(self.positions, "k", key_value, inputs), cfg.num_kv_heads, self.runtime
            )
            new = KVCache(key, value)
        else:
            query, new = self.scale_rotated_query(query), SharedCache(value)
        kv, cache = update_cache(new, cache, cache_update)
        heads = attend(
            self,
            query,
            kv[0],
            kv[-1],
            inputs,
            runtime=self.runtime,
            dropout_rate=self.config.dropout.attention,
            score_options=ScoreOptions(scale=cfg.scale, logit_softcap=cfg.logit_softcap),
        )
        heads = apply_rope(self.positions, "o", heads, inputs)
        return self.out(gate_heads(self.output_gate, x, heads)), cache

    def scale_rotated_query(
        self, query: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T N H"]:
        """Multiply rotated query features by the RoPE attention factor, for query and key."""
        rope = position_terms(self.positions).rope
        if rope is None or "k" not in rope.targets or rope.attention_scaling == 1:
            return query
        width = rope.rotary_dim(query.shape[-1])
        return jnp.concatenate(
            [rope.attention_scaling * query[..., :width], query[..., width:]], axis=-1
        )
