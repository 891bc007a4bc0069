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
    AttentionInputs,
    LayerInputs,
    ScoreBiasFunction,
    TokenPositions,
    make_layer_inputs,
)
from jaxformer.layers.attention.score_bias import ScoreBiasModule
from jaxformer.layers.block import NO_INPUTS, Block
from jaxformer.layers.cache import Cache, CacheUpdate, KVCache, LayerCache, distinct_windows
from jaxformer.layers.norms import Norm
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
LAYER_GROUPS = "first_layers", "layers", "tail"  # parts of a stack, in order
NO_CACHE: Any = LayerCache(None)
SCANNED_COLLECTIONS = ("params", "router", INTERMEDIATES, PERTURBATIONS)  # a value for each layer


class StackInputs(NamedTuple):
    """What the layers read besides x.

    Attributes:
        layer_inputs: Inputs of each of the first layers and of one repetition of the pattern.
        cache_updates: Cache update of each of these layers.
        encoder_output: Last hidden vectors of the encoder, if there are any to read.
        cross_inputs: Inputs of cross-attention.
        shared_kv: Keys and values of the first layers that later layers read, by distinct window.
    """

    layer_inputs: tuple[LayerInputs, ...]
    cache_updates: tuple[CacheUpdate | None, ...]
    encoder_output: Float[Array, "*batch S D"] | None
    cross_inputs: AttentionInputs
    shared_kv: tuple[KVCache | None, ...]

    def of_layers(self, indices: range) -> "StackInputs":
        """Return the inputs of these layers."""
        layers = slice(indices.start, indices.stop)
        return self._replace(
            layer_inputs=self.layer_inputs[layers], cache_updates=self.cache_updates[layers]
        )


class LayerGroup(nn.Module):
    """The blocks of some layers: one repetition of the pattern, or layers outside the scan."""

    config: c.TransformerConfig
    layer_configs: tuple[c.Layer, ...]
    causal: bool
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "*batch T D"], tuple[Any, ...]],
        inputs: StackInputs,
        scanned: tuple[Int[Array, ""] | None, tuple[KVCache | None, ...], Array | None],
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[Any, Any]]:
        """Return x and the self-attention caches as carry; new cross-attention caches, shared KV.

        `scanned` is the index of this repetition, and the cross-attention caches and embeddings of
        its layers. The new caches hold the keys and values of the encoder's output, if there is
        one. Outside a scan, keys and values that other groups may read are returned too.
        """
        block, policy = Block, REMAT_POLICIES[self.runtime.remat]
        if self.runtime.remat != "none" or self.runtime.mesh_axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.runtime.scan)
        (x, caches), (index, cached_sources, embeddings) = carry, scanned
        encoder_output, self_caches, cross_caches = inputs.encoder_output, [], []
        windows, shared_kv = distinct_windows(self.config), list(inputs.shared_kv)
        for i, layer_config in enumerate(self.layer_configs):
            layer = block(self.config, layer_config, self.runtime, self.causal, name=f"layer_{i}")
            cache = None if caches[i] is None else LayerCache(caches[i], cached_sources[i])
            update = inputs.cache_updates[i]
            update = None if update is None else replace(update, layer_index=index)
            layer_inputs: Any = inputs.layer_inputs[i]
            if layer_config.attention.cross_layer_kv:
                source_kv = shared_kv[windows.index(layer_config.window)]
                layer_inputs = layer_inputs._replace(source_kv=source_kv)
            x, cache = layer(
                x,
                layer_inputs,
                encoder_output,
                inputs.cross_inputs,
                cache,
                update,
                None if embeddings is None else embeddings[i],
            )
            if cache is not None and cache.attended_kv is not None:
                shared_kv[windows.index(layer_config.window)] = cache.attended_kv
            self_caches.append(None if cache is None else cache.self_attention)
            cross_caches.append(
                None if cache is None or encoder_output is None else cache.cross_attention
            )
        returned_kv = tuple(shared_kv) if index is None else ()
        return (x, tuple(self_caches)), (tuple(cross_caches), returned_kv)


class Stack(nn.Module):
    """The blocks of a stack and the final norm.

    Repetitions of a pattern of layers run under `nn.scan`, so that compile time does not grow with
    depth: their parameters are stacked along a leading axis under "layers". The layers before the
    pattern are under "first_layers", the layers after its last repetition under "tail".
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
        segments = self.config.segments(self.part)
        if not self.is_mutable_collection("params"):
            self.check_depth(segments)
        layer_inputs, cache_updates, positions = make_layer_inputs(
            self.config,
            self.runtime,
            token_positions,
            cache,
            self.make_score_bias(),
            layers=self.config.stacks[self.part][: segments.first + segments.period],
            causal=self.causal,
            contiguous_positions=contiguous_positions,
            num_axes=x.ndim + 1,
        )
        no_kv = (None,) * len(distinct_windows(self.config))
        inputs = StackInputs(layer_inputs, cache_updates, encoder_output, cross_inputs, no_kv)
        x = sow_and_perturb(self, "stack_input", x)
        new_caches: dict[str, Any] = {}
        for name, indices in segments.groups().items():
            if not indices:
                continue
            caches = (NO_CACHE,) * len(indices) if cache is None else getattr(cache, name)
            x, new_caches[name], shared_kv = self.run_group(
                name, indices, x, inputs, caches, layer_embeddings
            )
            inputs = inputs._replace(shared_kv=shared_kv or inputs.shared_kv)
        if self.config.final_norm:
            x = Norm(self.config.norm, self.runtime, name="final_norm")(x)
        x = sow_and_perturb(self, "stack_output", x)
        return x, cache and cache._replace(**new_caches, positions=positions)

    def run_group(
        self,
        name: str,
        indices: range,
        x: Float[Array, "*batch T D"],
        inputs: StackInputs,
        caches: tuple[LayerCache, ...],
        layer_embeddings: Float[Array, "layers *batch T E"] | None,
    ) -> tuple[Float[Array, "*batch T D"], tuple[LayerCache, ...], tuple[KVCache | None, ...]]:
        """Apply a group of layers; return x, their caches, and keys and values to share."""
        group, index, runtime = LayerGroup, None, replace(self.runtime, scan=False)
        segments = self.config.segments(self.part)
        repeats = segments.repeats
        if layer_embeddings is not None:
            layer_embeddings = split_by_segment(layer_embeddings, segments)[name]
        if name == "layers":
            group, index = self.scan_over(repeats), jnp.arange(repeats)
            runtime = self.runtime if repeats > 1 else runtime
        layer_configs = self.config.stacks[self.part][indices.start : indices.stop]
        layers = group(self.config, layer_configs, self.causal, runtime, name=name)
        self_caches, cross_caches, _ = zip(*caches, strict=True)
        (x, self_caches), (new_cross_caches, shared_kv) = layers(
            (x, self_caches), inputs.of_layers(indices), (index, cross_caches, layer_embeddings)
        )
        if inputs.encoder_output is not None:
            cross_caches = new_cross_caches
        return x, tuple(map(LayerCache, self_caches, cross_caches)), shared_kv

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
    """Split values of all layers into the groups of a stack; those of the pattern by repetition."""
    first, period, repeats, _ = segments
    stop = first + repeats * period
    pattern = x[first:stop].reshape(repeats, period, *x.shape[1:])
    return dict(zip(LAYER_GROUPS, (x[:first], pattern, x[stop:]), strict=True))


def unstack_layers(stack: Any) -> list[Any]:
    """Return one tree per layer from parameters or intermediates of a stack.

    Args:
        stack: Parameters of a stack, such as `params["decoder"]`, or a tree of the same structure:
            repetitions of the pattern are stacked under "layers", other layers are under
            "first_layers" and "tail".

    Returns:
        A tree for each layer, in order.
    """

    def in_order(layers: dict[str, Any]) -> list[Any]:
        return [layers[f"layer_{i}"] for i in range(len(layers))]

    pattern = in_order(stack.get("layers", {}))
    repeats = jax.tree.leaves(pattern)[0].shape[0] if pattern else 0
    return [
        *in_order(stack.get("first_layers", {})),
        *(jax.tree.map(lambda x, i=i: x[i], layer) for i in range(repeats) for layer in pattern),
        *in_order(stack.get("tail", {})),
    ]
