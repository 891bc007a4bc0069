"""What attention kinds have in common: defaults, and sums over several kinds or none."""

from typing import Any, TypeVar

from jaxformer.checks import Checked
from jaxformer.config.attention.layer_sizes import ActivationWidths, CacheShape
from jaxformer.config.attention.output_gate import OutputGate
from jaxformer.config.attention.query_scaling import QueryPower, QueryScaling
from jaxformer.config.norms import Norm
from jaxformer.config.tiny import shrink
from jaxformer.functional.recurrence import RECURRENCE_CHUNK

Kind = TypeVar("Kind", bound="AttentionDefaults")


class AttentionDefaults(Checked):
    """Base of the attention kinds; a kind overrides what differs.

    Attributes:
        has_scores: Whether positions, masks and windows enter scores of queries and keys; else it
            is a causal recurrence over the sequence.
        has_weights: Whether there are attention weights, for `inspect.attention_maps`.
        has_decays: Whether there is a state that decays, for `inspect.state_memory`.
        shards_sequence: Whether it can be sharded over the mesh axis `context`.
        query_scaling: How queries grow with the position, if they do.
        output_gate: Gate on the outputs of the heads, if there is one.
        sub_norm: Norm of what the output projection reads, if there is one.
        cross_layer_kv: Whether an earlier layer provides the keys and values.
        value_residual: Whether values are a sum with those of layer 0.
        depends_on_depth: Whether it reads the number of its layer.
    """

    has_scores = True
    has_weights = True
    has_decays = False
    shards_sequence = True
    query_scaling: QueryScaling | QueryPower | None = None
    output_gate: OutputGate | None = None
    sub_norm: Norm | None = None
    cross_layer_kv: bool = False
    value_residual: bool = False
    depends_on_depth = False
    num_heads: int
    head_dim: int
    positions: Any
    windows: Any

    def tiny(self: Kind) -> Kind:
        """Return the option at test size."""
        return shrink(self)

    @property
    def heads_width(self) -> int:
        """Total width of all heads, the input of the output projection."""
        return self.num_heads * self.head_dim

    @property
    def linear_projections(self) -> tuple[str | None, str | None, str] | None:
        """Names of the linear projections to queries, keys and values; for composition scores."""
        return None

    @property
    def parts(self) -> tuple[Any, ...]:
        """Attention kinds whose outputs the layer sums: itself, except for `SideBySide`."""
        return (self,)

    @property
    def main(self) -> Any:
        """The kind that has what a layer has once, such as positions: itself."""
        return self

    def indivisible_heads(self, tensor: int) -> str | None:
        """Why the key-value heads cannot be sharded over `tensor`; None if they can."""
        return None


class RecurrentDefaults(AttentionDefaults):
    """Base of the kinds without scores, whose cache has a constant size.

    Attributes:
        positions: (None,): there are no scores for positions to enter.
        windows: (1,): the cache is one state.
        chunk: Tokens whose weights a head computes together; 0 if there are no such weights.
    """

    has_scores = False
    has_weights = False
    positions = (None,)
    windows: Any = (1,)
    chunk: int = RECURRENCE_CHUNK

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer for `length` tokens, including its projections."""
        raise NotImplementedError

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer for its queries; they read no keys."""
        return self.flops(model_dim, query_length)


class SideBySide(AttentionDefaults):
    """Base of several attention kinds in one layer, or of none: sums over `parts`."""

    @property
    def heads_width(self) -> int:
        """Largest total width of a kind's heads."""
        return max((kind.heads_width for kind in self.parts), default=0)

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer, including its projections."""
        lengths = query_length, key_length, num_visible_keys
        return sum(kind.attention_flops(model_dim, *lengths) for kind in self.parts)

    def activation_widths(self, model_dim: int, tensor: int) -> ActivationWidths:
        """Numbers per token that a layer computes, heads sharded over `tensor`."""
        widths = (kind.activation_widths(model_dim, tensor) for kind in self.parts)
        return ActivationWidths(*map(sum, zip((0, 0, 0, 0), *widths, strict=True)))

    def empty_layer_cache(self, shape: CacheShape) -> tuple[Any, ...]:
        """Return the empty cache of each kind; only `main` may have more slots than one."""
        state = shape._replace(num_slots=1)
        return tuple(
            kind.empty_layer_cache(shape if kind is self.main else state) for kind in self.parts
        )
