"""Stack of layers: `nn.scan` over repetitions of the layer pattern."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.collectives import TENSOR_SUM_REMAT_NAME
from jaxformer.layers.attention.inputs import (
    AttentionInputs,
    LayerInputs,
    ScoreBiasFunction,
    TokenPositions,
    make_layer_inputs,
)
from jaxformer.layers.attention.score_bias import ScoreBiasModule, per_layer_score_bias
from jaxformer.layers.block import NO_INPUTS, Block
from jaxformer.layers.cache import Cache, CacheUpdate, KVCache, LayerCache
from jaxformer.layers.intermediates import INTERMEDIATES, PERTURBATIONS, sow_and_perturb
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig

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
        inputs_and_updates: tuple[tuple[LayerInputs, ...], tuple[CacheUpdate | None, ...]],
        encoder_output: Float[Array, "*batch S D"] | None,
        cross_inputs: AttentionInputs,
        scanned: tuple[Int[Array, ""] | None, tuple[KVCache | None, ...]],
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[KVCache | None, ...]]:
        """Return x and the self-attention caches as carry, and new cross-attention caches.

        `scanned` is the index of this repetition and the cross-attention caches of its layers. The
        new caches hold the keys and values of `encoder_output`, if it is given.
        """
        block, policy = Block, REMAT_POLICIES[self.runtime.remat]
        if self.runtime.remat != "none" or self.runtime.mesh_axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.runtime.scan)
        (x, caches), (index, cached_sources) = carry, scanned
        self_caches, cross_caches = [], []
        for i, (inputs, update) in enumerate(zip(*inputs_and_updates, strict=True)):
            layer = block(
                self.config, self.config.layer(i), self.runtime, self.causal, name=f"layer_{i}"
            )
            cache = None if caches[i] is None else LayerCache(caches[i], cached_sources[i])
            update = None if update is None else replace(update, layer_index=index)
            x, cache = layer(x, inputs, encoder_output, cross_inputs, cache, update)
            self_caches.append(None if cache is None else cache.self_attention)
            cross_caches.append(
                None if cache is None or encoder_output is None else cache.cross_attention
            )
        return (x, tuple(self_caches)), tuple(cross_caches)


class Stack(nn.Module):
    """`num_layers` blocks and the final norm.

    Repetitions of the layer pattern run under `nn.scan`, so that compile time does not grow with
    depth: their parameters are stacked along a leading axis under "layers". The remaining layers
    are under "tail".
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
        inputs, cache_updates, positions = make_layer_inputs(
            self.config,
            self.runtime,
            token_positions,
            cache,
            self.make_score_bias(),
            num_layers=self.num_layers,
            causal=self.causal,
            contiguous_positions=contiguous_positions,
            num_axes=x.ndim + 1,
        )
        group_caches: Any = (NO_CACHE,) * pattern_length if cache is None else cache.layers
        remainder_caches: Any = (NO_CACHE,) * remainder if cache is None else cache.tail
        unrolled_runtime = replace(self.runtime, scan=False)  # for layers outside a loop
        x = sow_and_perturb(self, "stack_input", x)

        def run_group(layers: LayerGroup, x: Array, index: Array | None, caches: Any) -> Any:
            """Apply a `LayerGroup` to x and its caches."""
            self_caches, cross_caches = zip(*caches, strict=True)
            count = len(self_caches)
            (x, self_caches), new_cross_caches = layers(
                (x, self_caches),
                (inputs[:count], cache_updates[:count]),
                encoder_output,
                cross_inputs,
                (index, cross_caches),
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
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),  # caches are carried
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
        """Check the depth of the parameters; `nn.scan` would use only the first of more layers."""
        params = self.variables.get("params", {})
        layers, tail = params.get("layers", {}), params.get("tail", {})
        deep = max((x.shape[0] for x in jax.tree.leaves(layers)), default=repeats)
        period = self.config.pattern_length if repeats else 0
        if (deep, len(layers), len(tail)) != (repeats, period, rest):
            raise ValueError(
                f"Parameters of the {self.name} have {deep * len(layers) + len(tail)} layers in a "
                f"pattern of {len(layers) or len(tail)}, but the configuration has "
                f"{self.num_layers} in a pattern of {period or rest}. Were the parameters made for "
                "another model?"
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
        ) -> F.AttentionBias | None:
            if per_layer_score_bias(option, num_heads) is not None:
                return None
            if (option, num_heads) not in modules:
                # Others have no parameters, and so need no name.
                name = "relative_bias" if option.shared_across_layers else None
                modules[option, num_heads] = ScoreBiasModule(
                    option, num_heads, self.runtime, self.causal, name=name
                )
            return modules[option, num_heads](query_positions, key_positions)

        return score_bias
