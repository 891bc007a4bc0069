"""What `MultiHead` and `SharedKV` share: query heads in groups that read one key-value head."""

from typing import TypeVar

from jaxformer.checks import Cycle
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
from jaxformer.config.tiny import TINY_HEAD_DIM, rescale_with_width, shrink, tiny_num_heads

Kind = TypeVar("Kind", bound="GroupedHeads")


class GroupedHeads(AttentionDefaults):
    """Sizes and costs of attention whose query heads share key-value heads in groups."""

    num_kv_heads: int
    value_dim: int | None = None
    positions: Cycle[Positions | None]
    windows: Cycle[Window]
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
    def value_width(self) -> int:
        """Features of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def heads_width(self) -> int:
        """Total width of all heads, the input of the output projection."""
        return self.num_heads * self.value_width

    @property
    def num_cached_arrays(self) -> int:
        """Arrays cached per token: keys and values."""
        return 2

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections."""
        both = self.num_heads * self.head_dim + self.heads_width  # queries, and what is put out
        kv = self.num_kv_heads * sum((self.head_dim, self.value_width)[: self.num_kv_projections])
        gates = num_gates(self.output_gate, self.num_heads, self.value_width)
        projections = query_length * model_dim * (both + gates)
        projections += key_length * model_dim * kv
        return 2 * (projections + query_length * num_visible_keys * both)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        queries, heads = self.num_heads * self.head_dim / tensor, self.heads_width / tensor
        key, value = (
            self.num_kv_heads * width / min(tensor, self.num_kv_heads)
            for width in (self.head_dim, self.value_width)
        )
        gates = num_gates(self.output_gate, self.num_heads, self.value_width) / tensor
        gated_heads = heads * (bool(gates) + (self.sub_norm is not None))
        return ActivationWidths(
            queries + sum((key, value)[: self.num_kv_projections]) + gates,
            queries + heads + key + gated_heads,
            heads,
            sum((key, value)[: self.num_cached_arrays]),
        )

    def empty_layer_cache(self, shape: CacheShape) -> KVCache | SharedCache:
        """Return the empty cache of one layer."""
        widths = (self.head_dim, self.value_width)[: self.num_cached_arrays]
        arrays = [shape.zeros(self.num_kv_heads, width) for width in widths]
        return KVCache(*arrays) if len(arrays) == 2 else SharedCache(*arrays)

    def tiny(self: Kind) -> Kind:
        """Return the option at test size, with as many groups of heads."""
        kv_heads = 1 if self.num_kv_heads == 1 else 2
        if self.num_kv_heads == self.num_heads:
            kv_heads = tiny_num_heads(self.num_heads)
        scale = rescale_with_width(self.scale, self.head_dim, TINY_HEAD_DIM)
        return shrink(self, num_kv_heads=kv_heads, scale=scale)
