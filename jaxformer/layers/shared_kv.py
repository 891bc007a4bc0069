"""Shared-KV attention module."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.cache import KVCache, SharedCache
from jaxformer.layers.guide import Guide, magnitude
from jaxformer.layers.heads import (
    Weighing,
    head_norm,
    mine,
    mix,
    normalise,
    out_of_heads,
    turn,
    with_earlier,
)
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode


class SharedKV(nn.Module):
    """Attention with one projection for key and value; see `config.SharedKV`.

    It is turned once and kept as it was turned; twice where only one of key and value is turned.
    Heads are shared out as in `Attention`.
    """

    config: c.TransformerConfig
    positions: c.Positions | None
    mode: Mode
    parts: bool = False  # as in Linear

    def setup(self):
        cfg, init = self.choice, self.config.initialisation
        self.query = Linear(
            (cfg.num_heads, cfg.head_dim),
            init.query or init.projection,
            self.mode,
            "model -> heads features",
            bias="query" in cfg.biases,
        )
        self.key_value = Linear(
            (cfg.num_kv_heads, cfg.head_dim),
            init.projection,
            self.mode,
            "model -> kv_heads features",
            bias="key_value" in cfg.biases,
        )
        self.out = out_of_heads(self.config, (cfg.num_heads, cfg.head_dim), self.mode, self.parts)
        if cfg.qk_norm is not None:
            norm = partial(head_norm, cfg.qk_norm, head_dim=cfg.head_dim, mode=self.mode)
            self.query_norm = norm("heads", cfg.num_heads)
            self.key_norm = norm("kv_heads", cfg.num_kv_heads)

    @property
    def choice(self) -> c.SharedKV:
        """The `config.SharedKV` option of this layer."""
        match self.config.attention:
            case c.SharedKV() as attention:
                return attention
        raise ValueError(f"SharedKV reads its own choices; got {self.config.attention}.")

    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        guide: Guide,
        cache: KVCache | SharedCache | None = None,
    ) -> tuple[Float[Array, "*batch T D"], KVCache | SharedCache | None]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        cfg = self.choice
        x = F.to_parts(x, self.mode.axes.tensor)
        query, key_value = self.query(x), self.key_value(x)
        if cfg.qk_norm is not None:
            query = normalise(cfg.qk_norm, self.query_norm, query)
            key_value = normalise(cfg.qk_norm, self.key_norm, key_value)
        query = turn(self.positions, "q", query, guide)
        value = mine(turn(self.positions, "v", key_value, guide), cfg.num_kv_heads, self.mode)
        new: KVCache | SharedCache
        if cfg.arrays_kept(self.positions) == 2:
            key = mine(turn(self.positions, "k", key_value, guide), cfg.num_kv_heads, self.mode)
            new = KVCache(key, value)
        else:
            query, new = self.sharpen(query), SharedCache(value)
        kv, cache = with_earlier(new, cache, guide, self.mode)
        heads = mix(
            self,
            query,
            kv[0],
            kv[-1],
            guide,
            mode=self.mode,
            dropout_rate=self.config.dropout.attention,
            weighing=Weighing(scale=cfg.scale, logit_softcap=cfg.logit_softcap),
        )
        return self.out(turn(self.positions, "o", heads, guide)), cache

    def sharpen(self, query: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
        """Multiply rotated query features by the RoPE attention factor, for query and key."""
        rope = self.positions
        if not isinstance(rope, c.Rope) or "k" not in rope.targets or magnitude(rope) == 1:
            return query
        width = rope.width(query.shape[-1])
        return jnp.concatenate([magnitude(rope) * query[..., :width], query[..., width:]], axis=-1)
