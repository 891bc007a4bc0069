"""A conversation with its KV cache: an answer reads only new tokens, and compiles nothing."""

from collections.abc import Generator, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.config.attention.layer_sizes import KVCache, LatentCache, SharedCache
from jaxformer.generation.decode_inputs import check_logits_finite, prepare_inputs
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    DecodeState,
    append_token,
    decode_next,
    logits_finite,
    mask_unused_ids,
)
from jaxformer.generation.prompts import Request, make_request, num_processed_tokens
from jaxformer.generation.samplers import Greedy, Sampler
from jaxformer.generation.steps import Context, cache_specs, last_logits
from jaxformer.layers import Cache, Transformer, empty_cache
from jaxformer.layers.cache import arrange_cache, distinct_windows, is_ring_buffer
from jaxformer.layers.layouts import Layout, layout_of
from jaxformer.parallel import batch_spec

CHUNK = 64  # tokens of a prompt that are read at a time
MIN_ROOM = 256  # tokens; larger rooms are powers of two, as each is compiled
ANSWERS_AHEAD = 3  # for which a new room is large enough


class Conversation:
    """Answers to prompts; each prompt continues the one before and its answer.

        conversation = Conversation(config, params, max_new_tokens=160, stop_tokens=(2,))
        tokens = list(conversation.answer(prompt, key=key))

    An answer has the tokens of `stream`. Tokens at the beginning of a prompt that the cache has are
    not read again; layers whose cache is a ring buffer or a state read all, if a prompt does not
    continue all that was read, and so do RoPE scalings that depend on the length.

    Args:
        config: A decoder.
        params: The parameters, ``variables["params"]``.
        max_new_tokens: Maximum number of tokens of an answer.
        sampler: `Greedy()` or `Sample(...)`.
        stop_tokens: Ids that end an answer.
        vocab_size: Only ids below it are generated; None allows all.
        dtype: Dtype of computation and cache.
        mesh: Device mesh, as for `generate`.

    Raises:
        ValueError: As in `generate`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        params: Any,
        *,
        max_new_tokens: int,
        sampler: Sampler = Greedy(),
        stop_tokens: Any = (),
        vocab_size: int | None = None,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ):
        options = DecodeConfig(config, max_new_tokens, None, jnp.dtype(dtype), mesh, sampler)
        self._request_options = {"stop_tokens": stop_tokens, "vocab_size": vocab_size}
        request = make_request(config, [[0]], max_new_tokens=1, **self._request_options)
        key = jax.random.key(0)
        self._params, self._request, _ = prepare_inputs(options, params, request, key)
        self._options = options
        self._context: Context | None = None
        self._tokens: list[int] = []  # in the cache

    def answer(
        self, prompt: Sequence[int], *, key: PRNGKeyArray | None = None
    ) -> Generator[int, None, None]:
        """Yield the tokens of the answer to a prompt, the stop token included.

        Args:
            prompt: Token ids of the whole conversation so far.
            key: Random key, required by `Sample`.

        Raises:
            ValueError: A token is outside the vocabulary, there are more tokens than learned
                positions, or logits of the prompt are NaN or infinite.
        """
        options, tokens = self._options, [*prompt]
        count = options.max_new_tokens
        make_request(options.config, [tokens], max_new_tokens=count, **self._request_options)
        key = jax.random.key(0) if key is None else key
        logits, context = self._read(tokens)
        state = _start_answer(options, self._request, key, logits, context, len(tokens))
        check_logits_finite(state.prompt_logits_finite)
        try:
            while True:
                tokens.append(int(np.asarray(state.last_token).flat[0]))
                yield tokens[-1]
                if int(state.num_generated) >= count or bool(np.asarray(state.is_done).flat[0]):
                    return
                state = decode_next(options, self._params, self._request, key, state)
        finally:  # an interrupt may come while the state is donated
            if not any(x.is_deleted() for x in jax.tree.leaves(state.context)):
                self._context = state.context
                self._tokens = tokens[: int(np.asarray(state.context.cache.length).flat[0])]

    def _read(self, tokens: list[int]) -> tuple[Array, Context]:
        """Read the tokens that the cache does not have; also return the logits after the last."""
        context, options, length = self._kept(tokens), self._options, len(tokens)
        self._context, kept = None, len(self._tokens)
        rows = self._request.lengths.size
        for first in range(kept, length, CHUNK):
            part = tokens[first : first + CHUNK]
            chunk = np.zeros((rows, CHUNK), np.int32)
            chunk[:, : len(part)] = part
            numbers = np.asarray([first, len(part), length], np.int32)
            context = jax.device_put(context, _shardings(options))
            logits, context = _read_chunk(
                options, self._params, self._request, context, chunk, numbers
            )
        return logits, context

    def _kept(self, tokens: list[int]) -> Context:
        """The cache that has the beginning of the tokens, or an empty one."""
        config, last = self._options.config, len(tokens) - 1  # read again for its logits
        needed = num_processed_tokens(len(tokens), self._options.max_new_tokens)
        shared = min(len(commonprefix([self._tokens, tokens])), last)
        context = self._context
        if context is not None and context.tokens.shape[-1] >= needed:
            if _depends_on_length(config):
                shared = 0
            if shared == len(self._tokens) or (shared and _can_shorten(config, context.cache)):
                self._tokens = tokens[:shared]
                return context
        room = context.tokens.shape[-1] if context is not None else 0
        if room < needed:
            room = max(MIN_ROOM, 1 << (ANSWERS_AHEAD * needed - 1).bit_length())
        self._tokens = []
        rows = self._request.lengths.size
        room = min(room, config.max_length or room)
        return _empty_context(self._options, rows, room, layout_of(self._params))


def _depends_on_length(config: TransformerConfig) -> bool:
    ropes = (layer.rope for layer in config.layers)
    return any(rope is not None and rope.depends_on_length for rope in ropes)


def _can_shorten(config: TransformerConfig, cache: Cache) -> bool:
    """Whether the cache without its last tokens is the cache of the tokens before."""
    windows = zip(distinct_windows(config), cache.positions, strict=True)
    layers = (*cache.first_layers, *cache.layers, *cache.tail)
    return not any(is_ring_buffer(window, x.shape[-1]) for window, x in windows) and all(
        isinstance(layer.self_attention, KVCache | SharedCache | LatentCache) for layer in layers
    )


def _shardings(options: DecodeConfig) -> Any:
    """Shardings of a context: equal objects, or else programs are compiled again."""
    mesh = options.mesh
    if mesh is None:
        return jax.devices()[0]
    rows, tensor = batch_spec(mesh.shape)[0], "tensor" if mesh.shape.get("tensor", 1) > 1 else None
    specs: Any = (P(rows), cache_specs(rows, tensor))
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    return Context(*jax.tree.map(lambda x: NamedSharding(mesh, x), specs, is_leaf=is_spec))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_context(options: DecodeConfig, rows: int, room: int, layout: Layout) -> Context:
    devices = 1 if options.mesh is None else options.mesh.shape.get("tensor", 1)
    cache = empty_cache(
        options.config, (rows,), room, dtype=options.dtype, tensor_parallel_size=devices
    )
    cache = arrange_cache(options.config, cache, layout)
    return Context(jnp.zeros((rows, room), jnp.int32), cache)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _read_chunk(
    options: DecodeConfig,
    params: Any,
    request: Request,
    context: Context,
    chunk: Int[Array, "B C"],
    numbers: Int[Array, "3"],
) -> tuple[Float[Array, "B V"], Context]:
    """Read a chunk after the first tokens of a context; the others are forgotten.

    Args:
        options: Options of decoding.
        params: Parameters.
        request: Its vocabulary is allowed.
        context: Context, donated.
        chunk: Tokens, right-padded.
        numbers: Tokens of the context to keep, tokens of the chunk, and length of the prompt.
    """
    kept, count, length = numbers
    places, cache = jnp.arange(chunk.shape[-1]), context.cache
    is_token = jnp.broadcast_to(places < count, chunk.shape)
    cache = cache.shorten(jnp.full_like(cache.length, kept))
    cache = cache._replace(min_rope_length=jnp.full_like(cache.length, length))
    logits, cache = last_logits(
        Transformer(options.config, dtype=options.dtype),
        options.mesh,
        params,
        chunk,
        cache=cache,
        segments=is_token.astype(jnp.int32),
        logits_at=jnp.broadcast_to(count - 1, (len(chunk), 1)),
    )
    slots = jnp.where(is_token, kept + places, context.tokens.shape[-1])
    tokens = F.write_slots(context.tokens, chunk, slots)
    return mask_unused_ids(logits, request.vocab_size), Context(tokens, cache)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _start_answer(
    options: DecodeConfig,
    request: Request,
    key: PRNGKeyArray,
    logits: Float[Array, "B V"],
    context: Context,
    length: Int[Array, ""],
) -> DecodeState:
    """Sample the first token of an answer."""
    is_prompt = jnp.arange(context.tokens.shape[-1]) < length
    state = DecodeState(
        tokens=context.tokens,
        length=jnp.full_like(request.lengths, length),
        last_token=context.tokens[..., 0],
        is_done=jnp.zeros(request.lengths.shape, bool),
        seen_tokens=F.seen_tokens(
            jnp.where(is_prompt, context.tokens, -1), options.config.vocab_size
        ),
        context=context,
        num_generated=jnp.int32(0),
        prompt_logits_finite=logits_finite(options, logits),
    )
    return append_token(options, request, key, state, logits)
