"""One layer: attention, cross-attention where there is a source, feed-forward."""

from collections.abc import Callable
from functools import reduce
from operator import add

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.layers.attention import Attention
from jaxformer.layers.feed_forward import FeedForward
from jaxformer.layers.guide import Guide
from jaxformer.layers.mode import Mode, dropout
from jaxformer.layers.norms import Norm

NO_GUIDE = Guide()
Branch = Callable[[Float[Array, "*batch T D"]], Float[Array, "*batch T D"]]


class Block(nn.Module):
    """The residual branches of one layer, one after the other or side by side.

        serial    x + attention(x), then x + feed_forward(x)
        parallel  x + attention(x) + feed_forward(x)

    with norms where `placement` puts them: before a branch ("pre"), after the sum ("post"), before
    and after a branch ("sandwich"), or after a branch only ("branch_out").
    """

    config: c.TransformerConfig
    choice: c.LayerChoice
    mode: Mode

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        guide: Guide,
        memory: Float[Array, "*batch S D"] | None = None,
        memory_guide: Guide = NO_GUIDE,
    ) -> Float[Array, "*batch T D"]:
        cfg, choice = self.config, self.choice
        attention = Attention(cfg, choice.positions, self.mode, name="attention")
        branches: dict[str, Branch] = {"attention": lambda y: attention(y, guide)}
        if memory is not None:
            cross = Attention(cfg, None, self.mode, name="cross_attention")
            branches["cross_attention"] = lambda y: cross(y, memory_guide, memory)
        branches["feed_forward"] = FeedForward(
            cfg, choice.feed_forward, self.mode, name="feed_forward"
        )
        match cfg.block:
            case "serial":
                for name, branch in branches.items():
                    x = self.add(x, self.branch(x, [branch], f"{name}_norm"), f"{name}_norm")
                return x
            case "parallel_shared_norm":
                return self.add(x, self.branch(x, list(branches.values()), "norm"), "norm")
            case "parallel":
                each = [self.branch(x, [b], f"{name}_norm") for name, b in branches.items()]
                return x + reduce(add, each)

    def branch(
        self, x: Float[Array, "*batch T D"], functions: list[Branch], norm: str
    ) -> Float[Array, "*batch T D"]:
        """The sum of functions of x that share the norms before and after them."""
        cfg = self.config
        if cfg.placement in ("pre", "sandwich"):
            x = Norm(cfg.norm, name=f"pre_{norm}")(x)
        y = reduce(add, [function(x) for function in functions])
        y = dropout(self, y, cfg.dropout.residual, self.mode)
        if cfg.placement in ("sandwich", "branch_out"):
            y = Norm(cfg.norm, name=f"post_{norm}")(y)
        return y

    def add(
        self, x: Float[Array, "*batch T D"], y: Float[Array, "*batch T D"], norm: str
    ) -> Float[Array, "*batch T D"]:
        """The residual sum, normalised where placement is "post"."""
        if self.config.placement == "post":
            return Norm(self.config.norm, name=f"post_{norm}")(x + y)
        return x + y
