"""Blocks over depth: one compiled loop over the pattern's period."""

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers import guide as g
from jaxformer.layers.block import NO_GUIDE, Block
from jaxformer.layers.embedding import Table
from jaxformer.layers.guide import Guide, Places
from jaxformer.layers.mode import Mode
from jaxformer.layers.norms import Norm

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Period(nn.Module):
    """The first `count` layers of the pattern, each with its own choices."""

    config: c.TransformerConfig
    count: int
    mode: Mode

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        guides: tuple[Guide, ...],
        memory: Float[Array, "*batch S D"] | None,
        memory_guide: Guide,
    ) -> tuple[Float[Array, "*batch T D"], None]:
        block = Block
        if self.mode.remat != "none":
            policy = POLICIES[self.mode.remat]
            block = nn.remat(Block, policy=policy, prevent_cse=not self.mode.scan)
        for i in range(self.count):
            layer = block(self.config, self.config.layer(i), self.mode, name=f"layer_{i}")
            x = layer(x, guides[i], memory, memory_guide)
        return x, None


class Stack(nn.Module):
    """`num_layers` blocks and the norm after them.

    Whole periods of the pattern run under `nn.scan`, so that compile time does not grow with depth:
    their parameters are stacked along a leading axis under "layers". Layers left over after the
    last whole period stand under "tail".
    """

    config: c.TransformerConfig
    num_layers: int
    causal: bool
    mode: Mode

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        places: Places,
        memory: Float[Array, "*batch S D"] | None = None,
        memory_guide: Guide = NO_GUIDE,
    ) -> Float[Array, "*batch T D"]:
        period = self.config.period
        repeats, rest = divmod(self.num_layers, period)
        guides = self.guides(min(period, self.num_layers), places, batch_axes=x.ndim - 2)
        if repeats:
            layers = nn.scan(
                Period,
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=repeats,
                unroll=1 if self.mode.scan else repeats,
            )(self.config, period, self.mode, name="layers")
            x, _ = layers(x, guides, memory, memory_guide)
        if rest:
            tail = Period(self.config, rest, self.mode, name="tail")
            x, _ = tail(x, guides[:rest], memory, memory_guide)
        if self.config.final_norm:
            x = Norm(self.config.norm, name="final_norm")(x)
        return x

    def guides(self, count: int, places: Places, *, batch_axes: int) -> tuple[Guide, ...]:
        """One guide per layer of the pattern; equal choices share their arrays."""
        attention = self.config.attention
        choices = [self.config.layer(i) for i in range(count)]
        masks = {
            window: g.mask(
                window,
                places,
                num_heads=attention.num_heads,
                causal=self.causal,
                batch_axes=batch_axes,
            )
            for window in dict.fromkeys(choice.window for choice in choices)
        }
        biases: dict[c.Positions | None, Array] = {}
        rotations: dict[c.Positions | None, Array] = {}
        for kind in dict.fromkeys(choice.positions for choice in choices):
            match kind:
                case c.Rope():
                    rotations[kind] = g.rotations(kind, attention.head_dim, places)
                case c.Alibi() | c.T5Bias():
                    biases[kind] = self.bias(kind, places)
        return tuple(
            Guide(masks[window], biases.get(positions), rotations.get(positions))
            for positions, window, _ in choices
        )

    def bias(self, kind: c.Alibi | c.T5Bias, places: Places) -> Float[Array, "*batch N T T"]:
        """What positions add to the scores."""
        heads, at = self.config.attention.num_heads, places.positions
        match kind:
            case c.Alibi(scale=scale):
                return F.alibi_bias(scale * F.alibi_slopes(heads), at, at)
            case c.T5Bias(num_buckets=buckets, max_distance=distance):
                table = Table(buckets, heads, c.Normal(), name="relative_bias")()
                relative = at[..., None, :] - at[..., :, None]
                return F.relative_position_bias(
                    table,
                    F.relative_position_buckets(
                        relative,
                        bidirectional=not self.causal,
                        num_buckets=buckets,
                        max_distance=distance,
                    ),
                )
