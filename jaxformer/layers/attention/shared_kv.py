"""Shared-KV attention module: one projection is key and value."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import KVCache, SharedCache
from jaxformer.config.positions import as_rope
from jaxformer.layers.attention.core import ScoreOptions, attend, local_kv_heads
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.attention.multi_head import GroupedHeadsAttention
from jaxformer.layers.cache import NO_STATE, LayerState, update_cache


class SharedKVAttention(GroupedHeadsAttention):
    """Attention with one projection for key and value; see `config.SharedKV`.

    The cache holds the rotated vector, or key and value if their norms or rotations differ.
    """

    attention: c.SharedKV

    def setup(self):
        super().setup()
        kv_heads = self.attention.num_kv_heads, self.attention.head_dim
        self.key_value = self.projection("key_value", kv_heads, "model -> kv_heads")

    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Self-attention over the sequence and the cache; returns the output and the new state."""
        cfg = self.attention
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        query, projected = self.query(x), self.key_value(x)
        query, key_value = self.normalise("q", query), self.normalise("k", projected)
        value = key_value if cfg.value_norm is None else self.value_norm(projected)
        query = self.apply_rope("q", query, inputs)
        value = local_kv_heads(self.apply_rope("v", value, inputs), cfg.num_kv_heads, self.runtime)
        new: KVCache | SharedCache
        if cfg.num_cached_arrays == 2:
            key = local_kv_heads(
                self.apply_rope("k", key_value, inputs), cfg.num_kv_heads, self.runtime
            )
            new = KVCache(key, value)
        else:
            query, new = self.scale_rotated_query(query), SharedCache(value)
        kv, cache = update_cache(new, state.cache, state.cache_update)
        score_options = ScoreOptions(scale=cfg.scale)
        heads = attend(self, query, kv[0], kv[-1], inputs, score_options=score_options)
        heads = self.apply_rope("o", heads, inputs)
        return self.project_heads(x, heads), state._replace(cache=cache)

    def scale_rotated_query(
        self, query: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T N H"]:
        """Multiply rotated query features by the RoPE attention factor, for query and key."""
        rope = as_rope(self.positions)
        if rope is None or "k" not in rope.targets or rope.attention_scaling == 1:
            return query
        width = rope.rotary_dim(query.shape[-1])
        return jnp.concatenate(
            [rope.attention_scaling * query[..., :width], query[..., width:]], axis=-1
        )
