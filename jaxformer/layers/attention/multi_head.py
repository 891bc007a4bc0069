"""Multi-head attention module, for self-attention and cross-attention."""

import math
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import KVCache
from jaxformer.config.positions import as_transformer_xl
from jaxformer.layers.attention.core import (
    AttentionModule,
    HeadParameter,
    ScoreOptions,
    attend,
    local_kv_heads,
)
from jaxformer.layers.attention.inputs import AttentionInputs
from jaxformer.layers.cache import NO_STATE, LayerState, update_cache
from jaxformer.layers.lora import AdaptedKernel, adapt_kernel
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
    def __call__(self, dtype: DTypeLike = jnp.float32) -> AdaptedKernel:
        init_fn, (inputs, *outputs) = initializer(self.kernel_init), self.shape
        options: Any = dict(dtype=dtype, adaptable=True)
        kernel = sharded_parameter(
            self, "kernel", init_fn, self.shape, self.logical_axes, **options
        )
        lora = self.runtime.lora_of(self.path)
        if lora is None or not lora.fits(inputs, math.prod(outputs)):
            return AdaptedKernel(kernel)
        return adapt_kernel(self, lora, kernel, self.shape, self.logical_axes)


class GroupedHeadsAttention(AttentionModule):
    """Queries, norms and output of attention whose query heads share key-value heads.

    Query heads are sharded over `tensor`; each device has the key-value heads that its query heads
    read.
    """

    def setup(self):
        cfg = self.attention
        heads = cfg.num_heads, cfg.value_width
        self.query = self.projection("query", (cfg.num_heads, cfg.head_dim))
        self.output_gate, self.output_gate_bias = self.output_gate_parts(heads)
        self.out = self.output_projection(heads)
        if cfg.qk_norm is not None:
            self.query_norm = self.make_qk_norm("heads", cfg.num_heads)
            self.key_norm = self.make_qk_norm("kv_heads", cfg.num_kv_heads)
        if cfg.value_norm is not None:
            self.value_norm = Norm(cfg.value_norm, self.runtime)
        if cfg.sub_norm is not None:
            width = cfg.heads_width
            self.sub_norm = Norm(
                cfg.sub_norm, self.runtime, logical_axes="heads", num_features=width
            )

    @nn.nowrap
    def make_qk_norm(self, logical_axis: str, num_heads: int) -> Norm:
        """Make the norm of queries or keys."""
        norm, width = self.attention.qk_norm.norm, num_heads * self.attention.head_dim
        match self.attention.qk_norm.over:
            case "each_head":
                axes = f"{logical_axis} features"
                return Norm(norm, self.runtime, num_heads=num_heads, logical_axes=axes)
            case "width":
                return Norm(norm, self.runtime, logical_axes=logical_axis, num_features=width)
        return Norm(norm, self.runtime)

    def normalise(
        self, target: Literal["q", "k"], x: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T N H"]:
        """Apply QK-norm to queries or keys, over the full width or per head, if there is one."""
        if (qk_norm := self.attention.qk_norm) is None:
            return x
        norm = self.query_norm if target == "q" else self.key_norm
        if qk_norm.over == "width":
            return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
        return norm(x)


class MultiHeadAttention(GroupedHeadsAttention):
    """Multi-head attention, over the sequence itself or over the encoder's output."""

    attention: c.MultiHead

    def setup(self):
        super().setup()
        cfg = self.attention
        heads, kv_axes = (cfg.num_heads, cfg.head_dim), "model -> kv_heads"
        self.key = self.projection("key", (cfg.num_kv_heads, cfg.head_dim), kv_axes)
        self.value = self.projection("value", (cfg.num_kv_heads, cfg.value_width), kv_axes)
        if cfg.value_residual:
            half = nn.initializers.constant(0.5)
            self.value_weights = sharded_parameter(self, "value_weights", half, (2,), "features")
        if cfg.sinks:
            self.sinks = sharded_parameter(self, "sinks", zeros, (cfg.num_heads,), "heads")
        if as_transformer_xl(self.positions) is not None:
            self.content_bias = HeadParameter(heads, zeros, self.runtime)
            self.position_bias = HeadParameter(heads, zeros, self.runtime)
            shape, init = (self.config.model_dim, *heads), self.config.initialisation
            self.relative = HeadKernel(shape, init.projection, self.runtime)

    def __call__(
        self, x: Float[Array, "*batch T D"], inputs: AttentionInputs, state: LayerState = NO_STATE
    ) -> tuple[Float[Array, "*batch T D"], LayerState]:
        """Self-attention over the sequence and the cache; returns the output and the new state.

        With `cross_layer_kv` it reads the keys and values of an earlier layer with this window.
        """
        window = repr(self.attention.windows[0])
        if self.attention.cross_layer_kv:
            source_kv: Any = state.kv[window]
            return self.attend_to_source(x, inputs, source_kv), state
        x = F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)
        query = self.project_query(x, inputs)
        new, read = self.project_key_value(x, inputs), dict[str, KVCache | None]()
        if self.attention.value_residual:
            first: Any = state.kv["layer 0"]
            own, of_first = self.value_weights.astype(x.dtype)
            new = new._replace(value=own * new.value + of_first * first.value)
        elif state.kv.get("layer 0", new) is None:
            read["layer 0"] = new
        kv, cache = update_cache(new, state.cache, state.cache_update)
        y = self.project_heads(x, self.attend(query, kv, inputs))
        read |= {window: kv} if window in state.kv else {}
        return y, state._replace(cache=cache, kv=state.kv | read)

    def attend_to_source(
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
        return self.scale_query(query, inputs)

    def project_key_value(self, x: Float[Array, "*batch S D"], inputs: AttentionInputs) -> KVCache:
        """Project x to keys and values; apply clipping, QK-norm, RoPE; select local KV heads."""
        cfg = self.attention
        key = self.normalise_and_rotate("k", self.clip_qkv(self.key(x)), inputs)
        value = self.clip_qkv(self.value(x))
        if cfg.value_norm is not None:
            value = self.value_norm(value)
        value = self.apply_rope("v", value, inputs)
        return KVCache(*(local_kv_heads(x, cfg.num_kv_heads, self.runtime) for x in (key, value)))

    def normalise_and_rotate(
        self, target: Literal["q", "k"], x: Float[Array, "*batch T N H"], inputs: AttentionInputs
    ) -> Float[Array, "*batch T N H"]:
        """Apply QK-norm and RoPE to queries or keys, in the order of `QKNorm.placement`."""
        qk_norm = self.attention.qk_norm
        if qk_norm is not None and qk_norm.placement == "after_rope":
            return self.normalise(target, self.apply_rope(target, x, inputs))
        return self.apply_rope(target, self.normalise(target, x), inputs)

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
            score_options=ScoreOptions(
                scale=cfg.scale, logit_softcap=cfg.logit_softcap, normalizer=cfg.normalizer
            ),
            sinks=self.sinks if cfg.sinks else None,
            gather_keys=as_transformer_xl(self.positions) is not None,
        )
        return self.apply_rope("o", heads, inputs)

    def clip_qkv(self, x: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
        """Clip to [-clip_qkv, clip_qkv]; unchanged if it is None."""
        bound = self.attention.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def transformer_xl_terms(self, query: Float[Array, "*batch T N H"], inputs: AttentionInputs):
        """Return query and bias; Transformer-XL changes both, other positions neither."""
        option = as_transformer_xl(self.positions)
        queries, keys = inputs.query_positions, inputs.key_positions
        if option is None or queries is None or keys is None:
            return query, inputs.bias

        def add_head_bias(bias: HeadParameter) -> Float[Array, "*batch T N H"]:
            return query + jnp.broadcast_to(bias().astype(query.dtype), query.shape)

        scale = self.attention.scale
        distance_bias = F.transformer_xl_bias(
            add_head_bias(self.position_bias),
            self.relative().merged(),
            queries,
            keys,
            bidirectional=not self.causal,
        )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return add_head_bias(self.content_bias), scale * distance_bias
