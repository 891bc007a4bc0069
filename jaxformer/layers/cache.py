"""KV caches: types, creation, capacity checks, updates; passed in and returned."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.checks import require, require_count
from jaxformer.config.attention.layer_sizes import CacheShape, KVCache, LatentCache, SharedCache
from jaxformer.config.positions import window_size
from jaxformer.functional.ngrams import NO_TOKEN
from jaxformer.layers.layouts import Layout, segments_of

# The position of an empty slot is after every query, so never seen.
EMPTY_SLOT_POSITION = jnp.iinfo(jnp.int32).max
SelfAttentionCache = Any  # one of these, or arrays of a `config.Mixer`
CacheT = TypeVar("CacheT", bound=KVCache | SharedCache | LatentCache)


class LayerCache(NamedTuple):
    """Cache of one layer: self-attention, and cross-attention if there is an encoder."""

    self_attention: SelfAttentionCache
    cross_attention: KVCache | None = None


class Cache(NamedTuple):
    """Cache of a whole model; made by `empty_cache`, updated by each call.

    A layer without a window has a slot for each of `capacity` tokens; a layer with a smaller window
    or chunk has a ring buffer with one slot per key of it. A cache is full after `capacity` tokens
    unless all layers have ring buffers. `positions` has the position of the token in each slot, one
    array per distinct window of the pattern. Rows may have different lengths.

    Keys are cached after RoPE. Scalings that depend on the length (dynamic NTK, LongRoPE) use the
    length of the row including the new tokens, or `min_rope_length` if that is larger: set it
    before a prompt is read in chunks. When such a scaling changes, cached keys become stale and the
    sequence must be read again, as `generate` does.
    """

    first_layers: tuple[LayerCache, ...]  # of the layers before the pattern, or of all
    layers: tuple[LayerCache, ...]  # of the pattern's layers, repetitions and passes along axis 0
    tail: tuple[LayerCache, ...]  # of the layers after the last whole pattern
    positions: tuple[Int[Array, "*batch S"], ...]
    length: Int[Array, "*batch"]  # tokens so far
    capacity: Int[Array, ""]
    min_rope_length: Int[Array, "*batch"]  # RoPE scalings use at least this length
    source_segments: Int[Array, "*batch S"] | None = None
    recent_tokens: Int[Array, "*batch before"] | None = None  # of hashed n-grams, the last ids

    @property
    def layout(self) -> Layout:
        """How the layers lie: as parameters of this layout."""
        return "stacked" if self.layers else "by_layer"

    def lengthen(self, valid: Int[Array, "*batch T"] | None) -> "Cache":
        """The cache with a length that counts new tokens: 1, and 0 for padding."""
        num_tokens = jnp.sum(jnp.asarray(valid), axis=-1, dtype=jnp.int32)
        return self._replace(length=self.length + num_tokens)

    def shorten(self, length: Int[Array, "*batch"]) -> "Cache":
        """The cache of the first `length` tokens of each row; a ring buffer has lost some keys."""
        positions = (
            jnp.where(x < length[..., None], x, EMPTY_SLOT_POSITION) for x in self.positions
        )
        return self._replace(positions=tuple(positions), length=length)


def distinct_windows(config: c.TransformerConfig) -> tuple[c.Window, ...]:
    """The distinct windows of the layers, in order: one array of `Cache.positions` each."""
    return tuple(dict.fromkeys(layer.window for layer in config.layers))


def num_slots(window: c.Window, capacity: int, lookahead: int = 0) -> int:
    """Number of cache slots of a layer with this window."""
    size = window_size(window)
    return capacity if size is None else min(capacity, size + lookahead)


def empty_cache(
    config: c.TransformerConfig,
    batch: tuple[int, ...],
    capacity: int,
    *,
    dtype: DTypeLike = jnp.float32,
    tensor_parallel_size: int = 1,
    lookahead: int = 0,
) -> Cache:
    """Make an empty cache.

    Args:
        config: A decoder, or an encoder-decoder, whose decoder uses the cache.
        batch: Batch axes of the tokens, such as ``(8,)``.
        capacity: Maximum number of tokens per row; TPUs are fastest with a multiple of 128.
        dtype: Dtype of the computation, hence of keys and values.
        tensor_parallel_size: Devices over which heads are sharded. If there are more devices than
            key-value heads, each device caches the one head that it reads.
        lookahead: Tokens that `Cache.shorten` may take back: ring buffers keep so many more keys.

    Returns:
        The cache of all devices, to be passed to the model with the first tokens. The model returns
        it with the layers as they lie in its parameters.

    Raises:
        ValueError: The model is an encoder, `batch` is no tuple, `capacity` or
            `tensor_parallel_size` is not an integer of at least 1, or `capacity` is above the
            number of learned positions.
    """
    if not config.topology.has_decoder:
        raise ValueError(
            "An Encoder attends in both directions, so it has no cache; got an Encoder."
        )
    require(isinstance(batch, tuple), f"batch must be a tuple, such as (8,); got {batch!r}.")
    require_count("capacity", capacity)
    require_count("tensor_parallel_size", tensor_parallel_size)
    if config.max_length is not None and capacity > config.max_length:
        raise ValueError(
            f"capacity must be at most {config.max_length}, the number of learned positions; got "
            f"{capacity}."
        )
    segments = config.segments("decoder", by_invocation=True)
    layers, ngram_size = config.invocations["decoder"], config.ngram_size
    stream_width = config.stream_width if ngram_size else 0

    def layer(index: int, *stacked: int) -> LayerCache:
        options = layers[index]
        slots = num_slots(options.window, capacity, lookahead)
        shape = CacheShape((*stacked, *batch), slots, dtype, config.model_dim, tensor_parallel_size)
        return LayerCache(options.empty_cache(shape, stream_width))

    groups = segments.groups()
    return Cache(
        first_layers=tuple(map(layer, groups["first_layers"])),
        layers=tuple(layer(i, segments.repeats) for i in groups["layers"]),
        tail=tuple(map(layer, groups["tail"])),
        positions=tuple(
            jnp.full((*batch, num_slots(window, capacity, lookahead)), EMPTY_SLOT_POSITION)
            for window in distinct_windows(config)
        ),
        length=jnp.zeros(batch, jnp.int32),
        capacity=jnp.int32(capacity),
        min_rope_length=jnp.zeros(batch, jnp.int32),
        recent_tokens=jnp.full((*batch, ngram_size - 1), NO_TOKEN) if ngram_size else None,
    )


def arrange_cache(config: c.TransformerConfig, cache: Cache, layout: Layout) -> Cache:
    """Return the cache in a layout."""
    if cache.layout == layout:
        return cache
    segments = partial(segments_of, config, "decoder", by_invocation=True)
    repeats = range(segments(cache.layout).repeats)
    apart = (jax.tree.map(lambda x, i=i: x[i], layer) for i in repeats for layer in cache.layers)
    layers = (*cache.first_layers, *apart, *cache.tail)
    first, period, *_ = new = segments(layout)
    repetitions = (layers[i : new.stop : period] for i in range(first, first + period))
    stacked = tuple(jax.tree.map(lambda *x: jnp.stack(x), *same) for same in repetitions)
    return cache._replace(first_layers=layers[:first], layers=stacked, tail=layers[new.stop :])


def is_ring_buffer(window: c.Window, slots: int) -> bool:
    """Whether the buffer is a ring buffer: slots are reused once they leave the window."""
    size = window_size(window)
    return size is not None and slots >= size


def overwrites_attended(window: c.Window, slots: int, num_tokens: int) -> bool:
    """Whether new tokens may overwrite a key that an earlier new token still attends to."""
    return is_ring_buffer(window, slots) and num_tokens > 1 + slots - (window_size(window) or 0)


def token_capacity(config: c.TransformerConfig, cache: Cache) -> int | None:
    """Number of tokens that fit; None if every layer has a ring buffer.

    A window wider than the capacity has no ring buffer, but a slot for each of `capacity` tokens.
    """
    sizes = (positions.shape[-1] for positions in cache.positions)
    windows = zip(distinct_windows(config), sizes, strict=True)
    return min((n for window, n in windows if not is_ring_buffer(window, n)), default=None)


def check_capacity(
    config: c.TransformerConfig,
    cache: Cache,
    valid: Bool[Array, "*batch T"],
    *,
    padded: bool = False,
) -> None:
    """Check that the new tokens fit in the cache, as far as values or shapes are known.

    Outside jit the check is exact. While tracing, the number of cached tokens is unknown, so the
    check compares only the number of new tokens with the capacity.

    Args:
        config: The model.
        cache: The cache before the new tokens.
        valid: False for padding.
        padded: Whether there may be padding.

    Raises:
        ValueError: The tokens do not fit.
    """
    capacity = token_capacity(config, cache)
    if capacity is None:
        return
    length = cache.length + jnp.sum(valid, axis=-1)
    if not isinstance(length, jax.core.Tracer):
        needed = int(jnp.max(length, initial=0))
    else:
        needed = 0 if padded else valid.shape[-1]
    if needed > capacity:
        raise ValueError(
            f"The cache holds {capacity} tokens; with the new ones there are {needed}. Use "
            f"empty_cache(..., capacity={needed})."
        )


def check_empty(cache: Cache) -> None:
    """Outside jit, check that the cache is empty if cache_is_empty=True."""
    length = cache.length
    if not isinstance(length, jax.core.Tracer) and (max_length := int(jnp.max(length, initial=0))):
        raise ValueError(
            f"cache_is_empty=True needs an empty cache; a row of this one has {max_length} tokens, "
            "which would be ignored."
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "layer_index"],
    meta_fields=["attends_to"],
)
@dataclass(frozen=True)
class CacheUpdate:
    """How the cache of a layer takes new tokens, and what their attention reads.

    Attributes:
        slots: Slot of each new token; an index past the last slot for padding.
        attends_to: The updated "buffer"; or the old "buffer_and_new" tokens, if the update could
            overwrite a key that an earlier new token still attends to; or only the "new" tokens, if
            the cache was empty.
        layer_index: Index along the leading axis of arrays that hold several layers.
    """

    slots: Int[Array, "*batch T"]
    attends_to: Literal["buffer", "buffer_and_new", "new"]
    layer_index: Int[Array, ""] | None = None


class LayerState(NamedTuple):
    """What a layer keeps, and what layers hand on to the next ones.

    Attributes:
        cache: Cache of self-attention, if there is one; with hashed n-grams a pair, with theirs.
        cache_update: How the cache takes the new tokens.
        cross_attention: Keys and values of the encoder's output, if they are cached.
        kv: Keys and values that later layers with `cross_layer_kv` read, by the window of these
            layers. A layer with this window and keys of its own replaces them; None until then.
            "layer 0" has those of its new tokens, for layers with a `value_residual`.
        embedding: Embedding of each token for this layer, if there are any.
        layer: Number of the layer, if its residual connection or its attention needs it.
        stack_input: Embeddings of the tokens, if there is a residual option.
    """

    cache: SelfAttentionCache = None
    cache_update: CacheUpdate | None = None
    cross_attention: KVCache | None = None
    kv: dict[str, KVCache | None] = {}
    embedding: Float[Array, "*batch T E"] | None = None
    layer: int | Int[Array, ""] | None = None
    stack_input: Float[Array, "*batch T D"] | None = None


NO_STATE = LayerState()


def update_positions(
    config: c.TransformerConfig,
    cache: Cache,
    positions: Int[Array, "*batch T"],
    valid: Bool[Array, "*batch T"],
    *,
    cache_is_empty: bool,
) -> tuple[dict[c.Window, Array], dict[c.Window, CacheUpdate], tuple[Array, ...]]:
    """Return each window's key positions and cache update, and the new `Cache.positions`."""
    key_positions, updates, updated_positions = dict[c.Window, Array](), {}, list[Array]()
    for window, old in zip(distinct_windows(config), cache.positions, strict=True):
        slots = F.ring_buffer_slots(positions, valid, old.shape[-1])
        new = jnp.where(valid, positions, EMPTY_SLOT_POSITION)
        updated_positions.append(F.write_slots(old, new, slots))
        if cache_is_empty:
            key_positions[window], updates[window] = new, CacheUpdate(slots, "new")
        elif overwrites_attended(window, old.shape[-1], new.shape[-1]):
            key_positions[window] = jnp.concatenate([old, new], axis=-1)
            updates[window] = CacheUpdate(slots, "buffer_and_new")
        else:
            key_positions[window] = updated_positions[-1]
            updates[window] = CacheUpdate(slots, "buffer")
    return key_positions, updates, tuple(updated_positions)


def update_cache(
    new: CacheT, cached: CacheT | None, update: CacheUpdate | None
) -> tuple[CacheT, CacheT | None]:
    """Write new entries to the cache; return the entries to attend to, and the updated cache.

    If a loop over layers carries the arrays of several layers, only the new entries are written:
    slicing a layer out and writing it back would copy it for every token.
    """
    if cached is None or update is None:
        return new, cached
    cache_type, new_by_head = type(cached), swap_heads_and_slots(new)

    def write(old: Array, x: Array) -> Array:
        """Write to the slots of every row, for all heads."""
        indices = jnp.broadcast_to(update.slots[..., None, :], x.shape[:-1])
        return F.write_slots(old, x, indices, layer_index=update.layer_index)

    written = cache_type(*map(write, cached, new_by_head))
    if update.attends_to == "new":
        return new, written
    appends = update.attends_to == "buffer_and_new"
    attended: Any = [get_layer(x, update) for x in (cached if appends else written)]
    if appends:
        attended = (
            jnp.concatenate([old, x.astype(old.dtype)], axis=-2)
            for old, x in zip(attended, new_by_head, strict=True)
        )
    return swap_heads_and_slots(cache_type(*attended)), written


def get_layer(x: Array, update: CacheUpdate | None) -> Array:
    """The layer of an update, along the leading axis; x itself if it holds a single layer."""
    if update is None or update.layer_index is None:
        return x
    return jax.lax.dynamic_index_in_dim(x, update.layer_index, keepdims=False)


def set_layer(x: Array, new: Array, update: CacheUpdate | None) -> Array:
    """Replace the layer of an update; return `new` itself if x holds a single layer."""
    if update is None or update.layer_index is None:
        return new
    return jax.lax.dynamic_update_index_in_dim(x, new, update.layer_index, 0)


def swap_heads_and_slots(x: CacheT) -> CacheT:
    """Swap the head and slot axes of every array."""
    return type(x)(*(jnp.swapaxes(array, -3, -2) for array in x))


def take_rows(cache: Cache, rows: Int[Array, " B"]) -> Cache:
    """Select rows of a cache's batch; rows may repeat (beam search).

    Args:
        cache: The cache of a batch with one axis.
        rows: Indices of rows.

    Returns:
        The cache of these rows, with the same capacity.
    """

    def take(tree: Any, axis: int) -> Any:
        return jax.tree.map(lambda x: jnp.take(x, rows, axis), tree)

    layers = take(cache.layers, 1)
    unstacked = take({**cache._asdict(), "layers": (), "capacity": None}, 0)
    return Cache(**{**unstacked, "layers": layers, "capacity": cache.capacity})
