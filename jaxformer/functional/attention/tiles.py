"""Tiles of blockwise attention: slicing, block mask, tile mask and tile bias."""

from collections.abc import Callable, Iterator
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
    arrays = group.key, group.value, position_fields(group, KEY_FIELDS)
    key, value, positions = slice_block(arrays, index, options.block_sizes[1])
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
    (block_q, block_k), mask = options.block_sizes, group.mask
    block_mask = jnp.ones((group.query.shape[-2] // block_q, group.key.shape[-2] // block_k), bool)
    if mask is None:
        return block_mask

    def extremes(queries: Int[Array, " T"], keys: Int[Array, " S"]) -> Iterator[Array]:
        """Yield the least and the greatest number of each query block, then of each key block."""
        for x, block, axis in ((queries, block_q, 1), (keys, block_k, 0)):
            blocks = x.reshape(-1, block)
            least, greatest = jnp.min(blocks, axis=-1), jnp.max(blocks, axis=-1)
            yield from (jnp.expand_dims(least, axis), jnp.expand_dims(greatest, axis))

    rule = mask.rule
    query_min, query_max, key_min, key_max = extremes(mask.query_positions, mask.key_positions)
    if rule.causal:
        block_mask &= key_min <= query_max
    if rule.window is not None:
        block_mask &= (key_max > query_min - rule.window) & (key_min <= query_max + rule.lookahead)
    if rule.chunk is not None:
        block_mask &= key_max // rule.chunk >= query_min // rule.chunk
        block_mask &= key_min // rule.chunk <= query_max // rule.chunk
    if mask.query_segments is not None and mask.key_segments is not None:
        query_first, query_last, first, last = extremes(mask.query_segments, mask.key_segments)
        block_mask &= (first <= query_last) & (last >= query_first)
    if rule.block_sparse is not None and mask.head_shifts is not None:
        pattern, shifts = rule.block_sparse, mask.head_shifts[:, None]
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
    size = options.block_sizes[1]
    shape = *query_tile.query.shape[:-1], size
    mask, dropout_multipliers = None, None
    if group.mask is not None:
        positions = query_tile.positions["mask"] | key_tile.positions["mask"]
        mask = group.mask._replace(**positions).materialize()
    if options.num_keys % size:
        is_key = jnp.arange(size) + key_tile.tile_index * size < options.num_keys
        is_key = jnp.broadcast_to(is_key, shape[-2:] if mask is None else mask.shape)
        mask = is_key if mask is None else mask & is_key
    if group.dropout_key is not None:
        tile_key = jax.random.fold_in(group.dropout_key, query_tile.tile_index)
        tile_key = jax.random.fold_in(tile_key, key_tile.tile_index)
        dropout_multipliers = dropout(jnp.ones(shape, jnp.float32), options.dropout_rate, tile_key)
    return TileMask(mask, dropout_multipliers)


def compute_tile_bias(
    bias: AttentionBias | None, query_tile: QueryTile, key_tile: KeyTile
) -> Float32[Array, "G R C"] | None:
    """Compute the bias of one tile."""
    if bias is None:
        return None
    positions = query_tile.positions["bias"] | key_tile.positions["bias"]
    return bias.bias_function(bias.params, **positions).astype(jnp.float32)
