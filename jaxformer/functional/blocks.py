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
    positions = cut(side(unit, QUERY_SIDE), index, size)
    return Rows(cut(unit.query, index, size, axis=1), positions, index)


def columns_of(how: How, unit: Unit, index: Int[Array, ""]) -> Columns:
    """Slice the key tile of this index."""
    key, value, positions = cut((unit.key, unit.value, side(unit, KEY_SIDE)), index, how.block[1])
    return Columns(key, value, positions, index)


def cut(x: Any, index: Int[Array, ""], size: int, axis: int = 0) -> Any:
    """Slice one block from every array of a tree."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index * size, size, axis=axis), x)


def side(unit: Unit, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the query or key fields of mask and bias: positions and segments."""
    mask_and_bias = {"mask": unit.mask, "bias": unit.bias}
    return {
        what: {name: getattr(mask_or_bias, name) for name in names if hasattr(mask_or_bias, name)}
        for what, mask_or_bias in mask_and_bias.items()
        if mask_or_bias is not None
    }


def near(how: How, unit: Unit) -> Bool[Array, "rows columns"]:
    """Return the block mask: False for blocks without any visible pair, by min and max position."""
    counts = unit.query.shape[-2] // how.block[0], unit.key.shape[-2] // how.block[1]
    block_mask = jnp.ones(counts, bool)
    if unit.mask is None:
        return block_mask

    def ends(x: Int[Array, " T"], block: int, axis: int) -> tuple[Array, Array]:
        blocks = x.reshape(-1, block)
        least, greatest = jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)
        return jnp.expand_dims(least, axis), jnp.expand_dims(greatest, axis)

    rule = unit.mask.rule
    query_min, query_max = ends(unit.mask.query_positions, how.block[0], 1)
    key_min, key_max = ends(unit.mask.key_positions, how.block[1], 0)
    if rule.causal:
        block_mask &= key_min <= query_max
    if rule.window is not None:
        block_mask &= (key_max > query_min - rule.window) & (key_min <= query_max + rule.lookahead)
    if unit.mask.query_segments is not None and unit.mask.key_segments is not None:
        query_segment_min, query_segment_max = ends(unit.mask.query_segments, how.block[0], 1)
        key_segment_min, key_segment_max = ends(unit.mask.key_segments, how.block[1], 0)
        block_mask &= (key_segment_min <= query_segment_max) & (
            key_segment_max >= query_segment_min
        )
    return block_mask


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
    mask, dropout_multipliers = None, None
    if unit.mask is not None:
        mask = unit.mask._replace(**rows.at["mask"], **columns.at["mask"]).materialize()
    if how.num_keys % how.block[1]:
        is_key = jnp.arange(how.block[1]) + columns.number * how.block[1] < how.num_keys
        is_key = jnp.broadcast_to(is_key, shape[-2:])
        mask = is_key if mask is None else mask & is_key
    if unit.dropout_key is not None:
        tile_key = jax.random.fold_in(
            jax.random.fold_in(unit.dropout_key, rows.number), columns.number
        )
        dropout_multipliers = dropout(jnp.ones(shape, jnp.float32), how.dropout_rate, tile_key)
    return Meeting(mask, dropout_multipliers)


def bias_between(
    bias: ScoreBias | None, rows: Rows, columns: Columns
) -> Float32[Array, "G R C"] | None:
    """Compute the bias of one tile."""
    if bias is None:
        return None
    positions = rows.at["bias"]["query_positions"], columns.at["bias"]["key_positions"]
    return bias.formula(bias.params, *positions).astype(jnp.float32)
