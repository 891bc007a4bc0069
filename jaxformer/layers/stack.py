"""Stack of layers: `nn.scan` over repetitions of the layer pattern."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.collectives import TENSOR_SUM_REMAT_NAME
from jaxformer.functional.depth_attention import HISTORY_REMAT_NAME
from jaxformer.functional.grouped_gemm import GROUPED_MATMUL_REMAT_NAME
from jaxformer.layers.attention.inputs import (
    NO_INPUTS,
    AttentionInputs,
    LayerInputMaker,
    LayerInputs,
    NgramInputs,
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
            HISTORY_REMAT_NAME,
        ),
    ),
    "full": jax.checkpoint_policies.save_only_these_names(F.KERNEL_REMAT_NAME, HISTORY_REMAT_NAME),
}
NO_CACHE: Any = LayerCache(None)
SCANNED_COLLECTIONS = ("params", "router", INTERMEDIATES, PERTURBATIONS)  # a value for each layer


class GroupInputs(NamedTuple):
    """What the layers of a group read besides x.

    Attributes:
        layers: Inputs of each layer; of the pattern, of one repetition.
        cache_updates: How the cache of each layer takes the new tokens.
        kv: Keys and values of layers before the group, as in `LayerState`.
        stack_input: As in `LayerState`.
        earlier_repeats: Repetitions of earlier passes, whose caches come first; None in the first.
    """

    layers: tuple[LayerInputs, ...]
    cache_updates: tuple[CacheUpdate | None, ...]
    kv: dict[str, KVCache | None]
    stack_input: Float[Array, "*batch T D"] | None
    earlier_repeats: int | None = None


class EveryLayer(NamedTuple):
    """What the layers of a stack read besides x.

    Attributes:
        inputs: Inputs of each layer.
        cache_updates: How the cache of each layer takes the new tokens.
        stack_input: As in `LayerState`.
        embeddings: Embeddings of each token for each layer, if there are any.
    """

    inputs: Sequence[LayerInputs]
    cache_updates: Sequence[CacheUpdate | None]
    stack_input: Float[Array, "*batch T D"] | None
    embeddings: Float[Array, "layers *batch T E"] | None


class Run(NamedTuple):
    """A run of a group of layers: all of its layers, or some of those outside the scan.

    Attributes:
        group: Name of the group.
        layers: Numbers of the layers in the stack; of the pattern, those of one repetition.
        pass_number: Number of the pass through a loop from 0; None outside.
        first_cache: Index of the first layer's cache among those of the group.
    """

    group: str
    layers: Sequence[int]
    pass_number: int | None = None
    first_cache: int = 0


def list_runs(loop: c.Loop | None, segments: c.Segments) -> list[Run]:
    """The runs of a stack's layers, in order; the layers of a loop run in each pass."""
    if loop is None:
        return [Run(name, layers) for name, layers in segments.groups().items() if layers]
    if segments.period:
        before, inside, after = map(Run, LAYER_GROUPS, segments.groups().values())
    else:
        before, inside, after = (Run("first_layers", x) for x in loop.split(range(segments.first)))
    passes = (inside._replace(pass_number=i) for i in range(loop.passes))
    runs = [run for run in (before, *passes, after) if run.layers]
    if segments.period:
        return runs
    starts = accumulate((len(run.layers) for run in runs), initial=0)
    return [run._replace(first_cache=x) for run, x in zip(runs, starts, strict=False)]


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
        only: Sequence[int] | None = None,
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[Any, Any]]:
        """Return x and the self-attention caches as carry; new cross-attention caches, and `kv`.

        `scanned` is the index of this repetition, and the cross-attention caches and embeddings of
        its layers. The new caches hold the keys and values of the encoder's output, if there is
        one. Layers outside the group read no `kv` of a repetition. `only` are the numbers, in the
        group, of the layers that run; None are all.
        """
        block, policy = Block, REMAT_POLICIES[self.runtime.remat]
        if self.runtime.remat != "none" or self.runtime.mesh_axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.runtime.scan)
        (x, caches), (index, cross_caches, embeddings) = carry, scanned
        kv, states, earlier = inputs.kv, list[LayerState](), inputs.earlier_repeats
        slot = index if earlier is None or index is None else index + earlier
        for k, i in enumerate(range(len(self.layer_configs)) if only is None else only):
            options = self.config, self.layer_configs[i], self.runtime, self.causal
            layer, update = block(*options, name=f"layer_{i}"), inputs.cache_updates[k]
            state = LayerState(
                caches[k],
                None if update is None else replace(update, layer_index=slot),
                cross_caches[k],
                kv,
                None if embeddings is None else embeddings[i],
                self.number_of_layer(i, index),
                inputs.stack_input,
            )
            x, state = layer(x, inputs.layers[k], state)
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
        recent_tokens: Int[Array, "*batch T n"] | None = None,
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
        ngrams = None
        if recent_tokens is not None:
            ngrams = NgramInputs(recent_tokens, tokens.mixer_inputs)
        read = cross_inputs, encoder_output, ngrams
        inputs = [LayerInputs(make_inputs(layer), *read) for layer in layers]
        x = embedded = sow_and_perturb(self, "stack_input", x)
        option, model_params = self.config.residual, dict[str, Array]()
        if option is not None:
            if option.model_parameters(x.shape[-1]):
                arguments = option, self.runtime, x.shape[-1]
                model_params = ResidualParameters(*arguments, of_model=True, name="residual")()
            x = begin(option, model_params, x, layers[0].attention)
        norm: Any = None
        if self.config.final_norm:
            norm = Norm(self.config.last_norm or self.config.norm, self.runtime, name="final_norm")
        stack_input = None if option is None else embedded
        updates = [tokens.cache_updates.get(layer.window) for layer in layers]
        every_layer = EveryLayer(inputs, updates, stack_input, layer_embeddings)
        x, caches = self.run_layers(x, segments, every_layer, cache, norm)
        x = x if option is None else end(option, model_params, x, embedded)
        x = sow_and_perturb(self, "stack_output", x if norm is None else norm(x))
        return x, cache and cache._replace(**caches, positions=tokens.cached_positions)

    def run_layers(
        self, x: Any, segments: c.Segments, every: EveryLayer, cache: Cache | None, norm: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Run the layers, those of a loop in each pass; return x, and the caches of each group."""
        runs, layers = list_runs(self.config.loop, segments), self.config.stacks[self.part]
        names = dict.fromkeys(run.group for run in runs)
        groups = {name: self.make_group(name, segments) for name in names}
        caches = {run.group: [NO_CACHE] * (run.first_cache + len(run.layers)) for run in runs}
        if cache is not None:
            caches = {name: list(getattr(cache, name)) for name in names}
        kv: Any = {repr(x.window): None for x in layers if x.attention.cross_layer_kv}
        if any(x.attention.value_residual for x in layers):
            kv["layer 0"] = None
        loop_input = x
        for run in runs:
            if run.pass_number == 0:
                loop_input = x
            elif run.pass_number is not None:
                x = self.enter_loop(x, loop_input, norm)
            place = slice(run.first_cache, run.first_cache + len(run.layers))
            x, caches[run.group][place], new_kv = self.run_group(
                groups[run.group], run, segments, x, every, kv, tuple(caches[run.group][place])
            )
            kv |= new_kv
            if run.pass_number is not None:
                self.sow(INTERMEDIATES, "pass_outputs", jax.tree.leaves(x)[0])
        return x, {name: tuple(group) for name, group in caches.items()}

    def enter_loop(self, x: Any, loop_input: Any, norm: Callable[[Any], Any]) -> Any:
        """What the next pass through a loop reads, after the output of the last one."""
        match self.config.loop and self.config.loop.enter:
            case "sum":
                return x + loop_input
            case "final_norm":
                return norm(x)
        return x

    def make_group(self, name: str, segments: c.Segments) -> LayerGroup:
        """Return the module of a group of layers; the pattern's runs under a scan."""
        indices = segments.groups()[name]
        group, runtime = LayerGroup, replace(self.runtime, scan=False)
        if name == "layers":
            group = self.scan_over(segments.repeats)
            runtime = self.runtime if segments.repeats > 1 else runtime
        layers = self.config.stacks[self.part][indices.start : indices.stop]
        return group(self.config, layers, self.causal, runtime, indices.start, name=name)

    def run_group(
        self,
        group: LayerGroup,
        run: Run,
        segments: c.Segments,
        x: Float[Array, "*batch T D"],
        every: EveryLayer,
        kv: dict[str, KVCache | None],
        caches: tuple[LayerCache, ...],
    ) -> tuple[Float[Array, "*batch T D"], tuple[LayerCache, ...], dict[str, KVCache | None]]:
        """Apply a group of layers; return x, their caches, and keys and values to hand on."""
        inputs = tuple(every.inputs[i] for i in run.layers)
        updates = tuple(every.cache_updates[i] for i in run.layers)
        index, options, earlier, embeddings = None, dict[str, Any](), None, None
        if every.embeddings is not None:
            embeddings = split_by_segment(every.embeddings, segments)[run.group]
        if run.group == "layers":
            index = jnp.arange(segments.repeats)
            earlier = run.pass_number * segments.repeats if run.pass_number else None
        elif len(run.layers) < len(group.layer_configs):
            options = dict(only=run.layers)
        group_inputs = GroupInputs(inputs, updates, kv, every.stack_input, earlier)
        self_caches, cross_caches = zip(*caches, strict=True)
        (x, self_caches), (new_cross_caches, new_kv) = group(
            (x, self_caches), group_inputs, (index, cross_caches, embeddings), **options
        )
        if inputs[0].encoder_output is not None:
            cross_caches = new_cross_caches
        return x, tuple(map(LayerCache, self_caches, cross_caches)), new_kv

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
