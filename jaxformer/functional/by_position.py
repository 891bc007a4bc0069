"""Masks and biases as rules of positions, for attention that never holds queries times keys."""

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxformer.functional.arguments import checked
from jaxformer.functional.masks import beside, causal_mask, segment_mask, window_mask
from jaxformer.functional.positions import (
    alibi_bias,
    relative_position_bias,
    relative_position_buckets,
)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Sight:
    """Which keys a query may see, by where both stand.

    Attributes:
        causal: Only keys at its own position and before.
        window: Only the latest so many keys, its own included; None is all.
        lookahead: With a window, as many after the query.
        in_order: Positions rise by one from each token to the next of the same segment, and queries
            are the keys' tokens, so that kernels which count tokens themselves may be used.
    """

    causal: bool = False
    window: int | None = None
    lookahead: int = 0
    in_order: bool = False

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"Sight.window must be at least 1; got {self.window}.")
        if self.lookahead < 0 or (self.lookahead and self.window is None):
            raise ValueError(
                "Sight.lookahead is a number of keys after the query, beside a window of those "
                f"before; got lookahead={self.lookahead} and window={self.window}."
            )


class PositionMask(NamedTuple):
    """The mask of a `Sight`: who may attend to whom, told by positions and segments.

    Attributes:
        queries: Position of each query, in tokens.
        keys: Position of each key, in tokens.
        query_segments: Number of the document each query belongs to; None is one for all.
        key_segments: Of each key; None if and only if those of the queries are.
        sight: What positions allow.
    """

    queries: Integer[Array, "*batch T"]
    keys: Integer[Array, "*batch S"]
    query_segments: Integer[Array, "*batch T"] | None = None
    key_segments: Integer[Array, "*batch S"] | None = None
    sight: Sight = Sight()

    def whole(self) -> Bool[Array, "*batch T S"] | None:
        """The mask as an array; None where everything is seen."""
        sight, parts = self.sight, []
        if sight.causal:
            parts.append(causal_mask(self.queries, self.keys))
        if sight.window is not None:
            parts.append(
                window_mask(self.queries, self.keys, sight.window, lookahead=sight.lookahead)
            )
        if self.query_segments is not None and self.key_segments is not None:
            parts.append(segment_mask(self.query_segments, self.key_segments))
        shape = jnp.broadcast_shapes(*(part.shape for part in parts))
        return reduce(and_, (jnp.broadcast_to(x, shape) for x in parts)) if parts else None


class AlibiRule(NamedTuple):
    """The bias of `alibi_bias`: scores fall linearly with distance.

    Attributes:
        queries: Position of each query, in tokens.
        keys: Position of each key, in tokens.
        slopes: From `alibi_slopes`.
    """

    queries: Integer[Array, "*batch T"]
    keys: Integer[Array, "*batch S"]
    slopes: Float[Array, " N"]

    def whole(self) -> Float[Array, "*batch N T S"]:
        """The bias as an array."""
        return alibi_bias(self.slopes, self.queries, self.keys)


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How `relative_position_buckets` sorts distances, beside how many there are."""

    bidirectional: bool
    max_distance: int = 128


class BucketRule(NamedTuple):
    """The bias of `relative_position_bias`: a learned number for each bucket of distances.

    Attributes:
        queries: Position of each query, in tokens.
        keys: Position of each key, in tokens.
        table: Learned; one row per bucket.
        buckets: How distances are sorted.
    """

    queries: Integer[Array, "*batch T"]
    keys: Integer[Array, "*batch S"]
    table: Float[Array, "buckets N"]
    buckets: Buckets

    def whole(self) -> Float[Array, "*batch N T S"]:
        """The bias as an array."""
        rows = relative_position_buckets(
            _ahead(self.queries, self.keys),
            bidirectional=self.buckets.bidirectional,
            num_buckets=self.table.shape[0],
            max_distance=self.buckets.max_distance,
        )
        return relative_position_bias(self.table, rows)


@checked
def _ahead(
    queries: Integer[Array, "*#batch T"], keys: Integer[Array, "*#batch S"]
) -> Int[Array, "*batch T S"]:
    """By how many positions each key is ahead of each query."""
    own, others = beside(queries, keys)
    return others - own


PositionBias = AlibiRule | BucketRule


def is_rule(given: Any) -> bool:
    """Whether a mask or a bias is told by positions; arrays and None are not."""
    return isinstance(given, PositionMask | AlibiRule | BucketRule)


def check_rules(query: Array, key: Array, mask: Any, bias: Any) -> None:
    """Refuse rules that are about other queries, keys or heads than there are."""
    *_, T, N, _ = query.shape
    S = key.shape[-3]
    for rule in (mask, bias):
        if not is_rule(rule):
            continue
        name = type(rule).__name__
        sides = [("queries", T), ("keys", S)]
        if isinstance(rule, PositionMask):
            if (rule.query_segments is None) != (rule.key_segments is None):
                raise ValueError(
                    f"{name} has segments of queries and of keys, or neither; give both."
                )
            sides += [("query_segments", T), ("key_segments", S)]
        for side, count in sides:
            given = getattr(rule, side)
            if given is not None and given.shape[-1] != count:
                raise ValueError(
                    f"{name}.{side} has a number for each of {count} "
                    f"{'queries' if side.startswith('quer') else 'keys'}; got shape {given.shape}."
                )
        learned = {AlibiRule: "slopes", BucketRule: "table"}.get(type(rule))
        if learned is not None and getattr(rule, learned).shape[-1] != N:
            raise ValueError(
                f"{name}.{learned} has a number for each of {N} query heads; got shape "
                f"{getattr(rule, learned).shape}."
            )


def as_array(given: Any) -> Any:
    """What a mask or a bias is, written out.

    Args:
        given: A rule, an array or None.

    Returns:
        The array of a rule; arrays and None as they are.
    """
    return given.whole() if is_rule(given) else given
