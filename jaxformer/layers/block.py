"""One transformer layer: self-attention, cross-attention, feed-forward, norms, residual sums."""

from collections.abc import Callable
from functools import partial, reduce
from operator import add

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.attention import Attention
from jaxformer.layers.cache import LayerCache, heads_first
from jaxformer.layers.feed_forward import FeedForward
from jaxformer.layers.guide import Guide
from jaxformer.layers.kinds import own_attention
from jaxformer.layers.mode import Mode, dropout
from jaxformer.layers.norms import Norm
from jaxformer.layers.score_bias import ScoreBias, of_each_layer
from jaxformer.layers.watch import watch

NO_GUIDE = Guide()
Branch = Callable[[Float[Array, "*batch T D"]], Float[Array, "*batch T D"]]


def adds_up_once(config: c.TransformerConfig) -> bool:
    """Whether parallel branches share one tensor-parallel reduction of their sum."""
    match config.block:
        case "parallel_shared_norm":
            return True
        case "parallel":
            return config.placement == "pre"
        case "serial":
            return False


class Block(nn.Module):
    """A transformer layer with serial or parallel branches.

        serial    x + attention(x), then x + feed_forward(x)
        parallel  x + attention(x) + feed_forward(x)

    with norms where `placement` puts them: before a branch ("pre"), after the sum ("post"), before
    and after a branch ("sandwich"), or after a branch only ("branch_out"). Parallel branches with a
    norm each and "post" are added one by one, each sum followed by its norm.
    """

    config: c.TransformerConfig
    choice: c.LayerChoice
    mode: Mode
    causal: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        guide: Guide,
        memory: Float[Array, "*batch S D"] | None = None,
        memory_guide: Guide = NO_GUIDE,
        cache: LayerCache | None = None,
    ) -> tuple[Float[Array, "*batch T D"], LayerCache | None]:
        """Return the layer's output and its updated cache.

        Without a `memory`, cross-attention reads what the cache has kept of an earlier one.
        """
        cfg, choice, together = self.config, self.choice, adds_up_once(self.config)
        attention = own_attention(cfg, choice.positions, self.mode, self.causal, parts=together)
        own = None if cache is None else cache.own
        option = of_each_layer(choice.positions, heads := cfg.kind.num_heads)
        if option is not None and guide.queries is not None and guide.keys is not None:
            bias = ScoreBias(option, heads, self.mode, self.causal, name="relative_bias")
            guide = guide._replace(bias=bias(guide.queries, guide.keys))

        def attend(y: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
            nonlocal own
            y, own = attention(y, guide, own)
            return y

        branches: dict[str, Branch] = {"attention": attend}
        source = None if cache is None else cache.source
        cross = Attention(cfg, None, self.mode, parts=together, name="cross_attention")
        if memory is not None:
            source = heads_first(cross.keys_values(memory, memory_guide))
        if source is not None:
            seen = heads_first(source)
            branches["cross_attention"] = partial(cross.read, guide=memory_guide, source=seen)
        branches["feed_forward"] = FeedForward(
            cfg, choice.feed_forward, self.mode, parts=together, name="feed_forward"
        )
        x = watch(self, "stream", self.add_up(x, branches))
        return x, None if own is None else LayerCache(own, source)

    def to_parts(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Copy x to tensor-parallel devices once for all branches; not before an MoE router."""
        routed = isinstance(self.choice.feed_forward, c.Experts)
        return x if routed else F.to_parts(x, self.mode.axes.tensor)

    def add_up(
        self, x: Float[Array, "*batch T D"], branches: dict[str, Branch]
    ) -> Float[Array, "*batch T D"]:
        """Apply all branches and return the residual stream after them."""
        match self.config.block:
            case "serial":
                for name, branch in branches.items():
                    x = self.add(x, self.branch(x, {name: branch}, f"{name}_norm"), f"{name}_norm")
            case "parallel" if adds_up_once(self.config):
                shared = self.to_parts(x)
                parts = [self.branch(shared, {n: b}, f"{n}_norm") for n, b in branches.items()]
                x = x + F.sum_parts(reduce(add, parts), self.mode.axes.tensor)
            case "parallel":
                each = {
                    f"{n}_norm": self.branch(x, {n: b}, f"{n}_norm") for n, b in branches.items()
                }
                for norm, y in each.items():
                    x = self.add(x, y, norm)
            case "parallel_shared_norm":
                x = self.add(x, self.branch(x, branches, "norm"), "norm")
        return x

    def branch(
        self, x: Float[Array, "*batch T D"], functions: dict[str, Branch], norm: str
    ) -> Float[Array, "*batch T D"]:
        """Apply branches that share norms: pre-norm, sum of their outputs, dropout, post-norm."""
        cfg = self.config
        if cfg.placement in ("pre", "sandwich"):
            x = Norm(cfg.norm, self.mode, name=f"pre_{norm}")(x)
        if len(functions) > 1:
            x = self.to_parts(x)
        normed = cfg.placement in ("sandwich", "branch_out")
        apart = len(functions) > 1 and not normed
        each = {name: function(x) for name, function in functions.items()}
        if apart:
            each = {name: watch(self, f"from_{name}", y) for name, y in each.items()}
        y = reduce(add, each.values())
        if len(functions) > 1:
            y = F.sum_parts(y, self.mode.axes.tensor)
        y = dropout(self, y, cfg.dropout.residual, self.mode)
        if normed:
            y = Norm(cfg.norm, self.mode, name=f"post_{norm}")(y)
        return y if apart else watch(self, f"from_{'_and_'.join(functions)}", y)

    def add(
        self, x: Float[Array, "*batch T D"], y: Float[Array, "*batch T D"], norm: str
    ) -> Float[Array, "*batch T D"]:
        """The residual sum, normalised where placement is "post"."""
        if self.config.placement == "post":
            return Norm(self.config.norm, self.mode, name=f"post_{norm}")(x + y)
        return x + y
