"""`SharedKV`: attention with one projection for key and value."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.checks import check_fields
from jaxformer.config.attention.checks import (
    check_heads,
    check_layer_patterns,
    check_position_types,
)
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    KVCache,
    SharedCache,
)
from jaxformer.config.norms import QKNorm
from jaxformer.config.positions import Positions, Rope, Window
from jaxformer.config.tiny import (
    TINY_HEAD_DIM,
    rescale_with_width,
    shorten_pattern,
    tiny_num_heads,
    tiny_positions,
    tiny_window,
)

ROPE_ON_QKVO = Rope(targets=("q", "k", "v", "o"))


@dataclass(frozen=True, kw_only=True)
class SharedKV:
    """Attention with one projection for key and value, cached once per token.

        o[i] = R[i]^-1 sum over j of a[i, j] R[j] c[j] = sum over j of a[i, j] R[j - i] c[j]

    with a[i, j] from (R[i] q[i]) @ (R[j] c[j]). RoPE rotates the key c, which is also the value;
    the output is rotated back by the query's angle, so it depends on distances alone.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of the shared vector; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: Position options, cycled over the layers. If a `Rope` rotates only one of key and
            value, the cache holds both.
        windows: As in `MultiHead`.
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Cap c of the scores: s becomes c * tanh(s / c).
        qk_norm: Norm of queries and of the shared vectors, hence also of the values.
        biases: Projections with a bias.

    References:
        Su, Transformer upgrade path 19: rotary positions of the second kind, 2025.
        https://spaces.ac.cn/archives/10862
    """

    num_heads: int
    num_kv_heads: int = 1
    head_dim: int
    positions: tuple[Positions | None, ...] = (ROPE_ON_QKVO,)
    windows: tuple[Window, ...] = (None,)
    scale: float | None = None
    logit_softcap: float | None = None
    qk_norm: QKNorm | None = None
    biases: tuple[Literal["query", "key_value", "out"], ...] = ()

    def __post_init__(self):
        check_fields(self)
        check_heads(self)
        check_layer_patterns(self)
        check_position_types(self)

    has_scores = True

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.head_dim

    @property
    def key_dim(self) -> int:
        """Features of a key."""
        return self.head_dim

    @property
    def heads_width(self) -> int:
        """Total width of all heads, the input of the output projection."""
        return self.num_heads * self.head_dim

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections."""
        heads, kv = self.heads_width, self.num_kv_heads * self.head_dim
        projections = query_length * 2 * model_dim * heads + key_length * model_dim * kv
        return 2 * (projections + 2 * query_length * num_visible_keys * heads)

    def activation_widths(
        self, model_dim: int, positions: Positions | None, tensor: int
    ) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        heads = self.heads_width / tensor
        kv = self.num_kv_heads * self.head_dim / min(tensor, self.num_kv_heads)
        return ActivationWidths(
            heads + kv, 2 * heads + kv, heads, self.num_cached_arrays(positions) * kv
        )

    @staticmethod
    def num_cached_arrays(positions: Positions | None) -> Literal[1, 2]:
        """Arrays cached per token: 2 if RoPE rotates only one of key and value, else 1."""
        targets = positions.targets if isinstance(positions, Rope) else ()
        return 1 if ("k" in targets) == ("v" in targets) else 2

    def empty_layer_cache(
        self, positions: Positions | None, shape: CacheShape
    ) -> KVCache | SharedCache:
        """Return the empty cache of one layer."""
        count = self.num_cached_arrays(positions)
        arrays = (shape.zeros(self.num_kv_heads, self.head_dim) for _ in range(count))
        return KVCache(*arrays) if count == 2 else SharedCache(*arrays)

    def tiny(self) -> "SharedKV":
        """Return the option at test size, with as many groups of heads."""
        num_heads = tiny_num_heads(self.num_heads)
        kv_heads = 1 if self.num_kv_heads == 1 else 2
        return replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_heads if self.num_kv_heads == self.num_heads else kv_heads,
            head_dim=TINY_HEAD_DIM,
            positions=tuple(map(tiny_positions, shorten_pattern(self.positions))),
            scale=rescale_with_width(self.scale, self.head_dim, TINY_HEAD_DIM),
            windows=tuple(map(tiny_window, shorten_pattern(self.windows))),
        )
