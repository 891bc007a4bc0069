"""`Layer`: the options of one layer; and the layers of a stack whose options are cycles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from jaxformer.checks import Checked, require
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.attention.hybrid_heads import HeadKind, HybridHeads
from jaxformer.config.attention.latent import Latent
from jaxformer.config.attention.layer_sizes import CacheShape
from jaxformer.config.attention.no_attention import NoAttention
from jaxformer.config.feed_forward import FeedForward
from jaxformer.config.ngram_embedding import NgramEmbedding
from jaxformer.config.positions import (
    Positions,
    Rope,
    ScoreBias,
    TransformerXL,
    Window,
    as_rope,
    as_transformer_xl,
)
from jaxformer.config.tiny import shrink

AttentionKind = HeadKind | HybridHeads | NoAttention
Attention = AttentionKind | tuple[AttentionKind, ...]  # the same in all layers, or a cycle
NormPlacement = Literal["pre", "post", "sandwich", "res_post"]  # of a whole model
LayerNormPlacement = Literal[NormPlacement, "pre_feed_forward"]


@dataclass(frozen=True, kw_only=True)
class Layer(Checked):
    """Options of one layer.

    Attributes:
        attention: Attention kind, with one position option and one window if it has these.
        feed_forward: Feed-forward network.
        norm_placement: Position of the norms, as in `TransformerConfig`.
        ngram_embedding: Embeddings of hashed n-grams; None has none.
    """

    attention: AttentionKind
    feed_forward: FeedForward
    norm_placement: LayerNormPlacement = "pre"
    ngram_embedding: NgramEmbedding | None = None

    def __post_init__(self):
        super().__post_init__()
        main = self.attention.main
        counts = len(main.positions), len(main.windows)
        require(
            counts == (1, 1),
            "The attention of a Layer needs one position option and one window; got "
            f"{counts[0]} and {counts[1]}.",
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: programs ask for all layers of a model at each call."""
        options = self.attention, self.feed_forward, self.norm_placement, self.ngram_embedding
        return hash(options)

    @property
    def positions(self) -> Positions | None:
        """The position option."""
        return self.attention.main.positions[0]

    @property
    def window(self) -> Window:
        """The attention window."""
        return self.attention.main.windows[0]

    def empty_cache(self, shape: CacheShape, stream_width: int) -> Any:
        """Return the layer's empty cache: of attention, or of attention and n-grams."""
        cache = self.attention.empty_layer_cache(shape)
        if self.ngram_embedding is None:
            return cache
        return cache, self.ngram_embedding.empty_cache(stream_width, shape)

    @property
    def rope(self) -> Rope | None:
        """The positions, if they are RoPE."""
        return as_rope(self.positions)

    @property
    def score_bias(self) -> ScoreBias | None:
        """The positions, if they are a score bias."""
        return self.positions if isinstance(self.positions, ScoreBias) else None

    @property
    def per_layer_score_bias(self) -> ScoreBias | None:
        """The score bias, if it has parameters and each layer its own."""
        option = self.score_bias
        if option is None or option.shared_across_layers:
            return None
        return option if option.parameters(self.attention.main.num_heads) else None

    @property
    def transformer_xl(self) -> TransformerXL | None:
        """The positions, if they are a `TransformerXL`."""
        return as_transformer_xl(self.positions)

    def tiny(self) -> Layer:
        """Return the layer at test size."""
        return shrink(self)


def as_cycle(x: Any) -> tuple[Any, ...]:
    """Return the entries of a cycle over the layers; anything but a tuple is one entry."""
    return x if isinstance(x, tuple) else (x,)


def cycle_layers(
    num_layers: int,
    attention: Attention,
    feed_forward: FeedForward | tuple[FeedForward, ...],
    norm_placement: LayerNormPlacement | tuple[LayerNormPlacement, ...],
    ngram_embedding: NgramEmbedding | None | tuple[NgramEmbedding | None, ...] = None,
) -> tuple[Layer, ...]:
    """Return the layers of a stack whose options are cycles over the layers.

    Args:
        num_layers: Number of layers.
        attention: Attention kinds; their positions and windows are cycles over all layers too.
        feed_forward: Feed-forward networks.
        norm_placement: Positions of the norms.
        ngram_embedding: Embeddings of hashed n-grams.

    Returns:
        The layers; equal layers are one object.
    """
    kinds = tuple(map(_kinds_by_layer, as_cycle(attention)))
    others = networks, placements, ngrams = tuple(
        map(as_cycle, (feed_forward, norm_placement, ngram_embedding))
    )
    layers, equal = list[Layer](), dict[Layer, Layer]()
    for i in range(min(num_layers, math.lcm(*map(len, (kinds, *others, *kinds))))):
        cycle = kinds[i % len(kinds)]
        layer = Layer(
            attention=cycle[i % len(cycle)],
            feed_forward=networks[i % len(networks)],
            norm_placement=placements[i % len(placements)],
            ngram_embedding=ngrams[i % len(ngrams)],
        )
        layers.append(equal.setdefault(layer, layer))
    return tuple(layers[i % len(layers)] for i in range(num_layers))


@lru_cache(maxsize=1024)
def _kinds_by_layer(kind: Any) -> tuple[Any, ...]:
    """The cycle of a kind: its entries have one position option and one window."""
    if isinstance(kind, HybridHeads):
        parts = tuple(map(_kinds_by_layer, kind.kinds))
        period = math.lcm(*map(len, parts))
        rows = (tuple(x[i % len(x)] for x in parts) for i in range(period))
        return tuple(replace(kind, kinds=row) for row in rows)
    positions, windows = kind.positions, kind.windows
    if len(positions) == len(windows) == 1:
        return (kind,)
    return tuple(
        replace(
            kind, positions=(positions[i % len(positions)],), windows=(windows[i % len(windows)],)
        )
        for i in range(math.lcm(len(positions), len(windows)))
    )


def cycles_of(layers: tuple[Layer, ...]) -> dict[str, Any]:
    """Return the shortest cycles from which `cycle_layers` makes these layers.

    Args:
        layers: The layers of a stack.

    Returns:
        The fields `attention`, `feed_forward`, `norm_placement` and `ngram_embedding` of a
        `TransformerConfig`. Kinds that differ in positions and windows alone are one kind with
        cycles of these.
    """
    kinds: list[Any] = [layer.attention for layer in layers]
    cycles = {"attention": kinds}
    if all(isinstance(kind, GroupedHeads | Latent) for kind in kinds):
        bare = {replace(kind, positions=(None,), windows=(None,)) for kind in kinds}
        if len(bare) == 1:
            positions, windows = zip(*((x.positions[0], x.windows[0]) for x in kinds), strict=True)
            one = {"positions": minimal_cycle(positions), "windows": minimal_cycle(windows)}
            cycles["attention"] = [replace(kinds[0], **one)]
    for name in ("feed_forward", "norm_placement", "ngram_embedding"):
        cycles[name] = [getattr(layer, name) for layer in layers]
    shortest = {name: minimal_cycle(cycle) for name, cycle in cycles.items()}
    return {
        name: cycle[0] if len(cycle) == 1 and name != "feed_forward" else cycle
        for name, cycle in shortest.items()
    }


def minimal_cycle(cycle: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest cycle that gives the same entries."""
    lengths = range(1, len(cycle))
    is_same = (n for n in lengths if all(x == cycle[i % n] for i, x in enumerate(cycle)))
    return tuple(cycle[: next(is_same, len(cycle))])
