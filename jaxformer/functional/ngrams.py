"""Hashed n-grams: the last tokens of each token, ids of their n-grams, and the gate of streams."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.ring import zigzag_order

NO_TOKEN = -1  # in place of a token before the document
MAX_NGRAM_ROWS = 2**28  # a remainder and four more bits fit into 32


@typechecked
def recent_tokens(
    tokens: Integer[Array, "*batch T"],
    count: int,
    *,
    previous: Integer[Array, "*batch before"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    axis_name: str | None = None,
) -> tuple[Int[Array, "*batch T n"], Int[Array, "*batch before"]]:
    """Each token and the tokens before it, the latest first.

        recent[t, k] = tokens[t - k]     for k < count, -1 before the document

    To process a text in several calls, pass what one call returns second to the next.

    Args:
        tokens: Token ids.
        count: Tokens to return for each token, itself among them.
        previous: The count - 1 tokens before the first one, in the same document; None is none.
        segments: Document number of each token; a run of equal numbers is a document.
        valid: False for padding, which is skipped: its own result means nothing.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`; all ids are gathered.

    Returns:
        The tokens in int32, and the last count - 1 tokens of the text, oldest first.

    Raises:
        ValueError: If `previous` does not have count - 1 tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.recent_tokens(jnp.array([5, 6, 7]), 2)[0].tolist()
        [[5, -1], [6, 5], [7, 6]]

    References:
        Brown et al., Class-Based n-gram Models of Natural Language, 1992 (n-grams)
    """
    *batch, length = tokens.shape
    shape = *batch, count - 1
    before = jnp.full(shape, NO_TOKEN) if previous is None else previous.astype(jnp.int32)
    if before.shape != shape:
        raise ValueError(f"previous must have count - 1 tokens, {shape}; got {before.shape}.")
    masks = (x if x is None else jnp.broadcast_to(x, tokens.shape) for x in (segments, valid))
    tokens = tokens.astype(jnp.int32)
    if axis_name is None:
        return _recent_tokens(tokens, before, *masks)
    devices = jax.lax.axis_size(axis_name)
    order = np.asarray(zigzag_order(devices * length, devices))

    def whole(x: Any) -> Any:
        if x is None:
            return None
        every = jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)
        return every[..., np.argsort(order)]

    recent, last = _recent_tokens(whole(tokens), before, *map(whole, masks))
    start = jax.lax.axis_index(axis_name) * length
    own = jax.lax.dynamic_slice_in_dim(jnp.asarray(order), start, length)
    return jnp.take(recent, own, axis=-2), last


def _recent_tokens(
    tokens: Array, before: Array, segments: Array | None, valid: Array | None
) -> tuple[Array, Array]:
    """`recent_tokens` of one device; padding is moved behind the tokens."""
    count = before.shape[-1] + 1
    valid = jnp.ones(tokens.shape, bool) if valid is None else valid
    order = jnp.argsort(~valid, axis=-1, stable=True)
    history = jnp.concatenate([before, jnp.take_along_axis(tokens, order, axis=-1)], axis=-1)
    number = jnp.cumsum(valid, axis=-1), jnp.sum(valid, axis=-1, keepdims=True)  # and of the last
    place = jnp.concatenate(number, axis=-1) + count - 2
    places = jnp.maximum(place[..., None] - jnp.arange(count).reshape(*(1,) * place.ndim, -1), 0)

    def take(x: Array) -> Array:
        flat = jnp.take_along_axis(x, places.reshape(*places.shape[:-2], -1), axis=-1)
        return flat.reshape(places.shape)

    recent = take(history)
    if segments is not None:
        segments = jnp.take_along_axis(segments, order, axis=-1)
        begins = segments[..., 1:] != segments[..., :-1]
        no_axes = [(0, 0)] * (begins.ndim - 1)
        document = jnp.pad(jnp.cumsum(begins, axis=-1), [*no_axes, (count, 0)])
        document = take(document)
        recent = jnp.where(document == document[..., :1], recent, NO_TOKEN)
    return recent[..., :-1, :], recent[..., -1, : count - 1][..., ::-1]


@typechecked
def ngram_ids(
    recent: Int[Array, "*batch T n"],
    multipliers: Sequence[int],
    vocab_sizes: Sequence[int],
    *,
    start_token: int,
) -> Int[Array, "*batch T N"]:
    """Rows of a table of hashed n-grams, one for each head.

        id = (x[0] m[0] xor x[1] m[1] xor ... xor x[g - 1] m[g - 1]) mod p + offset

    for n-grams of g = 2, 3, ..., len(m) tokens, each with equally many heads. x[k] is the token k
    places back, p the number of rows of a head, and its offset the rows of all heads before it.
    `start_token` stands for tokens before the document, and for all tokens before a `start_token`.
    Products and their xor are unsigned 64-bit integers, computed in halves of 32 bits.

    Args:
        recent: Each token and those before it, from `recent_tokens`.
        multipliers: m, below 2 ** 64. Released ones are odd and below 2 ** 63 / vocabulary.
        vocab_sizes: p of each head, at most 2 ** 28; the heads of 2-grams come first.
        start_token: An id that ends documents, such as eos.

    Returns:
        Ids of the heads, from 0 to the sum of all p, in int32.

    Raises:
        ValueError: If `recent` has fewer tokens than there are multipliers.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> F.ngram_ids(jnp.array([[5, 6]]), (3, 9), (7, 11), start_token=0).tolist()
        [[1, 9]]
        >>> hashed = (5 * 3) ^ (6 * 9)
        >>> hashed % 7, 7 + hashed % 11
        (1, 9)

    References:
        Cheng et al., Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large
        Language Models (Engram), 2026. arXiv:2601.07372, section 2.2, and its released code
    """
    size = len(multipliers)
    if recent.shape[-1] < size:
        raise ValueError(
            f"recent must have a token for each of {size} multipliers; got {recent.shape[-1]}."
        )
    has_ended, ends = jnp.zeros(recent.shape[:-1], bool), []
    high, low = _wide_product(recent[..., 0].astype(jnp.uint32), multipliers[0])
    for k in range(1, size):
        token = recent[..., k]
        has_ended |= (token == start_token) | (token == NO_TOKEN)
        token = jnp.where(has_ended, start_token, token).astype(jnp.uint32)
        product = _wide_product(token, multipliers[k])
        high, low = high ^ product[0], low ^ product[1]
        ends.append((high, low))
    heads = len(vocab_sizes) // (size - 1)
    highs, lows = (jnp.repeat(jnp.stack(x, -1), heads, axis=-1) for x in zip(*ends, strict=True))
    rows = _remainder(highs, lows, np.asarray(vocab_sizes, np.uint32)).astype(jnp.int32)
    offsets = np.cumsum([0, *vocab_sizes[:-1]], dtype=np.int32)
    return rows + jnp.broadcast_to(offsets, rows.shape)


def _wide_product(x: UInt32[Array, "..."], factor: int) -> tuple[Array, Array]:
    """The upper and lower 32 bits of x * factor, from products of 16 bits."""
    high, low = np.uint32(factor >> 32), factor & 0xFFFFFFFF
    low_0, low_1 = np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    x_0, x_1 = x & 0xFFFF, x >> 16
    middle_0, middle_1 = x_1 * low_0, x_0 * low_1
    bottom = x_0 * low_0
    middle = (bottom >> 16) + (middle_0 & 0xFFFF) + (middle_1 & 0xFFFF)
    top = x_1 * low_1 + (middle_0 >> 16) + (middle_1 >> 16) + (middle >> 16)
    return top + x * high, (bottom & 0xFFFF) | (middle << 16)


def _remainder(
    high: UInt32[Array, "*batch N"], low: UInt32[Array, "*batch N"], divisors: np.ndarray
) -> UInt32[Array, "*batch N"]:
    """(high * 2 ** 32 + low) mod each divisor, four bits at a time from the top."""
    remainder, divisor = jnp.zeros_like(high), jnp.broadcast_to(divisors, high.shape)
    for word in (high, low):
        for shift in range(28, -4, -4):
            remainder = ((remainder << 4) | ((word >> shift) & 15)) % divisor
    return remainder


@typechecked
def gate_ngrams(
    query: Float[Array, "*batch N D"],
    key: Float[Array, "*batch N D"],
    value: Float[Array, "*batch D"],
) -> Float[Array, "*batch N D"]:
    """Gate the value of an n-gram in each stream by how well its key fits the stream.

        s = query . key / sqrt(D)
        y = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) value

    Args:
        query: Normalised streams of a token.
        key: Normalised keys, one for each stream.
        value: One value for all streams.

    Returns:
        The gated values, computed in float32, in the dtype of `value`.

    References:
        Cheng et al., 2026. arXiv:2601.07372, sections 2.3 and 2.4; the root of s is of the released
        code and of Qwen 4, the equation has none
    """
    wide_query, wide_key = query.astype(jnp.float32), key.astype(jnp.float32)
    scores = jnp.sum(wide_query * wide_key, axis=-1, keepdims=True) * query.shape[-1] ** -0.5
    roots = jnp.sign(scores) * jnp.sqrt(jnp.maximum(jnp.abs(scores), 1e-6))
    wide = jax.nn.sigmoid(roots) * value.astype(jnp.float32)[..., None, :]
    return wide.astype(value.dtype)
