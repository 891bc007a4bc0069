"""Stack of layers: `nn.scan` over repetitions of the layer pattern."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention import RECURRENT
from jaxformer.functional.collectives import SUM
from jaxformer.layers import guide as g
from jaxformer.layers.block import NO_GUIDE, Block
from jaxformer.layers.cache import NOWHERE, Cache, KVCache, LayerCache, turns, windows
from jaxformer.layers.guide import Guide, Places
from jaxformer.layers.mode import Mode
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import my_share
from jaxformer.layers.score_bias import ScoreBias, of_each_layer
from jaxformer.layers.watch import NUDGED, WATCHED, watch

# What stands between a kernel's shares and its product: to keep that would be to keep the kernel.
ON_THE_WAY = ("all_gather", "pvary", "reshape", "transpose", "squeeze", "broadcast_in_dim")


def all_but_gathered(primitive: Any, *inputs: Any, **options: Any) -> bool:
    """Remat policy: save everything except gathered kernels and complex arrays."""
    made = jnp.issubdtype(options.get("new_dtype", jnp.float32), jnp.complexfloating)
    if primitive.name == "complex" or made or any(jnp.iscomplexobj(x) for x in inputs):
        return False
    return primitive.name not in ON_THE_WAY


POLICIES = {
    "none": all_but_gathered,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SUM, F.BY_BLOCKS, F.BY_KERNEL),
    ),
    "full": jax.checkpoint_policies.save_only_these_names(F.BY_KERNEL),
}
NOTHING: Any = LayerCache(None)
STACKED = ("params", "intermediates", "router", WATCHED, NUDGED)  # a value for each layer


class Period(nn.Module):
    """One repetition of the layer pattern: `num_layers` blocks."""

    config: c.TransformerConfig
    count: int
    causal: bool
    mode: Mode

    @nn.compact
    def __call__(
        self,
        carried: tuple[Float[Array, "*batch T D"], tuple[Any, ...]],
        guides: tuple[Guide, ...],
        memory: Float[Array, "*batch S D"] | None,
        memory_guide: Guide,
        own: tuple[Int[Array, ""] | None, tuple[KVCache | None, ...]],
    ) -> tuple[tuple[Float[Array, "*batch T D"], tuple[Any, ...]], tuple[KVCache | None, ...]]:
        """Return x and the self-attention caches as carry, and new cross-attention caches.

        And what they read of a new `memory`. `own` is which repetition of the pattern it is, and
        what its layers have read of an earlier memory.
        """
        block, policy = Block, POLICIES[self.mode.remat]
        if self.mode.remat != "none" or self.mode.axes.fsdp is not None:
            block = nn.remat(Block, policy=policy, prevent_cse=not self.mode.scan)
        (x, caches), (index, sources) = carried, own
        kept, read = [], []
        for i in range(self.count):
            choice, guide = self.config.layer(i), guides[i]._replace(layer=index)
            layer = block(self.config.at(i), choice, self.mode, self.causal, name=f"layer_{i}")
            cache = None if caches[i] is None else LayerCache(caches[i], sources[i])
            x, cache = layer(x, guide, memory, memory_guide, cache)
            kept.append(None if cache is None else cache.own)
            read.append(None if cache is None or memory is None else cache.source)
        return (x, tuple(kept)), tuple(read)


class Stack(nn.Module):
    """`num_layers` blocks and the final norm.

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
        cache: Cache | None = None,
        *,
        contiguous: bool = False,
    ) -> tuple[Float[Array, "*batch T D"], Cache | None]:
        """Return the last hidden vectors and the updated cache."""
        period = self.config.period
        repeats, rest = divmod(self.num_layers, period)
        if not self.is_mutable_collection("params"):
            self.check_depth(repeats, rest)
        guides, positions = self.guides(
            min(period, self.num_layers),
            places,
            cache,
            batch_axes=x.ndim - 2,
            contiguous=contiguous,
        )
        stacked: Any = (NOTHING,) * period if cache is None else cache.layers
        tail: Any = (NOTHING,) * rest if cache is None else cache.tail
        loose = replace(self.mode, scan=False)  # layers that no loop keeps apart
        x = watch(self, "embedded", x)

        def through(layers: Period, x: Array, index: Array | None, caches: Any) -> Any:
            """All of these layers, whose caches are at `index` of the arrays of several."""
            own, sources = zip(*caches, strict=True)
            kept = index, sources
            (x, own), read = layers((x, own), guides[: len(own)], memory, memory_guide, kept)
            return x, tuple(map(LayerCache, own, sources if memory is None else read))

        if repeats:
            mode = self.mode if repeats > 1 else loose
            layers = nn.scan(
                Period,
                variable_axes=dict.fromkeys(STACKED, 0),
                metadata_params={nn.PARTITION_NAME: "layers"},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),  # caches go round
                length=repeats,
                unroll=1 if self.mode.scan else repeats,
                check_constancy_invariants=self.is_initializing(),  # it traces again
            )(self.config, period, self.causal, mode, name="layers")
            x, stacked = through(layers, x, jnp.arange(repeats), stacked)
        if rest:
            last = Period(self.config, rest, self.causal, loose, name="tail")
            x, tail = through(last, x, None, tail)
        if self.config.final_norm:
            x = Norm(self.config.norm, self.mode, name="final_norm")(x)
        x = watch(self, "normed", x)
        if cache is not None:
            cache = cache._replace(layers=stacked, tail=tail, positions=positions)
        return x, cache

    def check_depth(self, repeats: int, rest: int) -> None:
        """Refuse parameters of another number of layers, of which JAX would take some."""
        params = self.variables.get("params", {})
        layers, tail = params.get("layers", {}), params.get("tail", {})
        deep = max((x.shape[0] for x in jax.tree.leaves(layers)), default=repeats)
        period = self.config.period if repeats else 0
        if (deep, len(layers), len(tail)) != (repeats, period, rest):
            raise ValueError(
                f"The parameters of the {self.name} are {deep * len(layers) + len(tail)} layers in "
                f"a pattern of {len(layers) or len(tail)}, the configuration's {self.num_layers} "
                f"in one of {period or rest}. Were they made for another configuration?"
            )

    def guides(
        self, count: int, places: Places, cache: Cache | None, *, batch_axes: int, contiguous: bool
    ) -> tuple[tuple[Guide, ...], tuple[Int[Array, "*batch S"], ...]]:
        """One guide per layer of the pattern, and the positions that the cache then holds.

        Equal choices share their arrays. With a cache, what has no place (padding) stands in
        segment 0.
        """
        choices = [self.config.layer(i) for i in range(count)]
        kinds = [self.config.at(i).kind for i in range(count)]
        everyone = g.gathered(places, self.mode.axes.context)
        keys = {  # around a ring each device tells of its own
            choice.window: places if self.by_rule(choice.window, places, places) else everyone
            for choice in choices
        }
        slots: dict[c.Window, Array] = {}
        positions: tuple[Array, ...] = ()
        real = jnp.asarray(places.segments != 0)
        own = (places.segments, None) if cache is None else (None, real)
        if cache is not None:
            for window, kept in zip(windows(self.config), cache.positions, strict=True):
                keys[window], slots[window], written = self.keys(window, kept, places, real)
                positions = (*positions, written)
            places = Places(places.positions)
        alone = cache is None or self.mode.fresh
        contiguous = contiguous and alone and self.mode.axes.context is None
        scored = {
            (choice.positions, choice.window, kind.num_heads)
            for choice, kind in zip(choices, kinds, strict=True)
            if not isinstance(kind, RECURRENT)
        }
        masks = self.masks({pair[1:] for pair in scored}, places, keys, batch_axes, contiguous)
        length = jnp.max(everyone.positions, axis=-1) + 1
        if cache is not None:
            length = jnp.maximum(cache.reach, cache.length + jnp.sum(real, axis=-1))
        turning = {
            (choice.positions, kind.rotary_dim) for choice, kind in zip(choices, kinds, strict=True)
        }
        rotations: dict[Any, Array] = {
            (rope, width): g.rotations(rope, width, places, length)
            for rope, width in sorted(turning, key=repr)
            if isinstance(rope, c.Rope)
        }
        biases = self.biases(scored, places, keys)

        def of_layer(choice: c.LayerChoice, kind: c.Kind) -> Guide:
            at, window, _ = choice
            return Guide(
                masks.get((window, kind.num_heads)),
                biases.get((at, window, kind.num_heads)),
                rotations.get((at, kind.rotary_dim)),
                places.positions,
                keys[window].positions,
                slots.get(window),
                *(own if isinstance(kind, RECURRENT) else ()),
            )

        return tuple(map(of_layer, choices, kinds)), positions

    @nn.nowrap
    def masks(
        self,
        wanted: set[tuple[c.Window, int]],
        queries: Places,
        keys: dict[c.Window, Places],
        batch_axes: int,
        contiguous: bool,
    ) -> dict[tuple[c.Window, int], Bool[Array, "..."] | F.AttentionMask | None]:
        """Return the mask of each (window, num_heads) pair, lazy or as an array."""

        def one(window: c.Window, num_heads: int) -> Any:
            others = keys[window]
            if self.by_rule(window, queries, others):
                return g.attention_mask(
                    window, queries, others, causal=self.causal, contiguous=contiguous
                )
            mask = g.mask(
                window,
                queries,
                others,
                num_heads=num_heads,
                causal=self.causal,
                batch_axes=batch_axes,
            )
            return self.of_my_heads(mask, window)

        return {pair: one(*pair) for pair in sorted(wanted, key=repr)}

    def by_rule(self, window: c.Window, queries: Places, keys: Places) -> bool:
        """Whether the mask and bias of a window stay lazy."""
        if isinstance(window, c.BlockSparse) or self.has_relative_terms:
            return False
        return self.mode.by_rule(queries.positions.shape[-1], keys.positions.shape[-1])

    @property
    def has_relative_terms(self) -> bool:
        """Whether any layer has Transformer-XL positions, whose bias depends on the query."""
        return any(isinstance(p, c.TransformerXL) for p in self.config.attention.positions)

    def of_my_heads(
        self, mask: Bool[Array, "..."] | None, window: c.Window
    ) -> Bool[Array, "..."] | None:
        """Slice a per-head mask to this device's heads."""
        if mask is None or not isinstance(window, c.BlockSparse):
            return mask
        return my_share(mask, self.mode.axes.tensor, axis=-3)

    def keys(
        self,
        window: c.Window,
        kept: Int[Array, "*batch S"],
        places: Places,
        real: Bool[Array, "*batch T"],
    ):
        """Return attended key positions, slots of new tokens, and new cache positions."""
        slots = F.ring_slots(places.positions, real, kept.shape[-1])
        new = jnp.where(real, places.positions, NOWHERE)
        written = F.write_slots(kept, new, slots)
        if self.mode.fresh:
            return Places(new), slots, written
        beside = turns(window, kept.shape[-1]) and new.shape[-1] > 1
        seen = jnp.concatenate([kept, new], axis=-1) if beside else written
        return Places(seen), slots, written

    @nn.nowrap
    def biases(
        self,
        wanted: set[tuple[c.Positions | None, c.Window, int]],
        queries: Places,
        keys: dict[c.Window, Places],
    ) -> dict[tuple[c.Positions | None, c.Window, int], Float[Array, "*batch N T S"] | F.ScoreBias]:
        """Return the bias of each (positions, window, num_heads) triple, lazy or as an array."""
        modules = dict[tuple[c.ScoreBias, int], ScoreBias]()
        found: dict[tuple[c.Positions | None, c.Window, int], Any] = {}
        for kind, window, heads in sorted(wanted, key=repr):
            if not isinstance(kind, c.ScoreBias) or of_each_layer(kind, heads) is not None:
                continue
            if (kind, heads) not in modules:
                name = "relative_bias" if kind.shared else None  # others have no parameters
                module = ScoreBias(kind, heads, self.mode, self.causal, name=name)
                modules[kind, heads] = module
            bias = modules[kind, heads](queries.positions, keys[window].positions)
            lazy = self.by_rule(window, queries, keys[window])
            found[kind, window, heads] = bias if lazy else bias.materialize()
        return found
