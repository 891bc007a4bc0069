"""`MultiHead`: multi-head, grouped-query and multi-query attention."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.checks import check_fields, require_positive
from jaxformer.config.attention.checks import check_heads, check_layer_patterns
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape, KVCache
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

Projection = Literal["query", "key", "value", "out"]


@dataclass(frozen=True, kw_only=True)
class MultiHead:
    """Dot-product attention: multi-head, grouped-query or multi-query by `num_kv_heads`.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head.
        positions: Position options, cycled over the layers.
        windows: Attention windows, cycled over the layers: each query attends to the last W keys,
            its own included (in an encoder also to W - 1 keys after it), or by a `BlockSparse`
            pattern, or to all keys (None).
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Cap c of the scores: s becomes c * tanh(s / c).
        clip_qkv: Queries, keys and values are clipped to [-clip_qkv, clip_qkv].
        qk_norm: Norm of queries and keys.
        biases: Projections with a bias.
        normalizer: Function from scores to attention weights.
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
        check_fields(self)
        require_positive(self, "clip_qkv")
        check_heads(self)
        check_layer_patterns(self)

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
        heads, kv = self.heads_width, 2 * self.num_kv_heads * self.head_dim
        projections = query_length * 2 * model_dim * heads + key_length * model_dim * kv
        return 2 * (projections + 2 * query_length * num_visible_keys * heads)

    def activation_widths(
        self, model_dim: int, positions: Positions | None, tensor: int
    ) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        heads = self.heads_width / tensor
        kv = self.num_kv_heads * self.head_dim / min(tensor, self.num_kv_heads)
        return ActivationWidths(heads + 2 * kv, 2 * heads + kv, heads, 2 * kv)

    def empty_layer_cache(self, positions: Positions | None, shape: CacheShape) -> KVCache:
        """Return the empty cache of one layer."""
        return KVCache(*(shape.zeros(self.num_kv_heads, self.head_dim) for _ in range(2)))

    def tiny(self) -> "MultiHead":
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
