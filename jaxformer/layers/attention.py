"""The attention branch."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention import Projection
from jaxformer.layers.cache import KVCache, remember
from jaxformer.layers.guide import Guide, magnitude
from jaxformer.layers.initializers import initializer
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode, dropout_key
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import Logical, Names, mesh_axis, parameter, shards


class Bias(nn.Module):
    """A learned vector for each head."""

    shape: tuple[int, ...]
    mode: Mode

    @nn.compact
    def __call__(self) -> Float[Array, "N H"]:
        return parameter(
            self, "bias", nn.initializers.zeros, self.shape, ("heads", None), self.mode
        )


class Kernel(nn.Module):
    """A learned matrix for each head, for functions that multiply by it themselves."""

    shape: tuple[int, ...]
    initial: c.Initialiser
    mode: Mode

    @nn.compact
    def __call__(self) -> Float[Array, "D N H"]:
        names: Names = ("model", "heads", None)
        return parameter(self, "kernel", initializer(self.initial), self.shape, names, self.mode)


class Attention(nn.Module):
    """Multi-head attention to the text itself, or to a source, with positions from the guide.

    Where heads are shared out among devices, each has its part of them, and of the key-value heads
    those that its query heads read.
    """

    config: c.TransformerConfig
    positions: c.Positions | None
    mode: Mode
    causal: bool = True
    parts: bool = False  # as in Linear

    def setup(self):
        cfg, init = self.config.attention, self.config.initialisation

        def project(name: Projection, heads: int, start: c.Initialiser | None) -> Linear:
            shape = (heads, cfg.head_dim)
            names: Names = ("model", "heads" if name == "query" else "kv_heads", None)
            return Linear(
                shape, start or init.projection, self.mode, names, bias=name in cfg.biases
            )

        self.query = project("query", cfg.num_heads, init.query)
        self.key = project("key", cfg.num_kv_heads, init.key)
        self.value = project("value", cfg.num_kv_heads, init.value)
        self.out = Linear(
            (self.config.model_dim,),
            init.out or init.projection,
            self.mode,
            ("heads", None, "model"),
            inputs=(cfg.num_heads, cfg.head_dim),
            bias="out" in cfg.biases,
            divisor=self.config.residual_divisor,
            parts=self.parts,
        )
        if cfg.qk_norm is not None:
            self.query_norm = self.head_norm("heads", cfg.num_heads)
            self.key_norm = self.head_norm("kv_heads", cfg.num_kv_heads)
        if isinstance(self.positions, c.TransformerXL):
            per_head = (cfg.num_heads, cfg.head_dim)
            self.content_bias = Bias(per_head, self.mode)
            self.position_bias = Bias(per_head, self.mode)
            self.relative = Kernel((self.config.model_dim, *per_head), init.projection, self.mode)

    def head_norm(self, logical: Logical, heads: int) -> Norm:
        """The norm of queries or keys."""
        cfg = self.config.attention
        match cfg.qk_norm:
            case c.QKNorm(norm=norm, over="each_head"):
                return Norm(norm, self.mode, heads=heads, names=(logical, None))
            case c.QKNorm(norm=norm, over="width"):
                return Norm(norm, self.mode, names=(logical,), width=heads * cfg.head_dim)
            case c.QKNorm(norm=norm):
                return Norm(norm, self.mode)
            case None:
                raise ValueError("This attention normalises neither queries nor keys.")

    def __call__(
        self, x: Float[Array, "*batch T D"], guide: Guide, cache: KVCache | None = None
    ) -> tuple[Float[Array, "*batch T D"], KVCache | None]:
        """Attend to the text itself; with a cache, to what it holds too. Returns the new cache."""
        x = F.to_parts(x, self.mode.axes.tensor)
        query = self.queries(x, guide)
        seen = self.keys_values(x, guide)
        if cache is not None and guide.slots is not None and guide.keys is not None:
            beside = guide.keys.shape[-1] > cache.key.shape[-3]
            seen, cache = remember(cache, seen, guide.slots, beside=beside)
        return self.mix(query, seen, guide), cache

    def read(
        self, x: Float[Array, "*batch T D"], guide: Guide, source: KVCache
    ) -> Float[Array, "*batch T D"]:
        """Attend to a source, whose keys and values are from `keys_values`."""
        x = F.to_parts(x, self.mode.axes.tensor)
        return self.mix(self.queries(x, guide), source, guide)

    def queries(self, x: Float[Array, "*batch T D"], guide: Guide) -> Float[Array, "*batch T N H"]:
        """What each token looks for, clipped, normalised and turned where the choices say so."""
        query = self.clip(self.query(x))
        if self.config.attention.qk_norm is not None:
            query = self.normalise(self.query_norm, query)
        return self.turn("q", query, guide)

    def keys_values(self, x: Float[Array, "*batch S D"], guide: Guide) -> KVCache:
        """What each token offers and says, as it is remembered; x is from `F.to_parts`."""
        key, value = self.clip(self.key(x)), self.clip(self.value(x))
        if self.config.attention.qk_norm is not None:
            key = self.normalise(self.key_norm, key)
        key, value = self.turn("k", key, guide), self.turn("v", value, guide)
        return KVCache(self.mine(key), self.mine(value))

    def mine(self, x: Float[Array, "*batch S K H"]) -> Float[Array, "*batch S K H"]:
        """Of key-value heads that all devices have, the one that this device's queries read."""
        cfg, tensor = self.config.attention, self.mode.axes.tensor
        if tensor is None or mesh_axis("kv_heads", cfg.num_kv_heads, self.mode.axes) is not None:
            return x
        per_head = shards(tensor) // cfg.num_kv_heads  # devices
        head = jax.lax.axis_index(tensor) // per_head
        return jax.lax.dynamic_slice_in_dim(x, head, 1, axis=-2)

    def mix(
        self, query: Float[Array, "*batch T N H"], seen: KVCache, guide: Guide
    ) -> Float[Array, "*batch T D"]:
        """The values that each query picks, back in the model's width."""
        cfg, drop = self.config.attention, self.config.dropout.attention
        dropping = not self.mode.deterministic and drop > 0
        query, bias = self.relative_terms(query, guide)
        ring = self.mode.axes.context
        attend: Callable[..., Array] = F.dot_product_attention
        if ring is not None:
            attend = partial(F.ring_attention, axis_name=ring)
        heads = attend(
            query,
            seen.key.astype(query.dtype),
            seen.value.astype(query.dtype),
            guide.mask,
            bias,
            scale=cfg.scale,
            logit_softcap=cfg.logit_softcap,
            normalizer=cfg.normalizer,
            dropout_rate=drop if dropping else 0.0,
            dropout_key=dropout_key(self, self.mode.axes.tensor) if dropping else None,
        )
        return self.out(self.turn("o", heads, guide))

    def clip(self, x: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T N H"]:
        """Bound the numbers where the configuration says so."""
        bound = self.config.attention.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def normalise(self, norm: Norm, x: Float[Array, "*batch T N H"]) -> Float[Array, "..."]:
        """Query or key normalisation over all heads, each head, or each head on its own."""
        choice = self.config.attention.qk_norm
        if choice is not None and choice.over == "width":
            return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
        return norm(x)

    def turn(
        self, target: c.positions.RopeTarget, x: Float[Array, "*batch T N H"], guide: Guide
    ) -> Float[Array, "*batch T N H"]:
        """Rotate x where the configuration names it; the output by the conjugate.

        So rotated values, and with them the output, depend on distances only.
        """
        rope, rotations = self.positions, guide.rotations
        if not isinstance(rope, c.Rope) or rotations is None or target not in rope.targets:
            return x
        if target in "qk":
            rotations = rotations * magnitude(rope)
        turned = jnp.conj(rotations) if target == "o" else rotations
        return F.rotate(x, turned, pairing=rope.pairing)

    def relative_terms(self, query: Float[Array, "*batch T N H"], guide: Guide):
        """Queries and what is added to the scores; Transformer-XL makes both from the queries."""
        kind = self.positions
        if not isinstance(kind, c.TransformerXL) or guide.queries is None or guide.keys is None:
            return query, guide.bias

        def shifted(bias: Bias) -> Float[Array, "*batch T N H"]:
            return query + jnp.broadcast_to(bias().astype(query.dtype), query.shape)

        scale = self.config.attention.scale
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
