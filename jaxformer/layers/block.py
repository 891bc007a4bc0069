"""One transformer layer: self-attention, cross-attention, feed-forward, norms, residual sums."""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.attention.build import build_attention
from jaxformer.layers.attention.inputs import AttentionInputs, LayerInputs
from jaxformer.layers.attention.multi_head import MultiHeadAttention
from jaxformer.layers.attention.score_bias import ScoreBiasModule, per_layer_score_bias
from jaxformer.layers.cache import CacheUpdate, LayerCache, swap_heads_and_slots
from jaxformer.layers.feed_forward import FeedForward
from jaxformer.layers.intermediates import sow_and_perturb
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig, apply_dropout

NO_INPUTS = AttentionInputs()
Branch = Callable[[Float[Array, "*batch T D"]], Float[Array, "*batch T D"]]


def reduces_branches_together(config: c.TransformerConfig) -> bool:
    """Whether parallel branches share one tensor-parallel reduction of their sum."""
    match config.block:
        case "parallel_shared_norm":
            return True
        case "parallel":
            return config.norm_placement == "pre"
        case "serial":
            return False


class Block(nn.Module):
    """A transformer layer with serial or parallel branches.

        serial    x + attention(x), then x + feed_forward(x)
        parallel  x + attention(x) + feed_forward(x)

    with norms where `norm_placement` puts them: before a branch ("pre"), after the sum ("post"),
    before and after a branch ("sandwich"), or after a branch only ("res_post"). Parallel branches
    with a norm each and "post" are added one by one, each sum followed by its norm.
    """

    config: c.TransformerConfig
    layer_config: c.LayerConfig
    runtime: RuntimeConfig
    causal: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        inputs: LayerInputs,
        encoder_output: Float[Array, "*batch S D"] | None = None,
        cross_inputs: AttentionInputs = NO_INPUTS,
        cache: LayerCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch T D"], LayerCache | None]:
        """Return the layer's output and its updated cache.

        Without an `encoder_output`, cross-attention reads what the cache has kept of an earlier
        one.
        """
        cfg, layer = self.config, self.layer_config
        reduces_together = reduces_branches_together(cfg)
        attention = build_attention(
            cfg, layer, self.runtime, self.causal, keep_partial_sums=reduces_together
        )
        self_cache = None if cache is None else cache.self_attention
        kind: Any = layer.attention
        score_bias = per_layer_score_bias(layer.positions, heads := kind.num_heads)
        if (
            score_bias is not None
            and isinstance(inputs, AttentionInputs)
            and inputs.query_positions is not None
            and inputs.key_positions is not None
        ):
            bias = ScoreBiasModule(
                score_bias, heads, self.runtime, self.causal, name="relative_bias"
            )
            inputs = inputs._replace(bias=bias(inputs.query_positions, inputs.key_positions))

        def attend(y: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
            nonlocal self_cache
            y, self_cache = attention(y, inputs, self_cache, cache_update)
            return y

        branches: dict[str, Branch] = {"attention": attend}
        cross_cache = None if cache is None else cache.cross_attention
        cross = MultiHeadAttention(
            cfg,
            kind,
            None,
            self.runtime,
            keep_partial_sums=reduces_together,
            name="cross_attention",
        )
        if encoder_output is not None:
            cross_cache = swap_heads_and_slots(
                cross.project_key_value(encoder_output, cross_inputs)
            )
        if cross_cache is not None:
            cross_kv = swap_heads_and_slots(cross_cache)
            branches["cross_attention"] = partial(
                cross.cross_attend, inputs=cross_inputs, source_kv=cross_kv
            )
        branches["feed_forward"] = FeedForward(
            cfg,
            layer.feed_forward,
            self.runtime,
            keep_partial_sums=reduces_together,
            name="feed_forward",
        )
        x = sow_and_perturb(self, "residual_stream", self.apply_branches(x, branches))
        return x, None if self_cache is None else LayerCache(self_cache, cross_cache)

    def copy_to_branches(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Copy x to tensor-parallel devices once for all branches; not before an MoE router."""
        is_moe = isinstance(self.layer_config.feed_forward, c.MoE)
        return x if is_moe else F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)

    def apply_branches(
        self, x: Float[Array, "*batch T D"], branches: dict[str, Branch]
    ) -> Float[Array, "*batch T D"]:
        """Apply all branches and return the residual stream after them."""
        match self.config.block:
            case "serial":
                for name, branch in branches.items():
                    x = self.add_residual(
                        x, self.apply_branch(x, {name: branch}, f"{name}_norm"), f"{name}_norm"
                    )
            case "parallel" if reduces_branches_together(self.config):
                copied = self.copy_to_branches(x)
                branch_outputs = [
                    self.apply_branch(copied, {n: b}, f"{n}_norm") for n, b in branches.items()
                ]
                x = x + F.reduce_from_tensor_parallel(
                    reduce(add, branch_outputs), self.runtime.mesh_axes.tensor
                )
            case "parallel":
                outputs_by_norm = {
                    f"{n}_norm": self.apply_branch(x, {n: b}, f"{n}_norm")
                    for n, b in branches.items()
                }
                for norm, y in outputs_by_norm.items():
                    x = self.add_residual(x, y, norm)
            case "parallel_shared_norm":
                x = self.add_residual(x, self.apply_branch(x, branches, "norm"), "norm")
        return x

    def apply_branch(
        self, x: Float[Array, "*batch T D"], branches: dict[str, Branch], norm: str
    ) -> Float[Array, "*batch T D"]:
        """Apply branches that share norms: pre-norm, sum of their outputs, dropout, post-norm."""
        cfg = self.config
        if cfg.norm_placement in ("pre", "sandwich"):
            x = Norm(cfg.norm, self.runtime, name=f"pre_{norm}")(x)
        if len(branches) > 1:
            x = self.copy_to_branches(x)
        has_post_norm = cfg.norm_placement in ("sandwich", "res_post")
        sows_each = len(branches) > 1 and not has_post_norm
        outputs = {name: function(x) for name, function in branches.items()}
        if sows_each:
            outputs = {
                name: sow_and_perturb(self, f"from_{name}", y) for name, y in outputs.items()
            }
        y = reduce(add, outputs.values())
        if len(branches) > 1:
            y = F.reduce_from_tensor_parallel(y, self.runtime.mesh_axes.tensor)
        y = apply_dropout(self, y, cfg.dropout.residual, self.runtime)
        if has_post_norm:
            y = Norm(cfg.norm, self.runtime, name=f"post_{norm}")(y)
        return y if sows_each else sow_and_perturb(self, f"from_{'_and_'.join(branches)}", y)

    def add_residual(
        self, x: Float[Array, "*batch T D"], y: Float[Array, "*batch T D"], norm: str
    ) -> Float[Array, "*batch T D"]:
        """Residual sum x + y, normalised if norm_placement is "post"."""
        if self.config.norm_placement == "post":
            return Norm(self.config.norm, self.runtime, name=f"post_{norm}")(x + y)
        return x + y
