"""Multi-head attention module, for self-attention and cross-attention."""

from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import KVCache
from jaxformer.config.attention.multi_head import Projection
from jaxformer.config.positions import position_terms
from jaxformer.layers.attention.core import (
    HeadParameter,
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
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig


class HeadKernel(nn.Module):
    """A kernel per head, for functions that do the product themselves."""

    shape: tuple[int, ...]
    kernel_init: c.Initialiser
    runtime: RuntimeConfig
    logical_axes: str = "model -> heads features"

    @nn.compact
    def __call__(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "D N H"]:
        init_fn = initializer(self.kernel_init)
        return sharded_parameter(
            self, "kernel", init_fn, self.shape, self.logical_axes, self.runtime, dtype=dtype
        )


class MultiHeadAttention(nn.Module):
    """Multi-head attention, over the sequence itself or over the encoder's output.

    Query heads are sharded over `tensor`; each device has the key-value heads that its query heads
    read. With `returns_kv` the new cache comes with the keys and values that were attended to, for
    layers with `cross_layer_kv`.
    """

    config: c.TransformerConfig
    attention: c.MultiHead
    positions: c.Positions | None
    runtime: RuntimeConfig
    causal: bool = True
    keep_partial_sums: bool = False  # as in Linear
    returns_kv: bool = False

    def setup(self):
        cfg, init = self.attention, self.config.initialisation

        def project(name: Projection, heads: int, kernel_init: c.Initialiser | None) -> Linear:
            shape = (heads, cfg.head_dim)
            logical_axes = f"model -> {'heads' if name == 'query' else 'kv_heads'} features"
            kernel_init = kernel_init or init.projection
            return Linear(shape, kernel_init, self.runtime, logical_axes, bias=name in cfg.biases)

        self.query = project("query", cfg.num_heads, init.query)
        if not cfg.cross_layer_kv:
            self.key = project("key", cfg.num_kv_heads, init.key)
            self.value = project("value", cfg.num_kv_heads, init.value)
        heads = cfg.num_heads, cfg.head_dim
        self.output_gate = make_output_gate(self.config, cfg.output_gate, heads, self.runtime)
        self.out = make_output_projection(
            self.config, cfg.biases, heads, self.runtime, self.keep_partial_sums
        )
        if cfg.qk_norm is not None:
            norm = partial(make_qk_norm, cfg.qk_norm, head_dim=cfg.head_dim, runtime=self.runtime)
            self.query_norm = norm("heads", cfg.num_heads)
            if not cfg.cross_layer_kv:
                self.key_norm = norm("kv_heads", cfg.num_kv_heads)
        if cfg.value_norm is not None:
            self.value_norm = Norm(cfg.value_norm, self.runtime)
        if cfg.sinks:
            zeros = nn.initializers.zeros
            self.sinks = sharded_parameter(
                self, "sinks", zeros, (cfg.num_heads,), "heads", self.runtime
            )
        if position_terms(self.positions).transformer_xl is not None:
            self.content_bias = HeadParameter(heads, nn.initializers.zeros, self.runtime)
            self.position_bias = HeadParameter(heads, nn.initializers.zeros, self.runtime)
            self.relative = HeadKernel(
                (self.config.model_dim, *heads), init.projection, self.runtime
            )

    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: AttentionInputs,
        cache: KVCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T D"], Any]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        if inputs.source_kv is not None:
            return self.cross_attend(x, inputs, inputs.source_kv), cache
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        query = self.project_query(x, inputs)
        kv, cache = update_cache(self.project_key_value(x, inputs), cache, cache_update)
        y = self.project_heads(x, self.attend(query, kv, inputs))
        return y, (cache, kv) if self.returns_kv else cache

    def cross_attend(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, source_kv: KVCache
    ) -> Float[Array, "*batch T D"]:
        """Attention to keys and values of the encoder's output or of an earlier layer."""
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        heads = self.attend(self.project_query(x, inputs), source_kv, inputs)
        return self.project_heads(x, heads)

    def project_query(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N H"]:
        """Project x to queries; apply clipping, QK-norm, RoPE and scaling as configured."""
        query = self.normalise_and_rotate("q", self.clip_qkv(self.query(x)), inputs)
        if inputs.query_scale is None:
            return query
        scale = inputs.query_scale.astype(query.dtype)[..., None, None]
        return query * jnp.broadcast_to(scale, query.shape)

    def project_key_value(self, x: Float[Array, "*batch S D"], inputs: AttentionInputs) -> KVCache:
        """Project x to keys and values; apply clipping, QK-norm, RoPE; select local KV heads."""
        cfg, positions = self.attention, self.positions
        key = self.normalise_and_rotate("k", self.clip_qkv(self.key(x)), inputs)
        value = self.clip_qkv(self.value(x))
        if cfg.value_norm is not None:
            value = self.value_norm(value)
        value = apply_rope(positions, "v", value, inputs)
        return KVCache(*(local_kv_heads(x, cfg.num_kv_heads, self.runtime) for x in (key, value)))

    def normalise_and_rotate(
        self, target: Literal["q", "k"], x: Float[Array, "*batch T N H"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N H"]:
        """Apply QK-norm and RoPE to queries or keys, in the order of `QKNorm.placement`."""
        qk_norm = self.attention.qk_norm
        if qk_norm is None:
            return apply_rope(self.positions, target, x, inputs)
        norm = self.query_norm if target == "q" else self.key_norm
        if qk_norm.placement == "after_rope":
            return apply_qk_norm(qk_norm, norm, apply_rope(self.positions, target, x, inputs))
        return apply_rope(self.positions, target, apply_qk_norm(qk_norm, norm, x), inputs)

    def attend(
        self, query: Float[Array, "*batch T N H"], kv: KVCache, inputs: AttentionInputs
    ) -> Float[Array, "*batch T N H"]:
        """Attend to keys and values; apply RoPE to the outputs of the heads."""
        cfg = self.attention
        query, bias = self.transformer_xl_terms(query, inputs)
        heads = attend(
            self,
            query,
            *kv,
            inputs._replace(bias=bias),
            runtime=self.runtime,
            dropout_rate=self.config.dropout.attention,
            score_options=ScoreOptions(
                scale=cfg.scale, logit_softcap=cfg.logit_softcap, normalizer=cfg.normalizer
            ),
            sinks=self.sinks if cfg.sinks else None,
            gather_keys=position_terms(self.positions).transformer_xl is not None,
        )
        return apply_rope(self.positions, "o", heads, inputs)

    def project_heads(
        self, x: Float[Array, "*batch T D"], heads: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T D"]:
        """Gate the heads by x, if there is a gate, and project them to the model width."""
        return self.out(gate_heads(self.output_gate, x, heads))

    def clip_qkv(self, x: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
        """Clip to [-clip_qkv, clip_qkv]; unchanged if it is None."""
        bound = self.attention.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def transformer_xl_terms(self, query: Float[Array, "*batch T N H"], inputs: AttentionInputs):
        """Return query and bias; Transformer-XL changes both, other positions neither."""
        option = position_terms(self.positions).transformer_xl
        if option is None or inputs.query_positions is None or inputs.key_positions is None:
            return query, inputs.bias

        def add_head_bias(bias: HeadParameter) -> Float[Array, "*batch T N H"]:
            return query + jnp.broadcast_to(bias().astype(query.dtype), query.shape)

        scale = self.attention.scale
        distance_bias = F.transformer_xl_bias(
            add_head_bias(self.position_bias),
            self.relative(),
            inputs.query_positions,
            inputs.key_positions,
            base=option.base,
            bidirectional=not self.causal,
        )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return add_head_bias(self.content_bias), scale * distance_bias
