"""Stack of layers: `nn.scan` over repetitions of the layer pattern."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention import RECURRENT_KINDS
from jaxformer.functional.collectives import TENSOR_SUM_REMAT_NAME
from jaxformer.layers.attention import inputs as g
from jaxformer.layers.attention.inputs import AttentionInputs, TokenPositions
from jaxformer.layers.attention.score_bias import ScoreBiasModule, per_layer_score_bias
from jaxformer.layers.block import NO_INPUTS, Block
from jaxformer.layers.cache import (
    EMPTY_SLOT_POSITION,
    Cache,
    KVCache,
    LayerCache,
    distinct_windows,
    is_ring_buffer,
)
from jaxformer.layers.intermediates import INTERMEDIATES, PERTURBATIONS, sow_and_perturb
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import local_shard
from jaxformer.layers.runtime import RuntimeConfig

# What stands between a kernel's shares and its product: to keep that would be to keep the kernel.
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
            TENSOR_SUM_REMAT_NAME, F.BLOCKWISE_REMAT_NAME, F.KERNEL_REMAT_NAME
        ),
    ),
    "full": jax.checkpoint_policies.save_only_these_names(F.KERNEL_REMAT_NAME),
}
NO_CACHE: Any = LayerCache(None)
SCANNED_COLLECTIONS = ("params", "router", INTERMEDIATES, PERTURBATIONS)  # a value for each layer


class LayerGroup(nn.Module):
    """One repetition of the layer pattern: `num_layers` blocks."""

    config: c.TransformerConfig
    num_layers: int
    causal: bool
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "*batch T D"], tuple[Any, ...]],
        inputs: tuple[AttentionInputs, ...],
        encoder_output: Float[Array, "*batch S D"] | None,
        cross_inputs: AttentionInputs,
        scanned: tuple[Int[Array, ""] | None, tuple[KVCache | None, ...]],
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[KVCache | None, ...]]:
        """Return x and the self-attention caches as carry, and new cross-attention caches.

        `scanned` is the index of this repetition of the pattern, and the cross-attention caches of
        its layers. The new ones hold the keys and values of `encoder_output`, where there is one.
        """
        block, policy = Block, REMAT_POLICIES[self.runtime.remat]
        if self.runtime.remat != "none" or self.runtime.mesh_axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.runtime.scan)
        (x, caches), (index, cached_sources) = carry, scanned
        self_caches, cross_caches = [], []
        for i in range(self.num_layers):
            layer_config, layer_inputs = self.config.layer(i), inputs[i]._replace(layer_index=index)
            layer = block(
                self.config.for_layer(i), layer_config, self.runtime, self.causal, name=f"layer_{i}"
            )
            cache = None if caches[i] is None else LayerCache(caches[i], cached_sources[i])
            x, cache = layer(x, layer_inputs, encoder_output, cross_inputs, cache)
            self_caches.append(None if cache is None else cache.self_attention)
            cross_caches.append(
                None if cache is None or encoder_output is None else cache.cross_attention
            )
        return (x, tuple(self_caches)), tuple(cross_caches)


class Stack(nn.Module):
    """`num_layers` blocks and the final norm.

    Whole periods of the pattern run under `nn.scan`, so that compile time does not grow with depth:
    their parameters are stacked along a leading axis under "layers". Layers left over after the
    last whole period stand under "tail".
    """

    config: c.TransformerConfig
    num_layers: int
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
        *,
        contiguous_positions: bool = False,
    ) -> tuple[Float[Array, "*batch T D"], Cache | None]:
        """Return the last hidden vectors and the updated cache."""
        pattern_length = self.config.pattern_length
        repeats, remainder = divmod(self.num_layers, pattern_length)
        if not self.is_mutable_collection("params"):
            self.check_depth(repeats, remainder)
        inputs, positions = self.attention_inputs(
            min(pattern_length, self.num_layers),
            token_positions,
            cache,
            batch_axes=x.ndim - 2,
            contiguous_positions=contiguous_positions,
        )
        group_caches: Any = (NO_CACHE,) * pattern_length if cache is None else cache.layers
        remainder_caches: Any = (NO_CACHE,) * remainder if cache is None else cache.tail
        unrolled_runtime = replace(self.runtime, scan=False)  # layers that no loop keeps apart
        x = sow_and_perturb(self, "stack_input", x)

        def run_group(layers: LayerGroup, x: Array, index: Array | None, caches: Any) -> Any:
            """Apply a `LayerGroup` to x and its caches."""
            self_caches, cross_caches = zip(*caches, strict=True)
            scanned = index, cross_caches
            (x, self_caches), new_cross_caches = layers(
                (x, self_caches), inputs[: len(self_caches)], encoder_output, cross_inputs, scanned
            )
            return x, tuple(
                map(
                    LayerCache,
                    self_caches,
                    cross_caches if encoder_output is None else new_cross_caches,
                )
            )

        if repeats:
            group_runtime = self.runtime if repeats > 1 else unrolled_runtime
            layers = nn.scan(
                LayerGroup,
                variable_axes=dict.fromkeys(SCANNED_COLLECTIONS, 0),
                metadata_params={nn.PARTITION_NAME: "layers"},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),  # caches go round
                length=repeats,
                unroll=1 if self.runtime.scan else repeats,
                check_constancy_invariants=self.is_initializing(),  # it traces again
            )(self.config, pattern_length, self.causal, group_runtime, name="layers")
            x, group_caches = run_group(layers, x, jnp.arange(repeats), group_caches)
        if remainder:
            remainder_group = LayerGroup(
                self.config, remainder, self.causal, unrolled_runtime, name="tail"
            )
            x, remainder_caches = run_group(remainder_group, x, None, remainder_caches)
        if self.config.final_norm:
            x = Norm(self.config.norm, self.runtime, name="final_norm")(x)
        x = sow_and_perturb(self, "stack_output", x)
        if cache is not None:
            cache = cache._replace(layers=group_caches, tail=remainder_caches, positions=positions)
        return x, cache

    def check_depth(self, repeats: int, rest: int) -> None:
        """Refuse parameters of another number of layers, of which JAX would take some."""
        params = self.variables.get("params", {})
        layers, tail = params.get("layers", {}), params.get("tail", {})
        deep = max((x.shape[0] for x in jax.tree.leaves(layers)), default=repeats)
        period = self.config.pattern_length if repeats else 0
        if (deep, len(layers), len(tail)) != (repeats, period, rest):
            raise ValueError(
                f"The parameters of the {self.name} are {deep * len(layers) + len(tail)} layers in "
                f"a pattern of {len(layers) or len(tail)}, the configuration's {self.num_layers} "
                f"in one of {period or rest}. Were they made for another configuration?"
            )

    def attention_inputs(
        self,
        count: int,
        token_positions: TokenPositions,
        cache: Cache | None,
        *,
        batch_axes: int,
        contiguous_positions: bool,
    ) -> tuple[tuple[AttentionInputs, ...], tuple[Int[Array, "*batch S"], ...]]:
        """Return the `AttentionInputs` of each layer of the pattern, and new cache positions.

        Equal choices share their arrays. With a cache, what has no place (padding) stands in
        segment 0.
        """
        layer_configs = [self.config.layer(i) for i in range(count)]
        attentions = [self.config.for_layer(i).attention_kind for i in range(count)]
        gathered_positions = g.all_gather_positions(token_positions, self.runtime.mesh_axes.context)
        key_positions = {  # around a ring each device tells of its own
            layer_config.window: token_positions
            if self.uses_lazy_masks(layer_config.window, token_positions, token_positions)
            else gathered_positions
            for layer_config in layer_configs
        }
        slots: dict[c.Window, Array] = {}
        positions: tuple[Array, ...] = ()
        valid = jnp.asarray(token_positions.segments != 0)
        segments_and_valid = (token_positions.segments, None) if cache is None else (None, valid)
        if cache is not None:
            for window, cached_positions in zip(
                distinct_windows(self.config), cache.positions, strict=True
            ):
                key_positions[window], slots[window], new_positions = self.update_key_positions(
                    window, cached_positions, token_positions, valid
                )
                positions = (*positions, new_positions)
            token_positions = TokenPositions(token_positions.positions)
        is_self_contained = cache is None or self.runtime.cache_is_empty
        contiguous_positions = (
            contiguous_positions and is_self_contained and self.runtime.mesh_axes.context is None
        )
        triples = {
            (layer_config.positions, layer_config.window, attention.num_heads)
            for layer_config, attention in zip(layer_configs, attentions, strict=True)
            if not isinstance(attention, RECURRENT_KINDS)
        }
        masks = self.masks(
            {pair[1:] for pair in triples},
            token_positions,
            key_positions,
            batch_axes,
            contiguous_positions,
        )
        length = jnp.max(gathered_positions.positions, axis=-1) + 1
        if cache is not None:
            length = jnp.maximum(cache.min_rope_length, cache.length + jnp.sum(valid, axis=-1))
        rope_choices = {
            (layer_config.positions, attention.rope_head_dim)
            for layer_config, attention in zip(layer_configs, attentions, strict=True)
        }
        rotations: dict[Any, Array] = {
            (rope, width): g.token_rotations(rope, width, token_positions, length)
            for rope, width in sorted(rope_choices, key=repr)
            if isinstance(rope, c.Rope)
        }
        biases = self.biases(triples, token_positions, key_positions)

        def layer_inputs(
            layer_config: c.LayerConfig, attention: c.AttentionKind
        ) -> AttentionInputs:
            positions, window, _ = layer_config
            return AttentionInputs(
                masks.get((window, attention.num_heads)),
                biases.get((positions, window, attention.num_heads)),
                rotations.get((positions, attention.rope_head_dim)),
                token_positions.positions,
                key_positions[window].positions,
                slots.get(window),
                *(segments_and_valid if isinstance(attention, RECURRENT_KINDS) else ()),
            )

        return tuple(map(layer_inputs, layer_configs, attentions)), positions

    @nn.nowrap
    def masks(
        self,
        pairs: set[tuple[c.Window, int]],
        queries: TokenPositions,
        keys: dict[c.Window, TokenPositions],
        batch_axes: int,
        contiguous_positions: bool,
    ) -> dict[tuple[c.Window, int], Bool[Array, "..."] | F.AttentionMask | None]:
        """Return the mask of each (window, num_heads) pair, lazy or as an array."""

        def make_mask(window: c.Window, num_heads: int) -> Any:
            key_positions = keys[window]
            if self.uses_lazy_masks(window, queries, key_positions):
                return g.lazy_mask(
                    window,
                    queries,
                    key_positions,
                    causal=self.causal,
                    contiguous_positions=contiguous_positions,
                )
            mask = g.dense_mask(
                window,
                queries,
                key_positions,
                num_heads=num_heads,
                causal=self.causal,
                batch_axes=batch_axes,
            )
            return self.local_head_mask(mask, window)

        return {pair: make_mask(*pair) for pair in sorted(pairs, key=repr)}

    def uses_lazy_masks(
        self, window: c.Window, queries: TokenPositions, keys: TokenPositions
    ) -> bool:
        """Whether the mask and bias of a window stay lazy."""
        if isinstance(window, c.BlockSparse) or self.has_transformer_xl:
            return False
        return self.runtime.uses_lazy_masks(queries.positions.shape[-1], keys.positions.shape[-1])

    @property
    def has_transformer_xl(self) -> bool:
        """Whether any layer has Transformer-XL positions, whose bias depends on the query."""
        return any(isinstance(p, c.TransformerXL) for p in self.config.attention.positions)

    def local_head_mask(
        self, mask: Bool[Array, "..."] | None, window: c.Window
    ) -> Bool[Array, "..."] | None:
        """Slice a per-head mask to this device's heads."""
        if mask is None or not isinstance(window, c.BlockSparse):
            return mask
        return local_shard(mask, self.runtime.mesh_axes.tensor, axis=-3)

    def update_key_positions(
        self,
        window: c.Window,
        cached_positions: Int[Array, "*batch S"],
        token_positions: TokenPositions,
        valid: Bool[Array, "*batch T"],
    ):
        """Return attended key positions, slots of new tokens, and new cache positions."""
        slots = F.ring_buffer_slots(token_positions.positions, valid, cached_positions.shape[-1])
        new_positions = jnp.where(valid, token_positions.positions, EMPTY_SLOT_POSITION)
        updated_positions = F.write_slots(cached_positions, new_positions, slots)
        if self.runtime.cache_is_empty:
            return TokenPositions(new_positions), slots, updated_positions
        append_new = (
            is_ring_buffer(window, cached_positions.shape[-1]) and new_positions.shape[-1] > 1
        )
        attended_positions = (
            jnp.concatenate([cached_positions, new_positions], axis=-1)
            if append_new
            else updated_positions
        )
        return TokenPositions(attended_positions), slots, updated_positions

    @nn.nowrap
    def biases(
        self,
        triples: set[tuple[c.Positions | None, c.Window, int]],
        queries: TokenPositions,
        keys: dict[c.Window, TokenPositions],
    ) -> dict[
        tuple[c.Positions | None, c.Window, int], Float[Array, "*batch N T S"] | F.AttentionBias
    ]:
        """Return the bias of each (positions, window, num_heads) triple, lazy or as an array."""
        modules = dict[tuple[c.ScoreBias, int], ScoreBiasModule]()
        biases: dict[tuple[c.Positions | None, c.Window, int], Any] = {}
        for positions, window, num_heads in sorted(triples, key=repr):
            if (
                not isinstance(positions, c.ScoreBias)
                or per_layer_score_bias(positions, num_heads) is not None
            ):
                continue
            if (positions, num_heads) not in modules:
                name = (
                    "relative_bias" if positions.shared_across_layers else None
                )  # others have no parameters
                module = ScoreBiasModule(positions, num_heads, self.runtime, self.causal, name=name)
                modules[positions, num_heads] = module
            bias = modules[positions, num_heads](queries.positions, keys[window].positions)
            is_lazy = self.uses_lazy_masks(window, queries, keys[window])
            biases[positions, window, num_heads] = bias if is_lazy else bias.materialize()
        return biases
