"""Attention inputs made once per forward pass: masks, rotations, positions, cache slots."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex64, Float, Int

from jaxformer import config as c
from jaxformer import functional as F


class TokenPositions(NamedTuple):
    """Position and segment (document) of each token; segments None means one document.

    Both have the same shape; [T] serves a whole batch.
    """

    positions: Int[Array, "*batch T"]
    segments: Int[Array, "*batch T"] | None = None


def all_gather_positions(token_positions: TokenPositions, axis_name: str | None) -> TokenPositions:
    """All-gather positions and segments over the context axis."""
    if axis_name is None:
        return token_positions
    return jax.tree.map(
        lambda x: jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True), token_positions
    )


class AttentionInputs(NamedTuple):
    """Inputs of an attention module besides x: mask, bias, RoPE rotations, positions, cache slots.

    `mask` is `[*batch, T, S]`, or `[*batch, N, T, S]` where it differs by head; `bias` is
    `[*batch, N, T, S]`; where blocks of them will do, both are rules instead. `rotations`
    are unit complex numbers, `[*batch, T, C]`. `query_positions` and `key_positions` are positions;
    `cache_slots` say where a cache keeps the new tokens. What has no mask is told which document
    the new tokens belong to (`segments`), and with a cache which are `valid`, not padding.
    `layer_index` is that of a cache whose arrays are those of several layers.
    """

    mask: Bool[Array, "..."] | F.AttentionMask | None = None
    bias: Float[Array, "..."] | F.AttentionBias | None = None
    rotations: Complex64[Array, "*batch T C"] | None = None
    query_positions: Int[Array, "*batch T"] | None = None
    key_positions: Int[Array, "*batch S"] | None = None
    cache_slots: Int[Array, "*batch T"] | None = None
    segments: Int[Array, "*batch T"] | None = None
    valid: Bool[Array, "*batch T"] | None = None
    layer_index: Int[Array, ""] | None = None


def lazy_mask(
    window: c.Window,
    queries: TokenPositions,
    keys: TokenPositions,
    *,
    causal: bool,
    contiguous_positions: bool = False,
) -> F.AttentionMask:
    """Make the lazy `AttentionMask` of a layer; block-sparse windows are not part of it."""
    width = window if isinstance(window, int) else None
    lookahead = 0 if causal or width is None else width - 1
    rule = F.MaskRule(
        causal=causal, window=width, lookahead=lookahead, contiguous_positions=contiguous_positions
    )
    segments = queries.segments, keys.segments
    segment_pair = (None, None) if any(x is None for x in segments) else segments
    return F.AttentionMask(queries.positions, keys.positions, *segment_pair, rule)


def dense_mask(
    window: c.Window,
    queries: TokenPositions,
    keys: TokenPositions,
    *,
    num_heads: int,
    causal: bool,
    batch_axes: int,
) -> Bool[Array, "..."] | None:
    """Make the mask array of a layer, or None if everything is allowed.

    A mask that differs by head has all of the model's `batch_axes`, of size one where places have
    none, since the number of axes tells it from one that heads share.
    """
    query_positions, key_positions = queries.positions, keys.positions
    shared_mask = lazy_mask(window, queries, keys, causal=causal).materialize()
    if not isinstance(window, c.BlockSparse):
        return shared_mask
    blocks = F.block_sparse_mask(
        query_positions,
        key_positions,
        num_heads=num_heads,
        block_size=window.block_size,
        local_blocks=window.local_blocks,
        stride=window.stride,
    )
    by_head = blocks if shared_mask is None else blocks & jnp.expand_dims(shared_mask, -3)
    return jnp.expand_dims(by_head, tuple(range(batch_axes - (query_positions.ndim - 1))))


def cross_attention_mask(
    token_positions: TokenPositions, source_segments: Int[Array, "*batch S"] | None
) -> F.AttentionMask | None:
    """Lazy mask of cross-attention: source tokens of the same segment, never padding (0)."""
    if source_segments is None:
        return None
    valid = source_segments > 0
    if token_positions.segments is None:  # all see all that is real
        key_segments = valid.astype(jnp.int32)
        query_segments = jnp.ones(
            (*key_segments.shape[:-1], token_positions.positions.shape[-1]), jnp.int32
        )
    else:
        query_segments, key_segments = (
            token_positions.segments,
            jnp.where(valid, source_segments, -1),
        )
    zero_positions = jnp.zeros(key_segments.shape[-1:], jnp.int32)
    return F.AttentionMask(
        jnp.zeros_like(token_positions.positions), zero_positions, query_segments, key_segments
    )


def token_rotations(
    rope: c.Rope, head_dim: int, token_positions: TokenPositions, length: Int[Array, "*batch"]
) -> Complex64[Array, "*batch T C"]:
    """Compute the RoPE rotations of these positions, scaled for the given length of each row.

    Scalings that look at the length take the one given, of each row.
    """

    @partial(jnp.vectorize, signature="(t),()->(t,c)")
    def of_row(positions: Int[Array, " T"], length: Int[Array, ""]) -> Complex64[Array, "T C"]:
        return F.rope_rotations(positions, scaled_rope_frequencies(rope, head_dim, length))

    return of_row(token_positions.positions, length)


def scaled_rope_frequencies(
    rope: c.Rope, head_dim: int, length: Int[Array, ""]
) -> Float[Array, " C"]:
    """Compute RoPE frequencies with the configured scaling."""
    width = rope.rotary_dim(head_dim)
    unscaled = F.rope_frequencies(width, base=rope.base)
    match rope.scaling:
        case None:
            return unscaled
        case c.LinearScaling() as s:
            return F.rope_scale_linear(unscaled, factor=s.factor)
        case c.NTKScaling() as s:
            return F.rope_scale_ntk(unscaled, factor=s.factor)
        case c.DynamicNTK() as s:
            return F.rope_scale_dynamic_ntk(
                unscaled, length=length, factor=s.factor, original_max_length=s.original_max_length
            )
        case c.Llama3Scaling() as s:
            return F.rope_scale_llama3(
                unscaled,
                factor=s.factor,
                low_freq_factor=s.low_freq_factor,
                high_freq_factor=s.high_freq_factor,
                original_max_length=s.original_max_length,
            )
        case c.Yarn() as s:
            return F.rope_scale_yarn(
                unscaled,
                base=rope.base,
                factor=s.factor,
                original_max_length=s.original_max_length,
                beta_fast=s.beta_fast,
                beta_slow=s.beta_slow,
            )
        case c.LongRope() as s:
            return F.rope_scale_longrope(
                unscaled,
                jnp.asarray(s.short_factors, jnp.float32),
                jnp.asarray(s.long_factors, jnp.float32),
                length=length,
                original_max_length=s.original_max_length,
            )


def rope_attention_factor(rope: c.Rope) -> float:
    """RoPE attention factor, which multiplies rotated queries and keys (YaRN, LongRoPE; else 1)."""
    match rope.scaling:
        case c.Yarn() as s:
            configured, computed = s.attention_factor, F.yarn_attention_factor(s.factor)
        case c.LongRope() as s:
            configured = s.attention_factor
            computed = F.longrope_attention_factor(s.max_length, s.original_max_length)
        case _:
            return 1.0
    return computed if configured is None else configured


def rope_invalidates_cache(
    config: c.TransformerConfig, length: Int[Array, "*batch"]
) -> Bool[Array, "*batch"]:
    """Whether reaching this length changes the rotation of cached keys (dynamic NTK, LongRoPE)."""
    invalidated = jnp.zeros(length.shape, bool)
    for rope in config.attention.positions:
        match rope:
            case c.Rope(scaling=c.DynamicNTK(original_max_length=original)):
                invalidated |= length > original
            case c.Rope(scaling=c.LongRope(original_max_length=original)):
                invalidated |= length == original + 1
    return invalidated
