"""Attention inputs made once per forward pass: masks, biases, rotations, positions."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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


class NgramInputs(NamedTuple):
    """Each token and those before it, latest first, and what the convolution of n-grams reads."""

    tokens: Int[Array, "*batch T n"]
    mixer: c.MixerInputs


class LayerInputs(NamedTuple):
    """What a layer reads beside x and its state.

    Attributes:
        self_attention: Inputs of self-attention, or of what stands in its place.
        cross_attention: Inputs of cross-attention.
        encoder_output: Last hidden vectors of the encoder, if there are any to read.
        ngrams: What a layer with hashed n-grams reads.
    """

    self_attention: MixingInputs
    cross_attention: AttentionInputs = NO_INPUTS
    encoder_output: Float[Array, "*batch S D"] | None = None
    ngrams: NgramInputs | None = None


ScoreBiasFunction = Callable[
    [c.ScoreBias, int, Int[Array, "*batch T"], Int[Array, "*batch S"]], F.AttentionBias
]


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

    @property
    def mixer_inputs(self) -> c.MixerInputs:
        """What a recurrence reads besides x."""
        return c.MixerInputs(self.queries.positions, self.queries.segments, self.valid)  # type: ignore[arg-type]

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


@dataclass(frozen=True, eq=False)
class LayerInputMaker:
    """Makes the inputs of a stack's layers; layers with equal options share the arrays.

    Attributes:
        runtime: Run-time options.
        tokens: The new tokens, and what they attend to.
        score_bias: Returns the bias of an option and a number of heads between positions.
        causal: Whether keys after the query are masked.
        contiguous_positions: As in `F.MaskRule`, for tokens without a cache before them.
        num_axes: Axes of the queries, ``[*batch, T, N, H]``.
        made: What was made, by its function and options.
    """

    runtime: RuntimeConfig
    tokens: AttendedTokens
    score_bias: ScoreBiasFunction
    causal: bool
    contiguous_positions: bool
    num_axes: int
    made: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, layer: c.Layer) -> MixingInputs:
        """Return what the attention of a layer reads besides x."""
        kind: Any = layer.attention
        if kind.parts != (kind,):
            return tuple(self(replace(layer, attention=part)) for part in kind.parts)
        if not kind.has_scores:
            return self.tokens.mixer_inputs
        heads, window, scaling = kind.num_heads, layer.window, kind.query_scaling
        rope, bias = layer.rope, None if layer.per_layer_score_bias else layer.score_bias
        gathered = layer.transformer_xl is not None
        all_heads_alike = getattr(window, "pattern", None) is None
        return AttentionInputs(
            self.once(self.mask, window, 0 if all_heads_alike else heads, gathered),
            None if bias is None else self.once(self.bias, bias, window, heads),
            None if rope is None else self.once(self.rotations, rope, kind.rope_head_dim),
            self.tokens.queries.positions,
            self.tokens.keys(window, gathered).positions,
            None if scaling is None else self.once(self.query_scale, scaling),
        )

    def once(self, make: Callable[..., Any], *options: Any) -> Any:
        """Return `make(*options)`, which is made once for equal options."""
        key = make.__name__, options
        if key not in self.made:
            self.made[key] = make(*options)
        return self.made[key]

    def mask(self, window: c.Window, num_heads: int, gathered: bool) -> Any:
        """Make the mask of a window, of this device's heads if it differs between heads."""
        width, chunk, blocks, head_shifts = None, None, None, None
        if isinstance(window, int):
            width = window
        elif window is not None:
            chunk, blocks = window.size, window.pattern
        if blocks is not None:
            shifts = blocks.head_shifts(num_heads)
            head_shifts = local_shard(shifts, self.runtime.mesh_axes.tensor, axis=0)
        follows_cache = self.tokens.key_positions and not self.runtime.cache_is_empty
        is_ring = self.runtime.mesh_axes.context is not None
        rule = F.MaskRule(
            causal=self.causal,
            window=width,
            lookahead=0 if self.causal or width is None else width - 1,
            contiguous_positions=self.contiguous_positions and not (follows_cache or is_ring),
            chunk=chunk,
            block_sparse=blocks,
            max_segments=self.runtime.max_segments,
        )
        queries, keys = self.tokens.queries, self.tokens.keys(window, gathered)
        segments = queries.segments, keys.segments
        if any(x is None for x in segments):
            segments = None, None
        mask = F.AttentionMask(queries.positions, keys.positions, *segments, rule, head_shifts)
        if gathered:
            return F.materialize(mask, num_axes=self.num_axes)
        return prepare(mask, self.runtime, self.num_axes)

    def bias(self, option: c.ScoreBias, window: c.Window, num_heads: int) -> Any:
        """Make the score bias of all layers with this option and window."""
        positions = self.tokens.queries.positions, self.tokens.keys(window, False).positions
        return prepare(self.score_bias(option, num_heads, *positions), self.runtime, self.num_axes)

    def rotations(self, rope: c.Rope, width: int) -> Complex64[Array, "*batch T C"]:
        """Make the rotations of RoPE."""
        return token_rotations(rope, width, self.tokens.queries.positions, self.tokens.length)

    def query_scale(self, scaling: c.QueryScaling | c.QueryPower) -> Float[Array, "*batch T"]:
        """Make the factors of the queries."""
        return scaling(self.tokens.queries.positions)


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
