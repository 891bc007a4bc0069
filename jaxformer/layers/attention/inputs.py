"""Attention inputs made once per forward pass: masks, biases, rotations, positions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as memoize
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex64, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers.cache import Cache, CacheUpdate, update_positions
from jaxformer.layers.parameters import local_shard
from jaxformer.layers.rope import token_rotations
from jaxformer.layers.runtime import RuntimeConfig


class TokenPositions(NamedTuple):
    """Position and segment (document) of each token; segments None means one document.

    Both have the same shape; [T] serves a whole batch.
    """

    positions: Int[Array, "*batch T"]
    segments: Int[Array, "*batch T"] | None = None


class AttentionInputs(NamedTuple):
    """Inputs of an attention module besides x: mask, bias, RoPE rotations, positions, query scale.

    Mask and bias are lazy, or arrays `[*batch, T, S]` and `[*batch, N, T, S]` where attention
    computes the full score matrix. Rotations are unit complex numbers.
    """

    mask: Bool[Array, "..."] | F.AttentionMask | None = None
    bias: Float[Array, "..."] | F.AttentionBias | None = None
    rotations: Complex64[Array, "*batch T C"] | None = None
    query_positions: Int[Array, "*batch T"] | None = None
    key_positions: Int[Array, "*batch S"] | None = None
    query_scale: Float[Array, "*batch T"] | None = None


NO_INPUTS = AttentionInputs()
MixingInputs = AttentionInputs | c.MixerInputs | tuple[Any, ...]  # of each of `HybridHeads.kinds`


class LayerInputs(NamedTuple):
    """What a layer reads beside x and its state.

    Attributes:
        self_attention: Inputs of self-attention, or of what stands in its place.
        cross_attention: Inputs of cross-attention.
        encoder_output: Last hidden vectors of the encoder, if there are any to read.
    """

    self_attention: MixingInputs
    cross_attention: AttentionInputs = NO_INPUTS
    encoder_output: Float[Array, "*batch S D"] | None = None


ScoreBiasFunction = Callable[
    [c.ScoreBias, int, Int[Array, "*batch T"], Int[Array, "*batch S"]], F.AttentionBias
]


def make_layer_inputs(
    config: c.TransformerConfig,
    runtime: RuntimeConfig,
    tokens: TokenPositions,
    cache: Cache | None,
    score_bias: ScoreBiasFunction,
    *,
    layers: Sequence[c.Layer],
    causal: bool,
    contiguous_positions: bool,
    num_axes: int,
) -> tuple[tuple[MixingInputs, ...], tuple[CacheUpdate | None, ...], tuple[Array, ...]]:
    """Make the inputs of each layer, its cache update, and new cache positions.

    Equal options share their arrays. With a cache, padding has segment 0 and no slot.

    Args:
        config: The model.
        runtime: Run-time options.
        tokens: Positions and segments of the new tokens.
        cache: The cache before them, or None.
        score_bias: Returns the bias of an option and a number of heads between positions.
        layers: Layers of the stack, up to the end of the first repetition of its pattern.
        causal: Whether keys after the query are masked.
        contiguous_positions: As in `F.MaskRule`.
        num_axes: Axes of the queries, ``[*batch, T, N, H]``.
    """
    attended = attended_tokens(config, runtime, tokens, cache)
    queries, updates = attended.queries, attended.cache_updates
    mixer_inputs: Any = c.MixerInputs(tokens.positions, queries.segments, attended.valid)  # type: ignore[arg-type]
    if runtime.mesh_axes.context is not None or not (cache is None or runtime.cache_is_empty):
        contiguous_positions = False

    @memoize
    def mask(window: c.Window, num_heads: int, gathered: bool) -> F.AttentionMask | Array | None:
        mask = self_attention_mask(
            window,
            queries,
            attended.keys(window, gathered),
            num_heads=num_heads,
            causal=causal,
            contiguous_positions=contiguous_positions,
            runtime=runtime,
        )
        if gathered:
            return F.materialize(mask, num_axes=num_axes)
        return prepare(mask, runtime, num_axes)

    @memoize
    def bias(
        option: c.ScoreBias, window: c.Window, num_heads: int
    ) -> F.AttentionBias | Array | None:
        positions = queries.positions, attended.keys(window, False).positions
        return prepare(score_bias(option, num_heads, *positions), runtime, num_axes)

    rotations = memoize(
        partial(token_rotations, positions=queries.positions, length=attended.length)
    )
    query_scale = memoize(lambda scaling: scaling(queries.positions))

    def layer_inputs(layer: c.Layer) -> MixingInputs:
        kind: Any = layer.attention
        window = layer.window
        if kind.parts != (kind,):
            return tuple(layer_inputs(replace(layer, attention=part)) for part in kind.parts)
        if not kind.has_scores:
            return mixer_inputs
        rope, heads = layer.rope, kind.num_heads
        option = None if layer.per_layer_score_bias else layer.score_bias
        gathered = layer.transformer_xl is not None
        all_heads_alike = window is None or isinstance(window, int)
        return AttentionInputs(
            mask(window, 0 if all_heads_alike else heads, gathered),
            None if option is None else bias(option, window, heads),
            None if rope is None else rotations(rope, kind.rope_head_dim),
            queries.positions,
            attended.keys(window, gathered).positions,
            None if kind.query_scaling is None else query_scale(kind.query_scaling),
        )

    cache_updates = tuple(updates.get(layer.window) for layer in layers)
    return tuple(map(layer_inputs, layers)), cache_updates, attended.cached_positions


class AttendedTokens(NamedTuple):
    """The new tokens as queries, and what they attend to.

    Attributes:
        queries: Positions of the new tokens; without segments if a cache keeps one document a row.
        all_tokens: Positions and segments over all devices of the context axis.
        key_positions: With a cache, positions of the attended keys of each window.
        cache_updates: With a cache, the update of each window's layers.
        cached_positions: With a cache, the new `Cache.positions`.
        valid: With a cache, False for padding.
        length: Length of each row, for RoPE scalings.
    """

    queries: TokenPositions
    all_tokens: TokenPositions
    key_positions: dict[c.Window, Array]
    cache_updates: dict[c.Window, CacheUpdate]
    cached_positions: tuple[Array, ...]
    valid: Array | None
    length: Array

    def keys(self, window: c.Window, gathered: bool) -> TokenPositions:
        """Return the keys of a window, `gathered` over all devices if there is no cache."""
        if self.key_positions:
            return TokenPositions(self.key_positions[window])
        return self.all_tokens if gathered else self.queries


def attended_tokens(
    config: c.TransformerConfig, runtime: RuntimeConfig, tokens: TokenPositions, cache: Cache | None
) -> AttendedTokens:
    """Return positions of queries and keys, and what the cache does with the new tokens."""
    all_tokens = all_gather_positions(tokens, runtime.mesh_axes.context)
    if cache is None:
        length = jnp.max(all_tokens.positions, axis=-1, initial=-1) + 1
        return AttendedTokens(tokens, all_tokens, {}, {}, (), None, length)
    valid = jnp.asarray(tokens.segments != 0)
    num_tokens = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    length = jnp.maximum(cache.min_rope_length, cache.length + num_tokens)
    keys_and_updates = update_positions(
        config, cache, tokens.positions, valid, cache_is_empty=runtime.cache_is_empty
    )
    queries = TokenPositions(tokens.positions)
    return AttendedTokens(queries, all_tokens, *keys_and_updates, valid, length)


def prepare(
    mask_or_bias: F.AttentionMask | F.AttentionBias | None, runtime: RuntimeConfig, num_axes: int
) -> Any:
    """Materialize a shared mask or bias, unless blockwise, fused or ring attention takes it."""
    if runtime.mesh_axes.context is not None:
        return mask_or_bias
    return F.materialize_for_xla(mask_or_bias, runtime.attention_implementation, num_axes)


def all_gather_positions(token_positions: TokenPositions, axis_name: str | None) -> TokenPositions:
    """All-gather positions and segments over the context axis."""
    if axis_name is None:
        return token_positions
    return jax.tree.map(
        lambda x: jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True), token_positions
    )


def self_attention_mask(
    window: c.Window,
    queries: TokenPositions,
    keys: TokenPositions,
    *,
    num_heads: int,
    causal: bool,
    contiguous_positions: bool,
    runtime: RuntimeConfig,
) -> F.AttentionMask:
    """Make the lazy mask of a layer, of this device's heads if it differs between heads."""
    width, blocks, head_shifts = None, None, None
    if isinstance(window, int):
        width = window
    elif window is not None:
        blocks = window.pattern
        shifts = blocks.head_shifts(num_heads)
        head_shifts = local_shard(shifts, runtime.mesh_axes.tensor, axis=0)
    rule = F.MaskRule(
        causal=causal,
        window=width,
        lookahead=0 if causal or width is None else width - 1,
        contiguous_positions=contiguous_positions,
        block_sparse=blocks,
        max_segments=runtime.max_segments,
    )
    segments = queries.segments, keys.segments
    if any(x is None for x in segments):
        segments = None, None
    return F.AttentionMask(queries.positions, keys.positions, *segments, rule, head_shifts)


def cross_attention_inputs(
    token_positions: TokenPositions,
    source_segments: Int[Array, "*batch S"] | None,
    cache: Cache | None,
    runtime: RuntimeConfig,
    *,
    num_axes: int,
) -> AttentionInputs:
    """Return the inputs of cross-attention; each row of a cache is one document."""
    if cache is not None:
        token_positions = TokenPositions(token_positions.positions)
        source_segments = cache.source_segments
    mask = cross_attention_mask(token_positions, source_segments)
    return AttentionInputs(prepare(mask, runtime, num_axes))


def cross_attention_mask(
    token_positions: TokenPositions, source_segments: Int[Array, "*batch S"] | None
) -> F.AttentionMask | None:
    """Lazy mask of cross-attention: source tokens of the same segment, never padding (0)."""
    if source_segments is None:
        return None
    valid = source_segments > 0
    if token_positions.segments is None:  # every query attends to every valid token
        key_segments = valid.astype(jnp.int32)
        shape = *key_segments.shape[:-1], token_positions.positions.shape[-1]
        query_segments = jnp.ones(shape, jnp.int32)
    else:
        query_segments = token_positions.segments
        key_segments = jnp.where(valid, source_segments, -1)
    zero_positions = jnp.zeros(key_segments.shape[-1:], jnp.int32)
    return F.AttentionMask(
        jnp.zeros_like(token_positions.positions), zero_positions, query_segments, key_segments
    )
