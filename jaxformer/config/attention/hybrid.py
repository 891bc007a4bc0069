"""`Hybrid`: a pattern of attention kinds over the layers; and the union of all kinds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.checks import check_fields, require_nonempty
from jaxformer.config.attention.hybrid_heads import HeadKind, HybridHeads
from jaxformer.config.attention.no_attention import NoAttention
from jaxformer.config.positions import Positions, Window
from jaxformer.config.tiny import shorten_pattern

AttentionKind = HeadKind | HybridHeads | NoAttention


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """A pattern of attention kinds over the layers, such as recurrent layers with some attention.

    Attributes:
        kinds: Attention kinds, cycled over the layers. The positions and windows of each kind are
            also cycled over all layers. `NoAttention` is a layer with a feed-forward network only.

    References:
        Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model, 2024. arXiv:2403.19887,
        section 2
    """

    kinds: tuple[AttentionKind, ...]

    def __post_init__(self):
        check_fields(self)
        require_nonempty(self, "kinds")

    @property
    def positions(self) -> tuple[Positions | None, ...]:
        """Position option of each layer, over one whole pattern."""
        return self._interleave_patterns([kind.positions for kind in self.kinds])

    @property
    def windows(self) -> tuple[Window, ...]:
        """Attention window of each layer, over one whole pattern."""
        return self._interleave_patterns([kind.windows for kind in self.kinds])

    def _interleave_patterns(self, patterns: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        count = math.lcm(len(patterns), *map(len, patterns))
        layer_patterns = (patterns[i % len(patterns)] for i in range(count))
        return tuple(pattern[i % len(pattern)] for i, pattern in enumerate(layer_patterns))

    @property
    def heads_width(self) -> int:
        """Largest total width of a layer's heads."""
        return max(kind.heads_width for kind in self.kinds)

    def tiny(self) -> "Hybrid":
        """Return the pattern with kinds at test size."""
        return replace(self, kinds=tuple(kind.tiny() for kind in shorten_pattern(self.kinds)))


Attention = AttentionKind | Hybrid
