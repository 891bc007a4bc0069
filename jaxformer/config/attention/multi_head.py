"""`MultiHead`: multi-head, grouped-query and multi-query attention by the number of KV heads."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.checks import Cycle, Distinct, Positive, Size, require
from jaxformer.config.attention.checks import check_heads, check_ropes
from jaxformer.config.attention.grouped_heads import GroupedHeads
from jaxformer.config.attention.layer_sizes import CacheShape
from jaxformer.config.attention.output_gate import OutputGate
from jaxformer.config.attention.query_scaling import QueryPower, QueryScaling
from jaxformer.config.norms import Norm, QKNorm
from jaxformer.config.positions import Positions, Rope, Window

Projection = Literal["query", "key", "value", "out"]


@dataclass(frozen=True, kw_only=True)
class MultiHead(GroupedHeads):
    """Dot-product attention: multi-head, grouped-query or multi-query by `num_kv_heads`.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; each serves num_heads / num_kv_heads query heads.
        head_dim: Width of a head's query and key.
        value_dim: Width of a head's value; None is head_dim.
        positions: Position options, cycled over the layers.
        windows: Attention windows, cycled over the layers: each query attends to the last W keys,
            its own included (in an encoder also to W - 1 keys after it), or by a `BlockSparse`
            pattern, or to all keys (None).
        scale: Multiplies the scores; None is head_dim ** -0.5.
        logit_softcap: Cap c of the scores: s becomes c * tanh(s / c).
        clip_qkv: Queries, keys and values are clipped to [-clip_qkv, clip_qkv].
        qk_norm: Norm of queries and keys.
        value_norm: Norm of each head's values, before RoPE if it rotates them; None has none.
            Gemma 4 has an `RMSNorm` without a scale.
        query_scaling: Factor of the queries of self-attention by position, after norm and RoPE.
        biases: Projections with a bias.
        normalizer: Function from scores to attention weights.
        sinks: Whether each query head has a sink: a learned score of a further key whose value is
            zero, so that its weights sum to less than 1.
        output_gate: Gate on the outputs of the heads, before the output projection.
        sub_norm: Norm of all gated heads together, before the output projection (sub-LN, BitNet).
        cross_layer_kv: Whether this layer reads the keys and values of the last layer before it
            that has the same window and projections of its own. This layer then caches nothing (KV
            sharing, cross-layer attention). The layer that it reads stands before all layers that
            repeat, or in the same repetition.
        value_residual: Whether values are a learned sum of the layer's own and those of layer 0, at
            first their mean (ResFormer). Layer 0 is another layer, without it.

    References:
        Brandon et al., Reducing Transformer Key-Value Cache Size with Cross-Layer Attention, 2024.
        arXiv:2405.12981, section 2 (cross_layer_kv)
        Zhou et al., Value Residual Learning, 2024. arXiv:2410.17897, section 3 (value_residual)
        Wang et al., Foundation Transformers, 2022. arXiv:2210.06423, section 2.1 (sub_norm)
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    value_dim: Size | None = None
    positions: Cycle[Positions | None] = (Rope(),)
    windows: Cycle[Window] = (None,)
    scale: float | None = None
    logit_softcap: Positive | None = None
    clip_qkv: Positive | None = None
    qk_norm: QKNorm | None = None
    value_norm: Norm | None = None
    query_scaling: QueryScaling | QueryPower | None = None
    biases: Distinct[Projection] = ()
    normalizer: Literal["softmax", "relu"] = "softmax"
    sinks: bool = False
    output_gate: OutputGate | None = None
    sub_norm: Norm | None = None
    cross_layer_kv: bool = False
    value_residual: bool = False

    def __post_init__(self):
        super().__post_init__()
        require(
            self.normalizer == "softmax" or not self.sinks,
            f'MultiHead.sinks needs normalizer="softmax"; got {self.normalizer!r}.',
        )
        check_heads(self)
        check_ropes(self)
        biases = [name for name in self.biases if name in ("key", "value")]
        require(
            not (self.cross_layer_kv and (biases or self.value_norm)),
            "MultiHead.cross_layer_kv has no projections to keys and values, so it needs no bias "
            f"and no norm of these; got biases {biases} and value_norm {self.value_norm}.",
        )

        targets = {x for rope in self.positions if isinstance(rope, Rope) for x in rope.targets}
        require(
            self.value_width == self.head_dim or not targets & set("vo"),
            "MultiHead.value_dim must be head_dim where RoPE rotates values or outputs; got "
            f"value_dim {self.value_dim} and head_dim {self.head_dim}.",
        )

    @property
    def num_kv_projections(self) -> int:  # type: ignore[override]
        """Projections to keys and values."""
        return 0 if self.cross_layer_kv else 2

    @property
    def linear_projections(self) -> tuple[str, str, str] | None:  # type: ignore[override]
        """Names of the projections to queries, keys and values; None where it lacks some."""
        return None if self.cross_layer_kv else ("query", "key", "value")

    def empty_layer_cache(self, shape: CacheShape) -> Any:
        """Return the empty cache of one layer; without arrays if it reads another layer's cache."""
        return () if self.cross_layer_kv else super().empty_layer_cache(shape)
