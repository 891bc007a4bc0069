"""`AttentionDefaults` and `RecurrentDefaults`: what attention kinds have in common."""

from typing import Any

from jaxformer.config.attention.output_gate import OutputGate
from jaxformer.config.attention.query_scaling import QueryScaling


class AttentionDefaults:
    """Base of the attention kinds; a kind overrides what differs.

    Attributes:
        is_branch: Whether the layer has this branch at all.
        has_scores: Whether positions, masks and windows enter scores of queries and keys.
        has_weights: Whether there are attention weights, for `inspect.attention_maps`.
        has_decays: Whether there is a state that decays, for `inspect.state_memory`.
        is_recurrent: Whether it is a causal recurrence over the sequence.
        shards_sequence: Whether it can be sharded over the mesh axis `context`.
        query_scaling: How queries grow with the position, if they do.
        output_gate: Gate on the outputs of the heads, if there is one.
        cross_layer_kv: Whether keys and values are those of an earlier layer.
    """

    is_branch = True
    has_scores = True
    has_weights = True
    has_decays = False
    is_recurrent = False
    shards_sequence = True
    query_scaling: QueryScaling | None = None
    output_gate: OutputGate | None = None
    cross_layer_kv: bool = False
    num_heads: int
    head_dim: int

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
        """Attention kinds whose outputs the layer sums: itself, except for `HybridHeads`."""
        return (self,)

    def indivisible_heads(self, tensor: int) -> str | None:
        """Why the key-value heads cannot be sharded over `tensor`; None if they can."""
        return None


class RecurrentDefaults(AttentionDefaults):
    """Base of the kinds without scores, whose cache has a constant size.

    Attributes:
        positions: (None,): there are no scores for positions to enter.
        windows: (1,): the cache is one state.
        rope_head_dim: 0, since nothing rotates.
    """

    has_scores = False
    has_weights = False
    is_recurrent = True
    rope_head_dim = 0
    positions: Any = (None,)
    windows: Any = (1,)

    def flops(self, model_dim: int, length: int) -> int:
        """FLOPs of one layer for `length` tokens, including its projections."""
        raise NotImplementedError

    def attention_flops(
        self, model_dim: int, query_length: int, key_length: int, num_visible_keys: int
    ) -> int:
        """FLOPs of one layer: those for the queries, which read no keys."""
        return self.flops(model_dim, query_length)
