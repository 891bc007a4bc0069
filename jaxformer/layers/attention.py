"""Multi-head attention module, for self-attention and cross-attention."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention import Projection
from jaxformer.layers.cache import KVCache
from jaxformer.layers.guide import Guide
from jaxformer.layers.heads import (
    PerHead,
    Weighing,
    head_norm,
    mine,
    mix,
    normalise,
    out_of_heads,
    turn,
    with_earlier,
)
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode
from jaxformer.layers.parameters import parameter


class Kernel(nn.Module):
    """A kernel per head, for functions that do the product themselves."""

    shape: tuple[int, ...]
    initial: c.Initialiser
    mode: Mode
    axes: str = "model -> heads features"

    @nn.compact
    def __call__(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "D N H"]:
        start = initializer(self.initial)
        return parameter(self, "kernel", start, self.shape, self.axes, self.mode, dtype=dtype)


class Attention(nn.Module):
    """Multi-head attention, over the sequence itself or over the encoder's output.

    Where heads are shared out among devices, each has its part of them, and of the key-value heads
    those that its query heads read.
    """

    config: c.TransformerConfig
    positions: c.Positions | None
    mode: Mode
    causal: bool = True
    parts: bool = False  # as in Linear

    def setup(self):
        cfg, init = self.config.multi_head, self.config.initialisation

        def project(name: Projection, heads: int, start: c.Initialiser | None) -> Linear:
            shape = (heads, cfg.head_dim)
            axes = f"model -> {'heads' if name == 'query' else 'kv_heads'} features"
            start = start or init.projection
            return Linear(shape, start, self.mode, axes, bias=name in cfg.biases)

        self.query = project("query", cfg.num_heads, init.query)
        self.key = project("key", cfg.num_kv_heads, init.key)
        self.value = project("value", cfg.num_kv_heads, init.value)
        self.out = out_of_heads(self.config, (cfg.num_heads, cfg.head_dim), self.mode, self.parts)
        if cfg.qk_norm is not None:
            norm = partial(head_norm, cfg.qk_norm, head_dim=cfg.head_dim, mode=self.mode)
            self.query_norm = norm("heads", cfg.num_heads)
            self.key_norm = norm("kv_heads", cfg.num_kv_heads)
        if isinstance(self.positions, c.TransformerXL):
            per_head = (cfg.num_heads, cfg.head_dim)
            self.content_bias = PerHead(per_head, nn.initializers.zeros, self.mode)
            self.position_bias = PerHead(per_head, nn.initializers.zeros, self.mode)
            self.relative = Kernel((self.config.model_dim, *per_head), init.projection, self.mode)

    def __call__(
        self, x: Float[Array, "*batch T D"], guide: Guide, cache: KVCache | None = None
    ) -> tuple[Float[Array, "*batch T D"], KVCache | None]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        x = F.to_parts(x, self.mode.axes.tensor)
        query = self.queries(x, guide)
        seen, cache = with_earlier(self.keys_values(x, guide), cache, guide, self.mode)
        return self.mix(query, seen, guide), cache

    def read(
        self, x: Float[Array, "*batch T D"], guide: Guide, source: KVCache
    ) -> Float[Array, "*batch T D"]:
        """Attend to a source, whose keys and values are from `keys_values`."""
        x = F.to_parts(x, self.mode.axes.tensor)
        return self.mix(self.queries(x, guide), source, guide)

    def queries(self, x: Float[Array, "*batch T D"], guide: Guide) -> Float[Array, "*batch T N H"]:
        """Project x to queries; apply clipping, QK-norm and RoPE as configured."""
        query = self.clip(self.query(x))
        if (choice := self.config.multi_head.qk_norm) is not None:
            query = normalise(choice, self.query_norm, query)
        return turn(self.positions, "q", query, guide)

    def keys_values(self, x: Float[Array, "*batch S D"], guide: Guide) -> KVCache:
        """Project x to keys and values; apply clipping, QK-norm, RoPE; select local KV heads."""
        cfg, positions = self.config.multi_head, self.positions
        key, value = self.clip(self.key(x)), self.clip(self.value(x))
        if cfg.qk_norm is not None:
            key = normalise(cfg.qk_norm, self.key_norm, key)
        both = turn(positions, "k", key, guide), turn(positions, "v", value, guide)
        return KVCache(*(mine(x, cfg.num_kv_heads, self.mode) for x in both))

    def mix(
        self, query: Float[Array, "*batch T N H"], seen: KVCache, guide: Guide
    ) -> Float[Array, "*batch T D"]:
        """Attend to keys and values, and project the heads to the model width."""
        cfg = self.config.multi_head
        query, bias = self.relative_terms(query, guide)
        heads = mix(
            self,
            query,
            *seen,
            guide._replace(bias=bias),
            mode=self.mode,
            dropout_rate=self.config.dropout.attention,
            weighing=Weighing(
                scale=cfg.scale, logit_softcap=cfg.logit_softcap, normalizer=cfg.normalizer
            ),
        )
        return self.out(turn(self.positions, "o", heads, guide))

    def clip(self, x: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
        """Clip to [-clip_qkv, clip_qkv]; unchanged if it is None."""
        bound = self.config.multi_head.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def relative_terms(self, query: Float[Array, "*batch T N H"], guide: Guide):
        """Return query and bias; Transformer-XL changes both, other positions neither."""
        kind = self.positions
        if not isinstance(kind, c.TransformerXL) or guide.queries is None or guide.keys is None:
            return query, guide.bias

        def shifted(bias: PerHead) -> Float[Array, "*batch T N H"]:
            return query + jnp.broadcast_to(bias().astype(query.dtype), query.shape)

        scale = self.config.multi_head.scale
        by_distance = F.transformer_xl_bias(
            shifted(self.position_bias),
            self.relative(),
            guide.queries,
            guide.keys,
            base=kind.base,
            bidirectional=not self.causal,
        )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return shifted(self.content_bias), scale * by_distance
