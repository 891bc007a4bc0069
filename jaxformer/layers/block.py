"""One transformer layer: self-attention, cross-attention, feed-forward, norms, residual sums."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import ones
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache
from jaxformer.layers.attention.core import AttentionModule
from jaxformer.layers.attention.custom_mixer import CustomMixer
from jaxformer.layers.attention.inputs import AttentionInputs, LayerInputs, MixingInputs
from jaxformer.layers.attention.kinds import ATTENTION_MODULES
from jaxformer.layers.attention.multi_head import MultiHeadAttention
from jaxformer.layers.attention.score_bias import ScoreBiasModule
from jaxformer.layers.cache import NO_STATE, KVCache, LayerState, swap_heads_and_slots
from jaxformer.layers.feed_forward import FeedForward
from jaxformer.layers.layer_embedding import LayerEmbeddingBranch
from jaxformer.layers.ngram_embedding import NgramBranch
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import sharded_parameter
from jaxformer.layers.residual import Join, ResidualParameters, read, sow_stream
from jaxformer.layers.runtime import RuntimeConfig, apply_dropout, sow_and_perturb

Stream = Any  # [*batch, T, D], or the state of a residual option
Attend = Callable[..., tuple[Float[Array, "*batch T D"], LayerState]]
Branch = Callable[[Float[Array, "*batch T D"]], Float[Array, "*batch T D"]]
Branches = dict[str, Branch]
POST_BRANCH_NORMS = "sandwich", "res_post"


def reduces_branches_together(config: c.TransformerConfig, layer: c.Layer) -> bool:
    """Whether parallel branches share one tensor-parallel reduction of their sum."""
    match config.block:
        case "parallel_shared_norm":
            return True
        case "parallel":
            return layer.norm_placement == "pre"
        case "serial":
            return False


class Block(nn.Module):
    """A transformer layer with serial or parallel branches.

        serial    x + attention(x), then x + feed_forward(x)
        parallel  x + attention(x) + feed_forward(x)

    with norms by `norm_placement`: before a branch ("pre"), before a branch other than attention
    ("pre_feed_forward"), after the sum ("post"), before and after a branch ("sandwich"), or after a
    branch only ("res_post"). With "post", parallel branches that have separate norms are added one
    by one, each sum followed by its norm. With a `residual_multiplier` m, x + m * attention(x) and
    so on. A `layer_scalar` multiplies the result.
    """

    config: c.TransformerConfig
    layer_config: c.Layer
    runtime: RuntimeConfig
    causal: bool = True

    @nn.compact
    def __call__(
        self, stream: Stream, inputs: LayerInputs, state: LayerState = NO_STATE
    ) -> tuple[Stream, LayerState]:
        """Return the layer's output, and its new cache and what it hands on.

        Without an `encoder_output`, cross-attention reads the keys and values in the cache.
        """
        cfg, layer = self.config, self.layer_config
        has_ngrams = layer.ngram_embedding is not None
        if has_ngrams:
            stream, state, ngram_cache = self.add_ngrams(stream, inputs.ngrams, state)
        around_layer = cfg.residual is not None and cfg.residual.of_branch("layer") is not None
        x, join = self.read(stream, "layer", state) if around_layer else (stream, None)
        reduces_together = reduces_branches_together(cfg, layer)
        attention = self.make_attention(keep_partial_sums=reduces_together)
        branches: Branches = {}
        cross_kv = state.cross_attention
        if inputs.encoder_output is not None or cross_kv is not None:
            branches["cross_attention"], cross_kv = self.make_cross_attention(
                inputs, cross_kv, keep_partial_sums=reduces_together
            )
        if layer.feed_forward.is_branch:
            branches["feed_forward"] = FeedForward(
                cfg,
                layer.feed_forward,
                self.runtime,
                keep_partial_sums=reduces_together,
                name="feed_forward",
            )
        attend = partial(attention, inputs=self.add_layer_bias(inputs.self_attention))
        join_branches = {
            "serial": self.serial,
            "parallel": self.parallel,
            "parallel_shared_norm": self.parallel_shared_norm,
        }[cfg.block]
        x, new = join_branches(x, attend, branches, state)
        after_layer = cfg.residual is not None and cfg.residual.of_branch("layer_embedding")
        if not after_layer:
            x = self.add_layer_embedding(x, state)
        if cfg.layer_scalar:
            scalar = sharded_parameter(self, "layer_scalar", ones, (1,), "features")
            x = (x.astype(jnp.float32) * scalar[0]).astype(x.dtype)
        stream = x if join is None else join(x)
        if after_layer:
            stream = self.add_layer_embedding(stream, state)
        stream = sow_stream(self, stream, state.stack_input)
        if has_ngrams and new.cache is not None:
            new = new._replace(cache=(new.cache, ngram_cache))
        return stream, LayerState(new.cache, None, None if new.cache is None else cross_kv, new.kv)

    def add_layer_embedding(self, stream: Stream, state: LayerState) -> Stream:
        """Add the branch of `config.LayerEmbedding`, if the model has embeddings for each layer."""
        if state.embedding is None:
            return stream
        x, join = self.read(stream, "layer_embedding", state)
        branch = LayerEmbeddingBranch(self.config, self.runtime, name="layer_embedding")
        y = apply_dropout(self, branch(x, state.embedding), self.config.dropout.residual)
        return join(sow_and_perturb(self, "from_layer_embedding", y))

    def add_ngrams(
        self, stream: Stream, inputs: Any, state: LayerState
    ) -> tuple[Stream, LayerState, ConvolutionCache | None]:
        """Add the branch of `config.NgramEmbedding` to each stream.

        Returns also the state with the cache of attention alone, and the new cache of the branch.
        """
        branch = NgramBranch(self.config, self.layer_config, self.runtime, name="ngram_embedding")
        attention_cache, cache = (None, None) if state.cache is None else state.cache
        y, cache = branch(stream, inputs, cache, state.cache_update)
        y = apply_dropout(self, y, self.config.dropout.residual)
        stream = stream + sow_and_perturb(self, "from_ngram_embedding", y)
        return stream, state._replace(cache=attention_cache), cache

    @nn.nowrap
    def make_attention(self, *, keep_partial_sums: bool) -> AttentionModule:
        """Return the attention module of the layer's kind."""
        layer = self.layer_config
        return ATTENTION_MODULES.get(type(layer.attention), CustomMixer)(
            self.config,
            layer.attention,
            self.runtime,
            self.causal,
            keep_partial_sums=keep_partial_sums,
            name="attention",
        )

    @nn.nowrap
    def make_cross_attention(
        self, inputs: LayerInputs, cached: KVCache | None, *, keep_partial_sums: bool
    ) -> tuple[Branch, KVCache | None]:
        """Return cross-attention to the encoder's output, or to the cache, and the new cache."""
        kind: Any = self.layer_config.attention  # `MultiHead`, as the configuration checked
        attention = MultiHeadAttention(
            self.config,
            replace(kind, positions=(None,)),
            self.runtime,
            keep_partial_sums=keep_partial_sums,
            name="cross_attention",
        )
        cross_inputs = inputs.cross_attention
        if inputs.encoder_output is not None:
            source_kv = attention.project_key_value(inputs.encoder_output, cross_inputs)
            cached = swap_heads_and_slots(source_kv)
        elif cached is not None:
            source_kv = swap_heads_and_slots(cached)
        attend = partial(attention.attend_to_source, inputs=cross_inputs, source_kv=source_kv)
        return attend, cached

    def add_layer_bias(self, inputs: MixingInputs) -> MixingInputs:
        """Add the score bias whose parameters are the layer's own, if it has one."""
        if type(inputs) is tuple:
            return tuple(map(self.add_layer_bias, inputs))
        if not isinstance(inputs, AttentionInputs) or inputs.query_positions is None:
            return inputs
        option = self.layer_config.per_layer_score_bias
        if option is None or inputs.key_positions is None:
            return inputs
        num_heads = self.layer_config.attention.main.num_heads
        bias = ScoreBiasModule(option, num_heads, self.runtime, self.causal, name="relative_bias")
        return inputs._replace(bias=bias(inputs.query_positions, inputs.key_positions))

    def copy_to_branches(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Copy x to tensor-parallel devices once for all branches; not before an MoE router."""
        if self.layer_config.feed_forward.is_moe:
            return x
        return F.copy_to_tensor_parallel(x, self.runtime.mesh_axes.tensor)

    def serial(
        self, stream: Stream, attend: Attend, branches: Branches, state: LayerState
    ) -> tuple[Stream, LayerState]:
        """Each branch reads the stream that the branch before it has written."""
        if self.layer_config.attention.parts:
            x, join = self.read(stream, "attention", state)
            y, state = attend(self.pre_norm(x, "attention_norm"), state=state)
            stream = join(self.finish_branch("attention", y))
        for name, branch in branches.items():
            x, join = self.read(stream, name, state)
            y = branch(self.pre_norm(x, f"{name}_norm"))
            stream = join(self.finish_branch(name, y))
        return stream, state

    def parallel(
        self, stream: Stream, attend: Attend, branches: Branches, state: LayerState
    ) -> tuple[Stream, LayerState]:
        """All branches read the same stream, each after its own norm."""
        reduces_together = reduces_branches_together(self.config, self.layer_config)
        x, join = self.read(stream, "", state) if reduces_together else (stream, None)
        source = self.copy_to_branches(x) if reduces_together else x
        y, state = attend(self.pre_norm(source, "attention_norm"), state=state)
        outputs = {"attention": self.finish_branch("attention", y)}
        for name, branch in branches.items():
            y = branch(self.pre_norm(source, f"{name}_norm"))
            outputs[name] = self.finish_branch(name, y)
        if join is not None:
            return join(self.reduce_branches(outputs)), state
        for name, y in outputs.items():
            stream = self.read(stream, name, state)[1](y)
        return stream, state

    def parallel_shared_norm(
        self, stream: Stream, attend: Attend, branches: Branches, state: LayerState
    ) -> tuple[Stream, LayerState]:
        """All branches read the same normalised stream; a norm after them applies to the sum."""
        x, join = self.read(stream, "", state)
        source = self.copy_to_branches(self.pre_norm(x, "norm"))
        y, state = attend(source, state=state)
        outputs = {"attention": y} | {name: branch(source) for name, branch in branches.items()}
        if self.layer_config.norm_placement in POST_BRANCH_NORMS:
            y = self.post_norm(self.reduce_branches(outputs), "norm")
            y = self.scale_branch("parallel_branches", y)
        else:
            outputs = {n: self.scale_branch(n, y) for n, y in outputs.items()}
            y = self.post_norm(self.reduce_branches(outputs), "norm")
        return join(y), state

    @nn.nowrap
    def read(self, stream: Stream, branch: str, state: LayerState) -> tuple[Array, Join]:
        """Return what a branch reads of the stream, and what joins its output to the stream.

        By default the branch reads the stream, and their sum is the next; it is normalised if
        norm_placement is "post". The branch "" is the sum of parallel branches.
        """
        option, prefix = self.config.residual, f"{branch}_" if branch else ""
        option = option and option.of_branch(branch or "branches")
        x: Any = stream
        join: Join = partial(add, stream)
        if option is not None:
            name = f"{prefix}residual"
            params = ResidualParameters(option, self.runtime, self.config.model_dim, name=name)()
            kind = self.layer_config.attention
            place = c.Place(state.layer, branch or "branches", kind, state.stack_input)
            x, join = read(option, params, stream, place)
            if not option.is_short:
                x = sow_and_perturb(self, f"read_by_{branch or 'branches'}", x)
        if self.layer_config.norm_placement != "post" or branch.startswith("layer"):
            return x, join
        return x, lambda y: Norm(self.config.norm, self.runtime, name=f"post_{prefix}norm")(join(y))

    def pre_norm(self, x: Float[Array, "*batch T D"], norm: str) -> Float[Array, "*batch T D"]:
        """Norm before a branch, if the placement has one and the branch has none."""
        option = self.config.residual
        option = option and option.of_branch("branches" if norm == "norm" else norm[:-5])
        if option is not None and option.norms_input:
            return x
        if norm == "feed_forward_norm" and self.layer_config.feed_forward.has_norms:
            return x
        placement = self.layer_config.norm_placement
        if placement in ("post", "res_post"):
            return x
        if placement == "pre_feed_forward" and norm == "attention_norm":
            return x
        return Norm(self.config.norm, self.runtime, name=f"pre_{norm}")(x)

    def post_norm(self, y: Float[Array, "*batch T D"], norm: str) -> Float[Array, "*batch T D"]:
        """Dropout of a branch's output, then a norm if the placement has one."""
        y = apply_dropout(self, y, self.config.dropout.residual)
        if self.layer_config.norm_placement in POST_BRANCH_NORMS:
            option = self.config.post_norm or self.config.norm
            return Norm(option, self.runtime, name=f"post_{norm}")(y)
        return y

    def finish_branch(self, name: str, y: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Dropout, norm and multiplier after a branch."""
        return self.scale_branch(name, self.post_norm(y, f"{name}_norm"))

    def scale_branch(self, name: str, y: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Multiply a branch's output by the residual multiplier; `inspect` reads the result."""
        if (multiplier := self.config.residual_multiplier) != 1:
            y = y * jnp.asarray(multiplier, y.dtype)
        return sow_and_perturb(self, f"from_{name}", y)

    def reduce_branches(self, outputs: dict[str, Array]) -> Float[Array, "*batch T D"]:
        """Sum of the branches' outputs, over tensor-parallel devices too."""
        return F.reduce_from_tensor_parallel(
            reduce(add, outputs.values()), self.runtime.mesh_axes.tensor
        )
