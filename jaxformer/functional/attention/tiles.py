"""Tiles of blockwise attention: slicing, block mask, tile mask and tile bias."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from jaxformer.functional.attention.lazy_masks import AttentionBias, AttentionMask
from jaxformer.functional.attention.scores import Normalizer
from jaxformer.functional.collectives import pvary, varying_axes
from jaxformer.functional.linear import dropout

T = TypeVar("T")


class BlockwiseOptions(NamedTuple):
    """Static options; see `blockwise_attention`."""

    scale: float
    logit_softcap: float | None
    normalizer: Normalizer
    dropout_rate: float
    block_sizes: tuple[int, int]
    num_keys: int  # without padding
    keep_float32: bool = False  # whether results stay in float32


class HeadGroup(NamedTuple):
    """The G query heads of one sequence that share a key/value head, and that head."""

    query: Float[Array, "G T H"]
    key: Float[Array, "S H"]
    value: Float[Array, "S Hv"]
    mask: AttentionMask | None
    bias: AttentionBias | None
    dropout_key: PRNGKeyArray | None


class QueryTile(NamedTuple):
    """A tile of queries, with its positions and index."""

    query: Float[Array, "G R H"]
    positions: dict[str, Any]
    tile_index: Int[Array, ""]


class KeyTile(NamedTuple):
    """A tile of keys and values, with its positions and index."""

    key: Float[Array, "C H"]
    value: Float[Array, "C Hv"]
    positions: dict[str, Any]
    tile_index: Int[Array, ""]


QUERY_FIELDS = "query_positions", "query_segments"
KEY_FIELDS = "key_positions", "key_segments"


def slice_query_tile(
    options: BlockwiseOptions, group: HeadGroup, index: Int[Array, ""]
) -> QueryTile:
    """Slice the query tile of this index."""
    size = options.block_sizes[0]
    positions = slice_block(position_fields(group, QUERY_FIELDS), index, size)
    return QueryTile(slice_block(group.query, index, size, axis=1), positions, index)


def slice_key_tile(options: BlockwiseOptions, group: HeadGroup, index: Int[Array, ""]) -> KeyTile:
    """Slice the key tile of this index."""
    key, value, positions = slice_block(
        (group.key, group.value, position_fields(group, KEY_FIELDS)), index, options.block_sizes[1]
    )
    return KeyTile(key, value, positions, index)


def slice_block(x: Any, index: Int[Array, ""], size: int, axis: int = 0) -> Any:
    """Slice one block from every array of a tree."""
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, index * size, size, axis=axis), x)


def position_fields(group: HeadGroup, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the query or key fields of mask and bias: positions and segments."""
    mask_and_bias = {"mask": group.mask, "bias": group.bias}
    return {
        what: {name: getattr(mask_or_bias, name) for name in names if hasattr(mask_or_bias, name)}
        for what, mask_or_bias in mask_and_bias.items()
        if mask_or_bias is not None
    }


def compute_block_mask(options: BlockwiseOptions, group: HeadGroup) -> Bool[Array, "rows columns"]:
    """Return the block mask: False for blocks without any visible pair, by min and max position."""
    counts = (
        group.query.shape[-2] // options.block_sizes[0],
        group.key.shape[-2] // options.block_sizes[1],
    )
    block_mask = jnp.ones(counts, bool)
    if group.mask is None:
        return block_mask

    def min_max_per_block(x: Int[Array, " T"], block: int, axis: int) -> tuple[Array, Array]:
        blocks = x.reshape(-1, block)
        least, greatest = jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)
        return jnp.expand_dims(least, axis), jnp.expand_dims(greatest, axis)

    rule = group.mask.rule
    query_min, query_max = min_max_per_block(group.mask.query_positions, options.block_sizes[0], 1)
    key_min, key_max = min_max_per_block(group.mask.key_positions, options.block_sizes[1], 0)
    if rule.causal:
        block_mask &= key_min <= query_max
    if rule.window is not None:
        block_mask &= (key_max > query_min - rule.window) & (key_min <= query_max + rule.lookahead)
    if group.mask.query_segments is not None and group.mask.key_segments is not None:
        query_segment_min, query_segment_max = min_max_per_block(
            group.mask.query_segments, options.block_sizes[0], 1
        )
        key_segment_min, key_segment_max = min_max_per_block(
            group.mask.key_segments, options.block_sizes[1], 0
        )
        block_mask &= (key_segment_min <= query_segment_max) & (
            key_segment_max >= query_segment_min
        )
    if rule.block_sparse is not None and group.mask.head_shifts is not None:
        pattern, shifts = rule.block_sparse, group.mask.head_shifts[:, None]
        first, last = key_min // pattern.block_size, key_max // pattern.block_size
        # A multiple of the stride lies between: a block whose number, shifted, is one.
        is_remote = (last + shifts + 1) // pattern.stride > (first + shifts) // pattern.stride
        local = query_min // pattern.block_size - last < pattern.local_blocks
        block_mask &= local | jnp.any(is_remote, axis=0, keepdims=True)
    return block_mask


def update_if_visible(
    visible: Bool[Array, ""], update: Callable[[Array, T], T], index: Int[Array, ""], carry: T
) -> T:
    """Update the carry with a key tile if the block mask shows it; else return the carry."""
    # Both branches of the condition must vary over the same mesh axes.
    index = pvary(index, *varying_axes(visible))
    return jax.lax.cond(visible, update, lambda number, carry: carry, index, carry)


class TileMask(NamedTuple):
    """Mask and dropout multipliers of one tile."""

    mask: Bool[Array, "... R C"] | None  # with an axis of G heads if block-sparse
    dropout_multipliers: Float32[Array, "G R C"] | None  # of the weights, by dropout


def compute_tile_mask(
    options: BlockwiseOptions, group: HeadGroup, query_tile: QueryTile, key_tile: KeyTile
) -> TileMask:
    """Compute the mask and dropout multipliers of one tile."""
    shape = *query_tile.query.shape[:-1], options.block_sizes[1]
    mask, dropout_multipliers = None, None
    if group.mask is not None:
        mask = group.mask._replace(
            **query_tile.positions["mask"], **key_tile.positions["mask"]
        ).materialize()
    if options.num_keys % options.block_sizes[1]:
        is_key = (
            jnp.arange(options.block_sizes[1]) + key_tile.tile_index * options.block_sizes[1]
            < options.num_keys
        )
        is_key = jnp.broadcast_to(is_key, shape[-2:] if mask is None else mask.shape)
        mask = is_key if mask is None else mask & is_key
    if group.dropout_key is not None:
        tile_key = jax.random.fold_in(
            jax.random.fold_in(group.dropout_key, query_tile.tile_index), key_tile.tile_index
        )
        dropout_multipliers = dropout(jnp.ones(shape, jnp.float32), options.dropout_rate, tile_key)
    return TileMask(mask, dropout_multipliers)


def compute_tile_bias(
    bias: AttentionBias | None, query_tile: QueryTile, key_tile: KeyTile
) -> Float32[Array, "G R C"] | None:
    """Compute the bias of one tile."""
    if bias is None:
        return None
    positions = (
        query_tile.positions["bias"]["query_positions"],
        key_tile.positions["bias"]["key_positions"],
    )
    return bias.bias_function(bias.params, *positions).astype(jnp.float32)
