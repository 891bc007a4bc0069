"""`generate` decodes in one compiled loop; `stream` yields tokens one by one."""

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer.config import TransformerConfig
from jaxformer.generation.decode_inputs import check_logits_finite, prepare_inputs, rows_of_request
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    DecodeState,
    decode_next,
    decode_tokens,
    decode_with_beams,
    start_decoding,
)
from jaxformer.generation.prompts import make_request
from jaxformer.generation.samplers import Beam, Greedy, Sampler
from jaxformer.generation.speculation import (
    Drafts,
    Speculation,
    decode_speculatively,
    stream_speculatively,
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
    drafts: Drafts | None = None,
) -> Int[Array, "*batch P_plus_new"]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    On CPUs and GPUs, models decode faster with parameters of their own for each layer, as
    `load_pretrained` reads them. Stacked parameters, as from training, are copied so at each call
    if the model has up to 100 layers and 250M parameters; to avoid the copy, and for more
    parameters, pass the result of `unroll`. Prompts of similar length share a compiled program.

    Args:
        config: A decoder, or an encoder-decoder; its prompt is then the decoder's start token.
        params: The parameters, ``variables["params"]``. Kernels and tables are converted to `dtype`
            at each call, unless they have it.
        prompt: Token ids, at least one per row: an array, a list of rows of any lengths, or a flat
            list of ids, which has no batch axes.
        max_new_tokens: Maximum number of new tokens per row.
        sampler: `Greedy()`, `Sample(...)` or `Beam(...)`.
        key: Random key, required by `Sample`.
        lengths: Tokens per row of a right-padded array; not for a list of rows.
        stop_tokens: Ids that end a row: ``2`` or ``(2, 5)`` for all rows; per row as a list of rows
            or an array ``[*batch, K]``, padded with -1.
        source: Token ids of an encoder-decoder's source, as a list or an array with the batch axes
            of `prompt`.
        source_segments: 0 for padding of a source array, else 1; not for a list of rows.
        vocab_size: Only ids below it are generated: the size of the tokenizer, if the model has
            more ids. None allows all.
        prefill_chunk: Tokens per prefill step, to save memory; None processes the prompt at once.
        dtype: Dtype of computation and cache.
        mesh: Device mesh from `parallel.make_mesh`. Heads, hidden features, vocabulary and caches
            are sharded over "tensor", rows over "data", "fsdp" and "expert"; "context" replicates.
            Parameters are moved to their shardings. The result equals the result on one device.
        drafts: Who drafts tokens, for speculative decoding: a `DraftModel`, or the model itself by
            `MTP()`; see `speculate`.

    Returns:
        Each row is the prompt, the new tokens, and its last token repeated to the width of the
        prompt array plus `max_new_tokens`.

    Raises:
        ValueError: The prompt or source is empty, a token id is outside the vocabulary, there are
            more tokens than learned positions (the last new token needs none), the shape of an
            argument does not match the rows, a source is missing or not supported, a number is out
            of range, the key is missing, the mesh does not divide the model or rows, the model is
            an encoder, the parameters do not match it, or logits of the prompt are NaN or infinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer import Transformer, generate, zoo
        >>> config = zoo.get("llama-2-7b").tiny()
        >>> params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]
        >>> params = jax.tree.map(jnp.zeros_like, params)  # all logits are 0, with argmax 0
        >>> generate(config, params, [[5, 6, 7], [8]], max_new_tokens=2)
        Array([[5, 6, 7, 0, 0],
               [8, 0, 0, 0, 0]], dtype=int32)
    """
    options = DecodeConfig(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh, sampler)
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
    if drafts is not None:
        return decode_speculatively(options, params, drafts, request, key).tokens
    params, padded_request, key = prepare_inputs(options, params, request, key)
    if isinstance(sampler, Beam):
        tokens, finite = decode_with_beams(options, params, padded_request)
    else:
        tokens, finite = decode_tokens(options, params, padded_request, key)
    check_logits_finite(finite)
    return rows_of_request(options, request, tokens)


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
    drafts: Drafts | None = None,
    **request_options: Any,
) -> Generator[Int[np.ndarray, "*batch"], None, Speculation | None]:
    """Yield the tokens of `generate` one step at a time.

    Args:
        config: See `generate`, also for the other arguments.
        params: The parameters.
        prompt: Token ids.
        max_new_tokens: Maximum number of new tokens per row.
        sampler: `Greedy()` or `Sample(...)`.
        key: Random key.
        dtype: Dtype of computation and cache.
        prefill_chunk: Tokens per prefill step.
        mesh: Device mesh.
        drafts: Who drafts tokens: see `speculate`. Tokens then come in groups, and the iterator
            returns the `Speculation` at its end.
        **request_options: `lengths`, `stop_tokens`, `source`, `source_segments`, `vocab_size`.

    Returns:
        An iterator over the next token of each row; a finished row repeats its stop token. It ends
        when all rows are finished, or after `max_new_tokens`.

    Raises:
        ValueError: As in `generate`, and for `Beam(...)`.
    """
    if isinstance(sampler, Beam):
        raise ValueError(f"Beam search cannot stream; use generate for {sampler}.")
    options = DecodeConfig(config, max_new_tokens, prefill_chunk, jnp.dtype(dtype), mesh, sampler)
    request = make_request(config, prompt, max_new_tokens=max_new_tokens, **request_options)
    if drafts is not None:
        return stream_speculatively(options, params, drafts, request, key)
    decode_inputs = prepare_inputs(options, params, request, key)

    def last_tokens(state: DecodeState) -> Int[np.ndarray, "*batch"]:
        tokens = np.ravel(state.last_token)[: request.lengths.size]
        return tokens.reshape(request.lengths.shape)

    def tokens() -> Generator[Int[np.ndarray, "*batch"], None, None]:
        state = start_decoding(options, *decode_inputs)
        check_logits_finite(state.prompt_logits_finite)
        yield last_tokens(state)
        while int(state.num_generated) < max_new_tokens and not bool(jnp.all(state.is_done)):
            state = decode_next(options, *decode_inputs, state)
            yield last_tokens(state)

    return tokens()
