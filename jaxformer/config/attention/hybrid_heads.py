"""`HybridHeads`: several attention kinds side by side in one layer."""

from dataclasses import dataclass
from typing import Any

from jaxformer.checks import require
from jaxformer.config.attention.decay import Decay
from jaxformer.config.attention.defaults import SideBySide
from jaxformer.config.attention.differential import Differential
from jaxformer.config.attention.latent import Latent
from jaxformer.config.attention.linear_attention import LinearAttention
from jaxformer.config.attention.mixer import Mixer
from jaxformer.config.attention.multi_head import MultiHead
from jaxformer.config.attention.rg_lru import RGLRU
from jaxformer.config.attention.rwkv import ChannelMixing, TimeMixing
from jaxformer.config.attention.selective_scan import SelectiveScan
from jaxformer.config.attention.shared_kv import SharedKV
from jaxformer.config.attention.short_convolution import ShortConvolution

HeadKind = (
    MultiHead
    | SharedKV
    | Differential
    | Latent
    | Decay
    | LinearAttention
    | SelectiveScan
    | RGLRU
    | TimeMixing
    | ChannelMixing
    | ShortConvolution
    | Mixer
)


@dataclass(frozen=True, kw_only=True)
class HybridHeads(SideBySide):
    """Several attention kinds side by side: all read the same vectors, their outputs are summed.

        y = sum over i of kinds[i](x)

    At most one kind has a cache slot per token, such as softmax attention; the states of the
    others have a constant size. This kind also has what a layer has once, such as its window.

    Attributes:
        kinds: The attention kinds, two or more.

    References:
        Dong et al., Hymba: A Hybrid-head Architecture for Small Language Models, 2024.
        arXiv:2411.13676, section 2
        Zuo et al., Falcon-H1: A Family of Hybrid-Head Language Models, 2025. arXiv:2507.22448
    """

    kinds: tuple[HeadKind, ...]

    def __post_init__(self):
        super().__post_init__()
        names = ", ".join(type(kind).__name__ for kind in self.kinds)
        require(len(self.kinds) > 1, f"HybridHeads.kinds must be two or more; got {names}.")
        require(
            not any(kind.cross_layer_kv or kind.value_residual for kind in self.kinds),
            "HybridHeads.kinds need keys and values of their own; got cross_layer_kv or "
            "value_residual.",
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
    def main(self) -> Any:
        """The kind that has a cache slot per token, or else the first."""
        return next(iter(self._kinds_with_slots), self.kinds[0])

    @property
    def parts(self) -> tuple[HeadKind, ...]:
        """The attention kinds."""
        return self.kinds
