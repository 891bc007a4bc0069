"""What `MultiHead` and `SharedKV` share: query heads in groups that read one key-value head."""

from dataclasses import replace
from typing import Any, TypeVar

from jaxformer.config.attention.checks import indivisibility
from jaxformer.config.attention.defaults import AttentionDefaults
from jaxformer.config.attention.layer_sizes import (
    ActivationWidths,
    CacheShape,
    KVCache,
    SharedCache,
)
from jaxformer.config.attention.output_gate import num_gates
from jaxformer.config.norms import QKNorm
from jaxformer.config.positions import Positions, Window
from jaxformer.config.tiny import (
    TINY_HEAD_DIM,
    rescale_with_width,
    tiny_num_heads,
    tiny_positions,
    tiny_window,
)

Kind = TypeVar("Kind", bound="GroupedHeads")


class GroupedHeads(AttentionDefaults):
    """Sizes and costs of attention whose query heads share key-value heads in groups."""

    num_kv_heads: int
    positions: tuple[Positions | None, ...]
    windows: tuple[Window, ...]
    scale: float | None
    qk_norm: QKNorm | None
    num_kv_projections = 2  # of keys and of values
    linear_projections = "query", "key", "value"

    def indivisible_heads(self, tensor: int) -> str | None:
        """Why the key-value heads cannot be sharded over `tensor`, if they cannot."""
        is_joint = self.qk_norm is not None and self.qk_norm.over == "width"
        joint_norm = "one QK-norm over all heads" if is_joint else None
        return indivisibility("num_kv_heads", self.num_kv_heads, tensor, joint_norm)

    @property
    def rope_head_dim(self) -> int:
        """Features per head that RoPE may rotate."""
        return self.head_dim

    @property
    def key_dim(self) -> int:
        """Features of a key."""
        return self.head_dim

    @property
    def num_cached_arrays(self) -> int:
        """Arrays cached per token: keys and values."""
        return 2

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections."""
        heads, kv = self.heads_width, self.num_kv_projections * self.num_kv_heads * self.head_dim
        gates = num_gates(self.output_gate, self.num_heads, self.head_dim)
        projections = query_length * model_dim * (2 * heads + gates)
        projections += key_length * model_dim * kv
        return 2 * (projections + 2 * query_length * num_visible_keys * heads)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        heads = self.heads_width / tensor
        kv = self.num_kv_heads * self.head_dim / min(tensor, self.num_kv_heads)
        gates = num_gates(self.output_gate, self.num_heads, self.head_dim) / tensor
        gated_heads = heads if gates else 0
        return ActivationWidths(
            heads + self.num_kv_projections * kv + gates,
            2 * heads + kv + gated_heads,
            heads,
            self.num_cached_arrays * kv,
        )

    def empty_layer_cache(self, shape: CacheShape) -> KVCache | SharedCache:
        """Return the empty cache of one layer."""
        count = self.num_cached_arrays
        arrays = (shape.zeros(self.num_kv_heads, self.head_dim) for _ in range(count))
        return KVCache(*arrays) if count == 2 else SharedCache(*arrays)

    def tiny(self: Kind) -> Kind:
        """Return the option at test size, with as many groups of heads."""
        num_heads = tiny_num_heads(self.num_heads)
        kv_heads = 1 if self.num_kv_heads == 1 else 2
        changes: dict[str, Any] = dict(
            num_heads=num_heads,
            num_kv_heads=num_heads if self.num_kv_heads == self.num_heads else kv_heads,
            head_dim=TINY_HEAD_DIM,
            positions=tuple(map(tiny_positions, self.positions)),
            scale=rescale_with_width(self.scale, self.head_dim, TINY_HEAD_DIM),
            windows=tuple(map(tiny_window, self.windows)),
        )
        return replace(self, **changes)  # type: ignore[type-var]  # its kinds are dataclasses
