"""Attention as a choice: heads, positions, windows, and what keeps the scores in bounds."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.axes import QKNorm
from jaxformer.config.checks import require, require_pattern, require_positive
from jaxformer.config.positions import Positions, Rope, T5Bias, Window
from jaxformer.config.rope_scaling import LongRope

Projection = Literal["query", "key", "value", "out"]


@dataclass(frozen=True, kw_only=True)
class MultiHead:
    """Dot-product attention: multi-head, grouped-query or multi-query by `num_kv_heads`.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: How positions enter the scores, cycled over the layers.
        windows: How far a query sees, cycled over the layers: W keys, itself included (an
            encoder's as many to the other side), or a pattern of blocks, or everything (None).
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Scores s become c * tanh(s / c).
        clip_qkv: Queries, keys and values are clipped to this size.
        qk_norm: Norm of queries and keys.
        biases: Which projections add a bias.
        normalizer: What turns scores into weights.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: tuple[Positions | None, ...] = (Rope(),)
    windows: tuple[Window, ...] = (None,)
    scale: float | None = None
    logit_softcap: float | None = None
    clip_qkv: float | None = None
    qk_norm: QKNorm | None = None
    biases: tuple[Projection, ...] = ()
    normalizer: Literal["softmax", "relu"] = "softmax"

    def __post_init__(self):
        require_positive(self, "num_heads", "num_kv_heads", "head_dim")
        require_positive(self, "logit_softcap", "clip_qkv")
        require_pattern(self, "positions", "windows")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads must be a multiple of num_kv_heads; "
            f"got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}.",
        )
        for window in self.windows:
            empty = isinstance(window, int) and window < 1
            require(not empty, f"A window holds at least one key; got {window}.")
        tables = {p for p in self.positions if isinstance(p, T5Bias)}
        require(
            len(tables) < 2,
            f"One T5Bias table serves all layers of a stack; got {len(tables)} different ones.",
        )
        require(
            len(set(self.biases)) == len(self.biases), f"biases names one twice: {self.biases}."
        )
        for rope in self.positions:
            if isinstance(rope, Rope):
                self._check_rope(rope)

    def _check_rope(self, rope: Rope) -> None:
        width = rope.width(self.head_dim)
        require(
            width > 0 and width % 2 == 0,
            "Rotary positions pair up features, so the rotated width must be even and above 0; "
            f"got {width} of head_dim={self.head_dim} (fraction {rope.fraction}).",
        )
        if isinstance(rope.scaling, LongRope):
            counts = len(rope.scaling.short), len(rope.scaling.long)
            require(
                counts == (width // 2, width // 2),
                f"LongRope needs one factor per feature pair, {width // 2} of them; "
                f"got {counts[0]} short and {counts[1]} long.",
            )
