"""`generate` decodes in one compiled loop; `stream` yields tokens one by one."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxformer.config import TransformerConfig
from jaxformer.generation.checks import check_count
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    decode_next,
    decode_tokens,
    decode_with_beams,
    start_decoding,
)
from jaxformer.generation.prompts import (
    Request,
    flatten_batch,
    make_request,
    pad_batch,
    pad_to_bucket,
)
from jaxformer.generation.samplers import Beam, Greedy, Sample, Sampler
from jaxformer.generation.unrolled import should_unroll, unroll
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.parallel import (
    abstract_parameters,
    check_divisible,
    num_batch_shards,
    put_replicated,
    shardings,
)


def generate(
    config: TransformerConfig,
    params: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampler: Sampler | Beam = Greedy(),
    key: PRNGKeyArray | None = None,
    lengths: Any = None,
    stop_tokens: Any = (),
    source: Any = None,
    source_segments: Any = None,
    vocab_size: int | None = None,
    prefill_chunk: int | None = None,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> Int[Array, "*batch P_plus_new"]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    On CPUs and GPUs, models of up to 32 layers and 250M parameters decode as `unroll` makes them,
    which copies the parameters at each call; what it returned before is taken as it is, and so are
    larger models. Prompts share a compiled program with others of about their length.

    Args:
        config: A decoder, or an encoder-decoder; its prompt is then the decoder's start token.
        params: Its parameters.
        prompt: Token ids, at least one a row: an array, a list of rows of any lengths, or one flat
            list, a text without batch axes.
        max_new_tokens: How many to add.
        sampler: `Greedy()`, `Sample(...)` or `Beam(...)`.
        key: Random key; `Sample` needs one.
        lengths: Tokens of each row of an array whose rows are padded behind; they follow from a
            list of rows.
        stop_tokens: Ids that end a row: ``2`` or ``(2, 5)`` for all rows; a list of rows or an
            array ``[*batch, K]`` with those of each row, -1 where it has fewer.
        source: Token ids that an encoder-decoder reads, in the forms and with the batch axes of
            `prompt`.
        source_segments: 0 marks padding of an array's rows; they follow from a list of rows.
        vocab_size: Only ids below it are chosen: the tokenizer's number of tokens where the model
            has more. None allows all.
        prefill_chunk: Read the prompt so many tokens at a time, to save memory; None reads it at
            once.
        dtype: Of the computation and the cache.
        mesh: Devices that share the work, from `parallel.make_mesh`: heads, hidden width,
            vocabulary and caches along "tensor", rows along "data", "fsdp" and "expert"; those
            along "context" do the same. Parameters that are not there yet are moved. The tokens are
            those of one device.

    Returns:
        In each row the prompt, the new tokens behind it, and from its end on its last token. Rows
        are as wide as the prompt with its padding, and `max_new_tokens` more.

    Raises:
        ValueError: An empty prompt or source, a token id outside its vocabulary, more tokens than
            learned positions (the last new one is not read and needs none), lengths, stop tokens,
            sources or segments that do not fit the rows, a source missing or not read, a number
            that is not whole or out of range, a missing key, a mesh that does not fit, an encoder
            alone, parameters of another model, or logits of the prompt that are NaN or infinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer import Transformer, generate, zoo
        >>> config = zoo.get("llama-2-7b").tiny()
        >>> params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
        >>> params = jax.tree.map(jnp.zeros_like, params)  # logits are 0, so token 0 wins
        >>> generate(config, params, [[5, 6, 7], [8]], max_new_tokens=2)
        Array([[5, 6, 7, 0, 0],
               [8, 0, 0, 0, 0]], dtype=int32)
    """
    key = _check_arguments(sampler, prefill_chunk, key)
    request = make_request(
        config,
        prompt,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        stop_tokens=stop_tokens,
        vocab_size=vocab_size,
        source=source,
        source_segments=source_segments,
    )
    config, params = _maybe_unroll(config, params)
    decode_config = DecodeConfig(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh)
    *batch_shape, width = request.prompt.shape
    count, request = request.lengths.size, pad_to_bucket(request, config.max_length)
    if mesh is not None:
        params, request, key = _shard_inputs(mesh, config, params, request, key)
    if isinstance(sampler, Beam):
        tokens, finite = decode_with_beams(decode_config, sampler, params, request)
    else:
        tokens, finite = decode_tokens(decode_config, sampler, params, request, key)
    _check_finite(finite)
    tokens = tokens if mesh is None else tokens[:count].reshape(*batch_shape, -1)
    return tokens[..., : width + max_new_tokens]


def stream(
    config: TransformerConfig,
    params: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: PRNGKeyArray | None = None,
    dtype: DTypeLike = jnp.float32,
    prefill_chunk: int | None = None,
    mesh: Mesh | None = None,
    **request_options: Any,
) -> Iterator[Int[np.ndarray, "*batch"]]:
    """Yield the tokens of `generate` one step at a time.

    Args:
        config: As for `generate`, like all that follow.
        params: The parameters.
        prompt: Token ids.
        max_new_tokens: How many to add.
        sampler: `Greedy()` or `Sample(...)`.
        key: Random key.
        dtype: Of the computation.
        prefill_chunk: Tokens of the prompt to read at a time.
        mesh: Devices that share the work.
        **request_options: `lengths`, `stop_tokens`, `source`, `source_segments`, `vocab_size`.

    Returns:
        An iterator over the next token of each row; a row that has ended repeats its stop token.
        It ends when all have, or after `max_new_tokens`.

    Raises:
        ValueError: As `generate`, and for `Beam(...)`.
    """
    if isinstance(sampler, Beam):
        raise ValueError(f"{sampler} knows its text only at the end of the search; use generate.")
    key = _check_arguments(sampler, prefill_chunk, key)
    request = make_request(config, prompt, max_new_tokens=max_new_tokens, **request_options)
    config, params = _maybe_unroll(config, params)
    decode_config = DecodeConfig(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh)
    request = pad_to_bucket(request, config.max_length)
    batch_shape, count = request.prompt.shape[:-1], request.lengths.size
    decode_inputs = params, request, key
    if mesh is not None:
        decode_inputs = _shard_inputs(mesh, config, *decode_inputs)

    def tokens() -> Iterator[Int[np.ndarray, "*batch"]]:
        state = start_decoding(decode_config, sampler, *decode_inputs)
        _check_finite(state.prompt_logits_finite)
        yield np.asarray(state.last_token)[:count].reshape(batch_shape)
        while int(state.num_generated) < max_new_tokens and not bool(jnp.all(state.is_done)):
            state = decode_next(decode_config, sampler, *decode_inputs, state)
            yield np.asarray(state.last_token)[:count].reshape(batch_shape)

    return tokens()


def _shard_inputs(
    mesh: Mesh, config: TransformerConfig, params: Any, request: Request, key: PRNGKeyArray
) -> tuple[Any, Request, PRNGKeyArray]:
    """Shard parameters, request and key over the mesh, after checking that they divide."""
    request = pad_batch(flatten_batch(request), num_batch_shards(mesh.shape))
    check_divisible(config, mesh.shape, batch_size=len(request.lengths))
    params = jax.device_put(params, shardings(abstract_parameters(config, mesh)))
    data = put_replicated(jax.random.key_data(key), mesh)
    return (
        params,
        put_replicated(request, mesh),
        jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)),
    )


def _maybe_unroll(config: TransformerConfig, params: Any) -> tuple[TransformerConfig, Any]:
    """Configuration and parameters, unrolled where that decodes faster on this platform."""
    if should_unroll(config):
        return unroll(config, params)
    check_parameters(config, params)
    return config, params


def _check_finite(finite: Bool[Array, ""]) -> None:
    if not finite:
        raise ValueError("The prompt's logits are NaN or infinite: look at params.")


def _check_arguments(
    sampler: Sampler | Beam, prefill_chunk: int | None, key: PRNGKeyArray | None
) -> PRNGKeyArray:
    """Check sampler, chunk and key; return the key, or a dummy key for samplers without one."""
    if not isinstance(sampler, Sampler | Beam):
        raise ValueError(f"sampler must be Greedy(), Sample(...) or Beam(...); got {sampler!r}.")
    if prefill_chunk is not None:
        check_count("prefill_chunk", prefill_chunk)
    if key is None and isinstance(sampler, Sample):
        raise ValueError(f"{sampler} draws at random: pass key=jax.random.key(seed).")
    return jax.random.key(0) if key is None else key
