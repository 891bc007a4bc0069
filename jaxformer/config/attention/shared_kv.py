"""`SharedKV`: attention with one projection for key and value, cached once per token."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.checks import Cycle, Distinct, Size, require
from jaxformer.config.attention.checks import check_heads, check_ropes
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.norms import Norm, QKNorm
from jaxformer.config.positions import Rope, ScoreBias, Window, as_rope

ROPE_ON_QKVO = Rope(targets=("q", "k", "v", "o"))


@dataclass(frozen=True, kw_only=True)
class SharedKV(GroupedHeads):
    """Attention with one projection for key and value, cached once per token.

        o[i] = R[i]^-1 sum over j of a[i, j] R[j] c[j] = sum over j of a[i, j] R[j - i] c[j]

    with a[i, j] from (R[i] q[i]) @ (R[j] c[j]). RoPE rotates the key c, which is also the value;
    the output is rotated back by the query's angle, so it depends on distances alone. With a
    `value_norm`, key and value are two norms of the projection, and both are cached (Gemma 4).

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of the shared vector; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: Position options, cycled over the layers. If a `Rope` rotates only one of key and
            value, the cache holds both.
        windows: Attention windows (W keys or None), as in `MultiHead`.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        qk_norm: Norm of queries and of the shared vectors, hence also of the values; before RoPE.
        value_norm: Norm of each head's values, in place of `qk_norm`; None means the keys' norm.
        biases: Projections with a bias.

    References:
        Su, Transformer upgrade path 19: rotary positions of the second kind, 2025.
        https://spaces.ac.cn/archives/10862
    """

    num_heads: Size
    num_kv_heads: Size = 1
    head_dim: Size
    positions: Cycle[Rope | ScoreBias | None] = (ROPE_ON_QKVO,)
    windows: Cycle[Window] = (None,)
    scale: float | None = None
    qk_norm: QKNorm | None = None
    value_norm: Norm | None = None
    biases: Distinct[Literal["query", "key_value", "out"]] = ()

    def __post_init__(self):
        super().__post_init__()
        check_heads(self)
        check_ropes(self)
        require(
            self.qk_norm is None or self.qk_norm.placement == "before_rope",
            "SharedKV normalises before RoPE, so qk_norm.placement must be 'before_rope'; got "
            "'after_rope'.",
        )

    num_kv_projections = 1
    linear_projections = "query", "key_value", "key_value"

    @property
    def num_cached_arrays(self) -> int:
        """Arrays cached per token: 1 if key and value have the same norm and rotation, else 2."""
        rope = as_rope(self.positions[0])
        targets = () if rope is None else rope.targets
        return 1 if self.value_norm is None and ("k" in targets) == ("v" in targets) else 2
