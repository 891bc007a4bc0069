"""Multi-head latent attention module (MLA)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.attention import Kernel
from jaxformer.layers.cache import LatentCache
from jaxformer.layers.guide import Guide
from jaxformer.layers.heads import Weighing, mix, out_of_heads, turn, with_earlier
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode
from jaxformer.layers.norms import Norm

SHARED = "model -> kv_heads features"  # one head, which all devices have
BY_HEAD = "features -> heads features"


class Latent(nn.Module):
    """Multi-head latent attention (MLA); see `config.Latent`.

    Without a cache keys and values are expanded; with one, whichever form takes fewer products,
    for one new token always the absorbed one. The latent is one key-value head for all: where
    heads are shared out among devices, each has all of it.
    """

    config: c.TransformerConfig
    positions: c.Positions | None
    mode: Mode
    parts: bool = False  # as in Linear

    def setup(self):
        cfg, init, runtime = self.choice, self.config.initialisation, self.mode
        kernel_init = init.projection
        per_query = (cfg.num_heads, cfg.nope_dim + cfg.rope_dim)
        if cfg.query_latent_dim is None:
            self.query = Linear(
                per_query, init.query or kernel_init, runtime, "model -> heads features"
            )
        else:
            self.query_latent = self.shared(cfg.query_latent_dim, "query_latent")
            self.query_latent_norm = Norm(cfg.norm, runtime)
            self.query = Linear(per_query, init.query or kernel_init, runtime, BY_HEAD)
        self.latent = self.shared(cfg.latent_dim, "latent")
        self.latent_norm = Norm(cfg.norm, runtime)
        self.rotary_key = self.shared(cfg.rope_dim, "rotary_key")
        key, value = init.key or kernel_init, init.value or kernel_init
        self.key = Kernel((cfg.latent_dim, cfg.num_heads, cfg.nope_dim), key, runtime, BY_HEAD)
        self.value = Kernel((cfg.latent_dim, cfg.num_heads, cfg.value_dim), value, runtime, BY_HEAD)
        self.out = out_of_heads(self.config, (cfg.num_heads, cfg.value_dim), runtime, self.parts)

    @property
    def choice(self) -> c.Latent:
        """The `config.Latent` option of this layer."""
        match self.config.attention:
            case c.Latent() as attention:
                return attention
        raise ValueError(f"Latent reads its own choices; got {self.config.attention}.")

    @nn.nowrap
    def shared(self, width: int, name: str) -> Linear:
        """Make a projection to one head that all query heads read."""
        kernel_init, bias = self.config.initialisation.projection, name in self.choice.biases
        return Linear((1, width), kernel_init, self.mode, SHARED, bias=bias)

    def __call__(
        self, x: Float[Array, "*batch T D"], guide: Guide, cache: LatentCache | None = None
    ) -> tuple[Float[Array, "*batch T D"], LatentCache | None]:
        """Self-attention over the sequence and the cache; returns the output and the new cache."""
        cfg = self.choice
        x = F.to_parts(x, self.mode.axes.tensor)
        rotary_key = turn(self.positions, "k", self.rotary_key(x), guide)
        new = LatentCache(self.latent_norm(self.latent(x)), rotary_key)
        use_absorbed = cache is not None and F.absorbing_saves(
            x.shape[-2], cfg.latent_dim, cfg.nope_dim, cfg.value_dim
        )
        kv, cache = with_earlier(new, cache, guide, self.mode)
        query, kv = self.queries(x, guide), LatentCache(*(y.astype(x.dtype) for y in kv))
        attend = self.absorbed if use_absorbed else self.expanded
        return self.out(attend(query, kv, guide)), cache

    def queries(self, x: Float[Array, "*batch T D"], guide: Guide) -> Float[Array, "*batch T N Q"]:
        """Project x to queries: nope_dim features, then rope_dim features with RoPE."""
        cfg = self.choice
        if cfg.query_latent_dim is not None:
            x = self.query_latent_norm(self.query_latent(x)).squeeze(-2)
        nope_query, rope_query = jnp.split(self.query(x), [cfg.nope_dim], axis=-1)
        return jnp.concatenate([nope_query, turn(self.positions, "q", rope_query, guide)], axis=-1)

    def expanded(
        self, query: Float[Array, "*batch T N Q"], seen: LatentCache, guide: Guide
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend with keys and values expanded from the latents."""
        latent, rotary_key = (y.squeeze(-2) for y in seen)
        key, value = self.key(query.dtype), self.value(query.dtype)
        return self.mix(query, *F.expand_latent(latent, rotary_key, key, value), guide)

    def absorbed(
        self, query: Float[Array, "*batch T N Q"], seen: LatentCache, guide: Guide
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend to the latents directly, with the key kernel absorbed into the query."""
        query = F.absorb_query(query, self.key(query.dtype))
        latent_mean = self.mix(query, jnp.concatenate(seen, axis=-1), seen.latent, guide)
        return F.values_from_latent(latent_mean, self.value(query.dtype))

    def mix(
        self,
        query: Float[Array, "*batch T N Q"],
        key: Float[Array, "*batch S K Q"],
        value: Float[Array, "*batch S K Hv"],
        guide: Guide,
    ) -> Float[Array, "*batch T N Hv"]:
        """Attend with the scale of the expanded keys."""
        cfg = self.choice
        scale = (cfg.nope_dim + cfg.rope_dim) ** -0.5 if cfg.scale is None else cfg.scale
        return mix(
            self,
            query,
            key,
            value,
            guide,
            mode=self.mode,
            dropout_rate=self.config.dropout.attention,
            weighing=Weighing(scale=scale),
        )
