"""Tiles of blockwise attention: slicing, block mask, tile mask and tile bias."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from jaxformer.functional.attention_mask import AttentionMask, ScoreBias
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.linear import dropout
from jaxformer.functional.scores import Normalizer

T = TypeVar("T")


class How(NamedTuple):
    """Static options; see `blockwise_attention`."""

    scale: float
    logit_softcap: float | None
    normalizer: Normalizer
    dropout_rate: float
    block: tuple[int, int]
    num_keys: int  # without padding
    wide: bool = False  # whether results stay in float32


class Unit(NamedTuple):
    """The G query heads of one sequence that share a key/value head, and that head."""

    query: Float[Array, "G T H"]
    key: Float[Array, "S H"]
    value: Float[Array, "S Hv"]
    mask: AttentionMask | None
    bias: ScoreBias | None
    dropout_key: PRNGKeyArray | None


class Rows(NamedTuple):
    """A tile of queries, with its positions and index."""

    query: Float[Array, "G R H"]
    at: dict[str, Any]
    number: Int[Array, ""]


class Columns(NamedTuple):
    """A tile of keys and values, with its positions and index."""

    key: Float[Array, "C H"]
    value: Float[Array, "C Hv"]
    at: dict[str, Any]
    number: Int[Array, ""]


QUERY_SIDE = "query_positions", "query_segments"
KEY_SIDE = "key_positions", "key_segments"


def rows_of(how: How, unit: Unit, index: Int[Array, ""]) -> Rows:
    """Slice the query tile of this index."""
    size = how.block[0]
    at = cut(side(unit, QUERY_SIDE), index, size)
    return Rows(cut(unit.query, index, size, axis=1), at, index)


def columns_of(how: How, unit: Unit, index: Int[Array, ""]) -> Columns:
    """Slice the key tile of this index."""
    key, value, at = cut((unit.key, unit.value, side(unit, KEY_SIDE)), index, how.block[1])
    return Columns(key, value, at, index)


def cut(x: Any, index: Int[Array, ""], size: int, axis: int = 0) -> Any:
    """Slice one block from every array of a tree."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index * size, size, axis=axis), x)


def side(unit: Unit, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the query or key fields of mask and bias: positions and segments."""
    both = {"mask": unit.mask, "bias": unit.bias}
    return {
        what: {name: getattr(given, name) for name in names if hasattr(given, name)}
        for what, given in both.items()
        if given is not None
    }


def near(how: How, unit: Unit) -> Bool[Array, "rows columns"]:
    """Return the block mask: False for blocks without any visible pair, by min and max position."""
    counts = unit.query.shape[-2] // how.block[0], unit.key.shape[-2] // how.block[1]
    found = jnp.ones(counts, bool)
    if unit.mask is None:
        return found

    def ends(x: Int[Array, " T"], block: int, axis: int) -> tuple[Array, Array]:
        each = x.reshape(-1, block)
        least, greatest = jnp.min(each, axis=-1), jnp.max(each, axis=-1)
        return jnp.expand_dims(least, axis), jnp.expand_dims(greatest, axis)

    rule = unit.mask.rule
    first, last = ends(unit.mask.query_positions, how.block[0], 1)
    start, end = ends(unit.mask.key_positions, how.block[1], 0)
    if rule.causal:
        found &= start <= last
    if rule.window is not None:
        found &= (end > first - rule.window) & (start <= last + rule.lookahead)
    if unit.mask.query_segments is not None and unit.mask.key_segments is not None:
        low, high = ends(unit.mask.query_segments, how.block[0], 1)
        least, most = ends(unit.mask.key_segments, how.block[1], 0)
        found &= (least <= high) & (most >= low)
    return found


def where_told(
    told: Bool[Array, ""], meet: Callable[[Array, T], T], number: Int[Array, ""], so_far: T
) -> T:
    """Update the carry with a key tile if the block mask shows it; else return the carry."""
    # Mapped over rows of several devices, the number differs as what is told does.
    number = varying(number, *varies_over(told))
    return jax.lax.cond(told, meet, lambda number, so_far: so_far, number, so_far)


class Meeting(NamedTuple):
    """Mask and dropout multipliers of one tile."""

    allowed: Bool[Array, "R C"] | None
    multipliers: Float32[Array, "G R C"] | None  # of the weights, by dropout


def meeting(how: How, unit: Unit, rows: Rows, columns: Columns) -> Meeting:
    """Compute the mask and dropout multipliers of one tile."""
    shape = *rows.query.shape[:-1], how.block[1]
    allowed, multipliers = None, None
    if unit.mask is not None:
        allowed = unit.mask._replace(**rows.at["mask"], **columns.at["mask"]).materialize()
    if how.num_keys % how.block[1]:
        real = jnp.arange(how.block[1]) + columns.number * how.block[1] < how.num_keys
        real = jnp.broadcast_to(real, shape[-2:])
        allowed = real if allowed is None else allowed & real
    if unit.dropout_key is not None:
        own = jax.random.fold_in(jax.random.fold_in(unit.dropout_key, rows.number), columns.number)
        multipliers = dropout(jnp.ones(shape, jnp.float32), how.dropout_rate, own)
    return Meeting(allowed, multipliers)


def bias_between(
    bias: ScoreBias | None, rows: Rows, columns: Columns
) -> Float32[Array, "G R C"] | None:
    """Compute the bias of one tile."""
    if bias is None:
        return None
    at = rows.at["bias"]["query_positions"], columns.at["bias"]["key_positions"]
    return bias.formula(bias.params, *at).astype(jnp.float32)
