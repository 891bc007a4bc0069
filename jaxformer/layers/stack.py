"""Stack of layers: `nn.scan` over repetitions of the layer pattern."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.collectives import TENSOR_SUM_REMAT_NAME
from jaxformer.functional.grouped_gemm import GROUPED_MATMUL_REMAT_NAME
from jaxformer.layers.attention.inputs import (
    NO_INPUTS,
    AttentionInputs,
    LayerInputMaker,
    LayerInputs,
    ScoreBiasFunction,
    TokenPositions,
    attended_tokens,
)
from jaxformer.layers.attention.score_bias import ScoreBiasModule
from jaxformer.layers.block import Block
from jaxformer.layers.cache import (
    Cache,
    CacheUpdate,
    KVCache,
    LayerCache,
    LayerState,
    arrange_cache,
)
from jaxformer.layers.layouts import LAYER_GROUPS, layout_of, segments_of
from jaxformer.layers.norms import Norm
from jaxformer.layers.residual import ResidualParameters, begin, end
from jaxformer.layers.runtime import INTERMEDIATES, PERTURBATIONS, RuntimeConfig, sow_and_perturb

# Saving the results of these operations would keep the gathered kernels in memory.
UNSAVED_PRIMITIVES = ("all_gather", "pvary", "reshape", "transpose", "squeeze", "broadcast_in_dim")


def save_all_but_gathered(primitive: Any, *inputs: Any, **options: Any) -> bool:
    """Remat policy: save everything except gathered kernels and complex arrays."""
    is_complex = jnp.issubdtype(options.get("new_dtype", jnp.float32), jnp.complexfloating)
    if primitive.name == "complex" or is_complex or any(jnp.iscomplexobj(x) for x in inputs):
        return False
    return primitive.name not in UNSAVED_PRIMITIVES


REMAT_POLICIES = {
    "none": save_all_but_gathered,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(
            TENSOR_SUM_REMAT_NAME,
            F.BLOCKWISE_REMAT_NAME,
            F.KERNEL_REMAT_NAME,
            GROUPED_MATMUL_REMAT_NAME,
        ),
    ),
    "full": jax.checkpoint_policies.save_only_these_names(F.KERNEL_REMAT_NAME),
}
NO_CACHE: Any = LayerCache(None)
SCANNED_COLLECTIONS = ("params", "router", INTERMEDIATES, PERTURBATIONS)  # a value for each layer


class GroupInputs(NamedTuple):
    """What the layers of a group read besides x.

    Attributes:
        layers: Inputs of each layer; of the pattern, of one repetition.
        cache_updates: How the cache of each layer takes the new tokens.
        kv: Keys and values of layers before the group, as in `LayerState`.
    """

    layers: tuple[LayerInputs, ...]
    cache_updates: tuple[CacheUpdate | None, ...]
    kv: dict[str, KVCache | None]


class LayerGroup(nn.Module):
    """The blocks of some layers: one repetition of the pattern, or layers outside the scan."""

    config: c.TransformerConfig
    layer_configs: tuple[c.Layer, ...]
    causal: bool
    runtime: RuntimeConfig
    start: int = 0

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "*batch T D"], tuple[Any, ...]],
        inputs: GroupInputs,
        scanned: tuple[Int[Array, ""] | None, tuple[KVCache | None, ...], Array | None],
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[Any, Any]]:
        """Return x and the self-attention caches as carry; new cross-attention caches, and `kv`.

        `scanned` is the index of this repetition, and the cross-attention caches and embeddings of
        its layers. The new caches hold the keys and values of the encoder's output, if there is
        one. Layers outside the group read no `kv` of a repetition.
        """
        block, policy = Block, REMAT_POLICIES[self.runtime.remat]
        if self.runtime.remat != "none" or self.runtime.mesh_axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.runtime.scan)
        (x, caches), (index, cross_caches, embeddings) = carry, scanned
        kv, states = inputs.kv, list[LayerState]()
        for i, layer_config in enumerate(self.layer_configs):
            layer = block(self.config, layer_config, self.runtime, self.causal, name=f"layer_{i}")
            update = inputs.cache_updates[i]
            state = LayerState(
                caches[i],
                None if update is None else replace(update, layer_index=index),
                cross_caches[i],
                kv,
                None if embeddings is None else embeddings[i],
                self.number_of_layer(i, index),
            )
            x, state = layer(x, inputs.layers[i], state)
            kv = state.kv
            states.append(state)
        has_source = inputs.layers[0].encoder_output is not None
        new_cross_caches = tuple(x.cross_attention if has_source else None for x in states)
        new_caches = tuple(state.cache for state in states)
        return (x, new_caches), (new_cross_caches, kv if index is None else {})

    @nn.nowrap
    def number_of_layer(self, i: int, index: Int[Array, ""] | None) -> Any:
        """Number of a layer in the stack; None if neither residual nor attention asks."""
        parts = self.layer_configs[i].attention.parts
        if self.config.residual is None and not any(part.depends_on_depth for part in parts):
            return None
        return self.start + i + (0 if index is None else index * len(self.layer_configs))


class Stack(nn.Module):
    """The blocks of a stack and the final norm.

    Repetitions of a pattern of layers run under `nn.scan`, so that compile time does not grow with
    depth: their parameters are stacked along a leading axis under "layers". The layers before the
    pattern are under "first_layers", the layers after its last repetition under "tail". A decoder
    whose parameters are all under "first_layers" runs layer by layer.
    """

    config: c.TransformerConfig
    part: c.Stack
    causal: bool
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        token_positions: TokenPositions,
        encoder_output: Float[Array, "*batch S D"] | None = None,
        cross_inputs: AttentionInputs = NO_INPUTS,
        cache: Cache | None = None,
        layer_embeddings: Float[Array, "layers *batch T E"] | None = None,
        *,
        contiguous_positions: bool = False,
    ) -> tuple[Float[Array, "*batch T D"], Cache | None]:
        """Return the last hidden vectors and the updated cache."""
        layout = layout_of({self.part: self.variables.get("params", {})})
        segments = segments_of(self.config, self.part, layout)
        layers = self.config.stacks[self.part]
        cache = cache and arrange_cache(self.config, cache, layout)
        if not self.is_mutable_collection("params"):
            self.check_depth(segments)
        tokens = attended_tokens(self.config, self.runtime, token_positions, cache)
        score_bias, options = self.make_score_bias(), (self.causal, contiguous_positions)
        make_inputs = LayerInputMaker(self.runtime, tokens, score_bias, *options, x.ndim + 1)
        pattern = layers[: segments.first + segments.period]
        inputs = [LayerInputs(make_inputs(x), cross_inputs, encoder_output) for x in pattern]
        cache_updates = tuple(tokens.cache_updates.get(layer.window) for layer in pattern)
        kv: Any = {repr(x.window): None for x in layers if x.attention.cross_layer_kv}
        x = sow_and_perturb(self, "stack_input", x)
        option, model_params = self.config.residual, dict[str, Array]()
        if option is not None and option.model_parameters(x.shape[-1]):
            arguments = option, self.runtime, x.shape[-1]
            model_params = ResidualParameters(*arguments, of_model=True, name="residual")()
        embedded, kind = x, layers[0].attention
        x = x if option is None else begin(option, model_params, x, kind)
        new_caches: dict[str, Any] = {}
        for name, indices in segments.groups().items():
            if not indices:
                continue
            caches = (NO_CACHE,) * len(indices) if cache is None else getattr(cache, name)
            group = slice(indices.start, indices.stop)
            group_inputs = GroupInputs(tuple(inputs[group]), cache_updates[group], kv)
            x, new_caches[name], new_kv = self.run_group(
                name, segments, layers[group], x, group_inputs, caches, layer_embeddings
            )
            kv |= new_kv
        x = x if option is None else end(option, model_params, x, embedded)
        if self.config.final_norm:
            x = Norm(self.config.norm, self.runtime, name="final_norm")(x)
        x = sow_and_perturb(self, "stack_output", x)
        return x, cache and cache._replace(**new_caches, positions=tokens.cached_positions)

    def run_group(
        self,
        name: str,
        segments: c.Segments,
        layer_configs: tuple[c.Layer, ...],
        x: Float[Array, "*batch T D"],
        inputs: GroupInputs,
        caches: tuple[LayerCache, ...],
        layer_embeddings: Float[Array, "layers *batch T E"] | None,
    ) -> tuple[Float[Array, "*batch T D"], tuple[LayerCache, ...], dict[str, KVCache | None]]:
        """Apply a group of layers; return x, their caches, and keys and values to hand on."""
        group, index, runtime = LayerGroup, None, replace(self.runtime, scan=False)
        if layer_embeddings is not None:
            layer_embeddings = split_by_segment(layer_embeddings, segments)[name]
        if name == "layers":
            group, index = self.scan_over(segments.repeats), jnp.arange(segments.repeats)
            runtime = self.runtime if segments.repeats > 1 else runtime
        start = {"first_layers": 0, "layers": segments.first}.get(
            name, segments.first + segments.period * segments.repeats
        )
        layers = group(self.config, layer_configs, self.causal, runtime, start, name=name)
        self_caches, cross_caches = zip(*caches, strict=True)
        (x, self_caches), (new_cross_caches, kv) = layers(
            (x, self_caches), inputs, (index, cross_caches, layer_embeddings)
        )
        if inputs.layers[0].encoder_output is not None:
            cross_caches = new_cross_caches
        return x, tuple(map(LayerCache, self_caches, cross_caches)), kv

    @nn.nowrap
    def scan_over(self, repeats: int) -> Any:
        """Return `LayerGroup` under a scan over its repetitions, whose parameters are stacked."""
        return nn.scan(
            LayerGroup,
            variable_axes=dict.fromkeys(SCANNED_COLLECTIONS, 0),
            metadata_params={nn.PARTITION_NAME: "layers"},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, 0),  # caches are carried
            length=repeats,
            unroll=1 if self.runtime.scan else repeats,
            check_constancy_invariants=self.is_initializing(),  # it traces again
        )

    def check_depth(self, segments: c.Segments) -> None:
        """Check the depth of the parameters; `nn.scan` would use only the first of more layers."""
        params = self.variables.get("params", {})
        first, layers, tail = (params.get(name, {}) for name in LAYER_GROUPS)
        depth = max((x.shape[0] for x in jax.tree.leaves(layers)), default=segments.repeats)
        if (len(first), len(layers), depth, len(tail)) != segments:
            count = len(first) + depth * len(layers) + len(tail)
            raise ValueError(
                f"Parameters of the {self.name} have {count} layers ({len(first)} first layers, "
                f"pattern of {len(layers)}), but the configuration has "
                f"{len(self.config.stacks[self.part])} ({segments.first} first layers, pattern of "
                f"{segments.period}). Were the parameters made for another model?"
            )

    @nn.nowrap
    def make_score_bias(self) -> ScoreBiasFunction:
        """Return a function from a score bias option to its bias; layers share its parameters."""
        modules = dict[tuple[c.ScoreBias, int], ScoreBiasModule]()

        def score_bias(
            option: c.ScoreBias,
            num_heads: int,
            query_positions: Int[Array, "*batch T"],
            key_positions: Int[Array, "*batch S"],
        ) -> F.AttentionBias:
            if (option, num_heads) not in modules:
                # Others have no parameters, and so need no name.
                name = "relative_bias" if option.shared_across_layers else None
                modules[option, num_heads] = ScoreBiasModule(
                    option, num_heads, self.runtime, self.causal, name=name
                )
            return modules[option, num_heads](query_positions, key_positions)

        return score_bias


def split_by_segment(x: Array, segments: c.Segments) -> dict[str, Array]:
    """Split values of all layers into the groups of a stack, the pattern's by repetition."""
    first, period, repeats, _ = segments
    stop = first + repeats * period
    pattern = x[first:stop].reshape(repeats, period, *x.shape[1:])
    return dict(zip(LAYER_GROUPS, (x[:first], pattern, x[stop:]), strict=True))
