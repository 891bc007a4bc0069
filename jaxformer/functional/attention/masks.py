"""Attention masks as functions of positions and segments: True where attention is allowed.

The same functions serve training (positions 0 to T - 1), packed rows, a prompt continued from a
cache (later query positions) and a ring buffer (key positions in any order). Combine masks with
``&`` and ``|``.

Unused slots of a cache have a position larger than any query's, so that causal masks exclude them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Integer, Shaped

from jaxformer.functional.argument_checks import typechecked


def broadcast_pairs(
    queries: Shaped[Array, "*#batch T"], keys: Shaped[Array, "*#batch S"]
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Expand per-query and per-key numbers to [*batch, T, 1] and [*batch, 1, S]."""
    query_rows, key_columns = match_ranks(queries[..., :, None], keys[..., None, :])
    return query_rows, key_columns


def match_ranks(*arrays: Array) -> list[Array]:
    """Add leading axes of size 1 until all arrays have the same rank."""
    axes = max(x.ndim for x in arrays)
    return [x.reshape((1,) * (axes - x.ndim) + x.shape) for x in arrays]


@typechecked
def causal_mask(
    query_positions: Integer[Array, "*#batch T"], key_positions: Integer[Array, "*#batch S"]
) -> Bool[Array, "*batch T S"]:
    """Causal mask: each query attends to keys at or before its position.

        mask[t, s] = key_positions[s] <= query_positions[t]

    Args:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.

    Returns:
        True where the query may attend to the key.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> print(F.causal_mask(jnp.arange(3), jnp.arange(3)).astype(int))
        [[1 0 0]
         [1 1 0]
         [1 1 1]]
        >>> print(F.causal_mask(jnp.array([2]), jnp.arange(5)).astype(int))  # a cache of 5
        [[1 1 1 0 0]]

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 3.2.3
    """
    queries, keys = broadcast_pairs(query_positions, key_positions)
    return keys <= queries


@typechecked
def window_mask(
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    window: int,
    *,
    lookahead: int = 0,
) -> Bool[Array, "*batch T S"]:
    """Sliding-window mask: each query attends to the latest `window` keys, its own included.

        mask[t, s] = query[t] - window < key[s] <= query[t] + lookahead

    A window at least as long as the sequence is `causal_mask`.

    Args:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        window: Keys seen at or before the query, in tokens: 1 is the query's own key alone.
        lookahead: Keys seen after the query, in tokens. ``window - 1`` is the symmetric window of
            an encoder.

    Returns:
        True where the query may attend to the key.

    Raises:
        ValueError: ``window`` is below 1 or ``lookahead`` below 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> positions = jnp.arange(4)
        >>> print(F.window_mask(positions, positions, 2).astype(int))
        [[1 0 0 0]
         [1 1 0 0]
         [0 1 1 0]
         [0 0 1 1]]

    References:
        Beltagy, Peters and Cohan, Longformer: The Long-Document Transformer, 2020.
        arXiv:2004.05150, section 3.1
        Jiang et al., Mistral 7B, 2023. arXiv:2310.06825, section 2
    """
    if window < 1 or lookahead < 0:
        raise ValueError(
            "A window needs at least 1 key and a lookahead of at least 0; "
            f"got window {window} and lookahead {lookahead}."
        )
    queries, keys = broadcast_pairs(query_positions, key_positions)
    offset = keys - queries
    return (-window < offset) & (offset <= lookahead)


@typechecked
def chunk_mask(
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    chunk: int,
) -> Bool[Array, "*batch T S"]:
    """Chunk mask: each query attends to the keys of its own chunk of positions.

        mask[t, s] = key_positions[s] // chunk == query_positions[t] // chunk

    It allows keys after the query; combine it with `causal_mask`. A chunk at least as long as the
    sequence allows every pair.

    Args:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        chunk: Length of a chunk, in tokens; the first begins at position 0.

    Returns:
        True where query and key are in the same chunk.

    Raises:
        ValueError: ``chunk`` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> positions = jnp.arange(4)
        >>> causal = F.causal_mask(positions, positions)
        >>> print((causal & F.chunk_mask(positions, positions, 2)).astype(int))
        [[1 0 0 0]
         [1 1 0 0]
         [0 0 1 0]
         [0 0 1 1]]

    References:
        Meta, Llama 4, 2025, https://github.com/meta-llama/llama-models (iRoPE: local layers)
        Child et al., Generating Long Sequences with Sparse Transformers, 2019. arXiv:1904.10509,
        section 4.3 (fixed attention, whose first part this is)
    """
    if chunk < 1:
        raise ValueError(f"A chunk has at least 1 token; got {chunk}.")
    queries, keys = broadcast_pairs(query_positions // chunk, key_positions // chunk)
    return keys == queries


@typechecked
def segment_mask(
    query_segments: Integer[Array, "*#batch T"], key_segments: Integer[Array, "*#batch S"]
) -> Bool[Array, "*batch T S"]:
    """Segment mask: attention within a segment (packed document) only.

        mask[t, s] = query_segments[t] == key_segments[s]

    Padding is a segment like any other: it attends to itself and nothing attends to it.

    Args:
        query_segments: Number of the document each query belongs to.
        key_segments: Number of the document each key belongs to.

    Returns:
        True where the query may attend to the key.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> segments = jnp.array([1, 1, 2, 2])  # two documents in a row
        >>> positions = jnp.array([0, 1, 0, 1])
        >>> causal = F.causal_mask(positions, positions)
        >>> print((causal & F.segment_mask(segments, segments)).astype(int))
        [[1 0 0 0]
         [1 1 0 0]
         [0 0 1 0]
         [0 0 1 1]]

    References:
        Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
        arXiv:2107.02027, section 3.2
    """
    queries, keys = broadcast_pairs(query_segments, key_segments)
    return queries == keys


@typechecked
def prefix_mask(
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    prefix_length: Integer[Array, "*#batch"] | int,
) -> Bool[Array, "*batch T S"]:
    """Prefix-LM mask: bidirectional over the prefix, causal after it.

        mask[t, s] = key_positions[s] <= query_positions[t]  or  key_positions[s] < prefix_length

    Args:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        prefix_length: Tokens of the prefix, one number for all sequences or one for each: ``[B]``
            gives ``[B, T, S]``, with positions for each sequence or one row for all.

    Returns:
        True where the query may attend to the key.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> positions = jnp.arange(4)
        >>> print(F.prefix_mask(positions, positions, 2).astype(int))
        [[1 1 0 0]
         [1 1 0 0]
         [1 1 1 0]
         [1 1 1 1]]

    References:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer, 2019. arXiv:1910.10683, section 3.2.1
    """
    queries, keys = broadcast_pairs(query_positions, key_positions)
    lengths = jnp.asarray(prefix_length, keys.dtype)[..., None, None]
    queries, keys, lengths = match_ranks(queries, keys, lengths)
    return (keys <= queries) | (keys < lengths)


@typechecked
def key_padding_mask(valid: Bool[Array, "*batch S"]) -> Bool[Array, "*batch 1 S"]:
    """Key padding mask: every query attends to the valid keys.

        mask[0, s] = valid[s]

    Args:
        valid: True for real tokens, False for padding.

    Returns:
        The mask with one row that stands for all queries.
    """
    return valid[..., None, :]


@typechecked
def length_mask(lengths: Integer[Array, "*batch"], num_positions: int) -> Bool[Array, "*batch T"]:
    """Valid-token mask of rows padded on the right: True for the first `lengths` tokens.

        mask[t] = t < lengths

    Args:
        lengths: Tokens of each row.
        num_positions: T.

    Returns:
        True for tokens, False for padding.
    """
    positions = jnp.broadcast_to(jnp.arange(num_positions), (*lengths.shape, num_positions))
    return positions < lengths[..., None]


@typechecked
def block_sparse_mask(
    query_positions: Integer[Array, "*#batch T"],
    key_positions: Integer[Array, "*#batch S"],
    *,
    num_heads: int,
    block_size: int,
    local_blocks: int,
    stride: int,
) -> Bool[Array, "*batch {num_heads} T S"]:
    """Block-sparse causal mask: local blocks and every stride-th earlier one, shifted per head.

        query_block[t], key_block[s] = query_positions[t] // block, key_positions[s] // block
        local[t, s] = query_block[t] - key_block[s] < local_blocks
        remote[n, s] = (key_block[s] + n * max(1, stride // num_heads) + 1) % stride == 0
        mask[n, t, s] = (local[t, s] or remote[n, s]) and key_positions[s] <= query_positions[t]

    The heads' remote blocks differ: ``stride`` or more heads together attend to the whole past.

    Args:
        query_positions: Position of each query, in tokens.
        key_positions: Position of each key, in tokens.
        num_heads: Query heads.
        block_size: Tokens per block.
        local_blocks: Latest blocks that every head attends to, the query's own included.
        stride: Distance between a head's remote blocks, in blocks.

    Returns:
        True where the query of that head may attend to the key.

    Raises:
        ValueError: One of the four numbers is below 1.

    References:
        Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219, section 2 (the 7B model)
        Child et al., Generating Long Sequences with Sparse Transformers, 2019. arXiv:1904.10509
    """
    if min(num_heads, block_size, local_blocks, stride) < 1:
        raise ValueError(
            "num_heads, block_size, local_blocks and stride must be at least 1; got "
            f"{num_heads}, {block_size}, {local_blocks} and {stride}."
        )
    pattern = BlockSparsePattern(block_size, local_blocks, stride)
    blocks = pattern.mask(query_positions, key_positions, pattern.head_shifts(num_heads))
    causal = jnp.expand_dims(causal_mask(query_positions, key_positions), -3)
    return blocks & jnp.broadcast_to(causal, blocks.shape)


class BlockSparsePattern(NamedTuple):
    """Local blocks of every head, and remote blocks that each head shifts by its own number.

    Attributes:
        block_size: Tokens per block.
        local_blocks: Latest blocks that every head attends to, the query's own included.
        stride: Distance between a head's remote blocks, in blocks.
    """

    block_size: int
    local_blocks: int
    stride: int

    def head_shifts(self, num_heads: int) -> Int[Array, " N"]:
        """Return the number of blocks by which each head's remote blocks are shifted."""
        return max(1, self.stride // num_heads) * jnp.arange(num_heads)

    def mask(
        self,
        query_positions: Integer[Array, "*#batch T"],
        key_positions: Integer[Array, "*#batch S"],
        head_shifts: Integer[Array, " N"],
    ) -> Bool[Array, "*batch N T S"]:
        """Return the mask of each head; keys after the query are not left out."""
        queries, keys = broadcast_pairs(query_positions, key_positions)
        key_block = keys // self.block_size
        local = queries // self.block_size - key_block < self.local_blocks

        def one_head(shift: Int[Array, ""]) -> Bool[Array, "..."]:
            return local | ((key_block + shift + 1) % self.stride == 0)

        return jax.vmap(one_head, out_axes=-3)(head_shifts.astype(key_block.dtype))
