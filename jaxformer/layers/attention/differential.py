"""Differential attention module."""

from functools import partial

import jax.numpy as jnp
from flax.linen.initializers import normal
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import KVCache
from jaxformer.layers.attention.core import ScoreOptions, attend
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.attention.multi_head import GroupedHeadsAttention
from jaxformer.layers.cache import NO_STATE, LayerState, update_cache
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import sharded_parameter

FACTOR_VECTORS = "factor_query_1", "factor_query_2", "factor_key_1", "factor_key_2"


class DifferentialAttention(GroupedHeadsAttention):
    """Differential attention; see `config.Differential`."""

    attention: c.Differential

    def setup(self):
        super().setup()
        kv_heads = self.attention.num_kv_heads, self.attention.head_dim
        self.key = self.projection("key", kv_heads, "model -> kv_heads")
        self.value = self.projection("value", kv_heads, "model -> kv_heads")
        self.norm = Norm(self.attention.norm, self.runtime)
        self.factor_vectors = [
            sharded_parameter(self, name, normal(0.1), (self.attention.head_dim,), "features")
            for name in FACTOR_VECTORS
        ]

    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Self-attention over the sequence and the cache; returns the output and the new state."""
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        query = self.apply_rope("q", self.query(x), inputs)
        new = KVCache(self.apply_rope("k", self.key(x), inputs), self.value(x))
        (key, value), cache = update_cache(new, state.cache, state.cache_update)
        initial = F.initial_differential_factor(0 if state.layer is None else state.layer)
        a_1, a_2, b_1, b_2 = self.factor_vectors
        options = ScoreOptions(scale=self.attention.scale)
        difference = F.differential_attention(
            query,
            key,
            value,
            F.differential_factor(jnp.stack([a_1, a_2]), jnp.stack([b_1, b_2]), initial),
            attention=partial(attend, self, inputs=inputs, score_options=options),
        )
        heads = self.norm(difference) * (1 - initial).astype(difference.dtype)
        return self.out(heads.reshape(query.shape)), state._replace(cache=cache)
