"""The attention branch."""

from functools import partial

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.guide import Guide, magnitude
from jaxformer.layers.linear import Linear
from jaxformer.layers.mode import Mode
from jaxformer.layers.norms import Norm


class Attention(nn.Module):
    """Multi-head attention of `x` to itself, or to `memory`, with positions from the guide."""

    config: c.TransformerConfig
    positions: c.Positions | None
    mode: Mode

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        guide: Guide,
        memory: Float[Array, "*batch S D"] | None = None,
    ) -> Float[Array, "*batch T D"]:
        cfg = self.config.attention
        read = x if memory is None else memory
        query = self.project("query", cfg.num_heads, x)
        key = self.project("key", cfg.num_kv_heads, read)
        value = self.project("value", cfg.num_kv_heads, read)
        if cfg.qk_norm is not None:
            query = self.normalise("query_norm", cfg.qk_norm, query)
            key = self.normalise("key_norm", cfg.qk_norm, key)
        query, key, value = self.turn(query, key, value, guide)
        dropping = not self.mode.deterministic and self.config.dropout.attention > 0
        heads = F.dot_product_attention(
            query,
            key,
            value,
            guide.mask,
            guide.bias,
            scale=cfg.scale,
            logit_softcap=cfg.logit_softcap,
            normalizer=cfg.normalizer,
            dropout_rate=self.config.dropout.attention if dropping else 0.0,
            dropout_key=self.make_rng("dropout") if dropping else None,
        )
        return self.out(self.turn_back(heads, guide))

    def project(
        self, name: c.model.Projection, heads: int, x: Float[Array, "*batch T D"]
    ) -> Float[Array, "*batch T N H"]:
        """One of query, key and value, clipped where the configuration says so."""
        cfg, init = self.config.attention, self.config.initialisation
        y = Linear(
            (heads, cfg.head_dim),
            getattr(init, name) or init.projection,
            self.mode,
            bias=name in cfg.biases,
            name=name,
        )(x)
        return y if cfg.clip_qkv is None else jnp.clip(y, -cfg.clip_qkv, cfg.clip_qkv)

    def normalise(
        self, name: str, choice: c.QKNorm, x: Float[Array, "*batch T N H"]
    ) -> Float[Array, "*batch T N H"]:
        """Query or key normalisation over all heads, each head, or each head on its own."""
        if choice.over == "width":
            return Norm(choice.norm, name=name)(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)
        return Norm(
            choice.norm, heads=x.shape[-2] if choice.over == "each_head" else None, name=name
        )(x)

    def turn(self, query, key, value, guide: Guide):
        """Rotate whichever of query, key and value the configuration names."""
        rope = self.positions
        if not isinstance(rope, c.Rope) or guide.rotations is None:
            return query, key, value
        rotate = partial(F.rotate, pairing=rope.pairing)
        scaled = guide.rotations * magnitude(rope)
        return (
            rotate(query, scaled) if "q" in rope.targets else query,
            rotate(key, scaled) if "k" in rope.targets else key,
            rotate(value, guide.rotations) if "v" in rope.targets else value,
        )

    def turn_back(
        self, heads: Float[Array, "*batch T N H"], guide: Guide
    ) -> Float[Array, "*batch T N H"]:
        """Rotate the output by the conjugate, so that rotated values become relative again."""
        rope = self.positions
        if not isinstance(rope, c.Rope) or guide.rotations is None or "o" not in rope.targets:
            return heads
        return F.rotate(heads, jnp.conj(guide.rotations), pairing=rope.pairing)

    def out(self, heads: Float[Array, "*batch T N H"]) -> Float[Array, "*batch T D"]:
        """All heads back to the model's width."""
        init = self.config.initialisation
        return Linear(
            (self.config.model_dim,),
            init.out or init.projection,
            self.mode,
            axes=2,
            bias="out" in self.config.attention.biases,
            divisor=self.config.residual_divisor,
            name="out",
        )(heads)
