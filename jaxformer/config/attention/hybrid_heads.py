"""`HybridHeads`: several attention kinds side by side in one layer."""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from jaxformer.checks import check_fields, require
from jaxformer.config.attention.decay import Decay
from jaxformer.config.attention.defaults import AttentionDefaults
from jaxformer.config.attention.latent import Latent
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape
from jaxformer.config.attention.linear_attention import LinearAttention
from jaxformer.config.attention.mixer import Mixer
from jaxformer.config.attention.multi_head import MultiHead
from jaxformer.config.attention.shared_kv import SharedKV
from jaxformer.config.attention.short_convolution import ShortConvolution
from jaxformer.config.positions import Positions

HeadKind = MultiHead | SharedKV | Latent | Decay | LinearAttention | ShortConvolution | Mixer


@dataclass(frozen=True, kw_only=True)
class HybridHeads(AttentionDefaults):
    """Several attention kinds side by side: all read the same vectors, their outputs are summed.

        y = sum over i of kinds[i](x)

    At most one of them has a cache slot per token, such as softmax attention; the states of the
    others have a constant size. Positions and windows are those of this one, cycled over the
    layers, and so is what needs one number per layer, such as `num_heads`.

    Attributes:
        kinds: The attention kinds, two or more.

    References:
        Dong et al., Hymba: A Hybrid-head Architecture for Small Language Models, 2024.
        arXiv:2411.13676, section 2
        Zuo et al., Falcon-H1: A Family of Hybrid-Head Language Models, 2025. arXiv:2507.22448
    """

    kinds: tuple[HeadKind, ...]

    def __post_init__(self):
        check_fields(self)
        names = ", ".join(type(kind).__name__ for kind in self.kinds)
        require(len(self.kinds) > 1, f"HybridHeads.kinds must be two or more; got {names}.")
        require(
            not any(kind.cross_layer_kv for kind in self.kinds),
            "HybridHeads.kinds need keys and values of their own; got cross_layer_kv.",
        )
        count = len(self._kinds_with_slots)
        require(
            count < 2,
            "At most one of HybridHeads.kinds may have a cache slot per token; got "
            f"{count} of {names}.",
        )

    @property
    def _kinds_with_slots(self) -> tuple[HeadKind, ...]:
        return tuple(kind for kind in self.kinds if kind.has_scores or kind.windows != (1,))

    @property
    def main(self) -> HeadKind:
        """The kind that has a cache slot per token, or else the first."""
        return next(iter(self._kinds_with_slots), self.kinds[0])

    @property
    def parts(self) -> tuple[Any, ...]:
        """The attention kinds."""
        return self.kinds

    # What has one value per layer is that of `main`.
    has_scores = property(attrgetter("main.has_scores"))
    has_weights = property(attrgetter("main.has_weights"))
    query_scaling = property(attrgetter("main.query_scaling"))
    positions = property(attrgetter("main.positions"))
    windows = property(attrgetter("main.windows"))
    num_heads = property(attrgetter("main.num_heads"))
    rope_head_dim = property(attrgetter("main.rope_head_dim"))

    @property
    def has_decays(self) -> bool:  # type: ignore[override]
        """Whether there is a state that decays."""
        return any(kind.has_decays for kind in self.kinds)

    @property
    def is_recurrent(self) -> bool:  # type: ignore[override]
        """Whether one of the kinds is a causal recurrence over the sequence."""
        return any(kind.is_recurrent for kind in self.kinds)

    @property
    def heads_width(self) -> int:
        """Largest total width of a kind's heads."""
        return max(kind.heads_width for kind in self.kinds)

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections."""
        lengths = query_length, key_length, num_visible_keys
        return sum(kind.attention_flops(model_dim, *lengths) for kind in self.kinds)

    def activation_widths(
        self, model_dim: int, positions: Positions | None, tensor: int
    ) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        widths = (kind.activation_widths(model_dim, positions, tensor) for kind in self.kinds)
        return ActivationWidths(*map(sum, zip(*widths, strict=True)))

    def empty_layer_cache(self, positions: Positions | None, shape: CacheShape) -> tuple[Any, ...]:
        """Return the empty cache of each kind."""
        state = shape._replace(num_slots=1)
        return tuple(
            kind.empty_layer_cache(positions, shape if kind is self.main else state)
            for kind in self.kinds
        )

    def tiny(self) -> "HybridHeads":
        """Return the kinds at test size."""
        return replace(self, kinds=tuple(kind.tiny() for kind in self.kinds))
