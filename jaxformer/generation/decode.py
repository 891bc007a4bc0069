"""`generate` decodes in one compiled loop; `stream` yields tokens one by one."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxformer.checks import require_count
from jaxformer.config import TransformerConfig
from jaxformer.generation.decode_loop import (
    DecodeConfig,
    DecodeState,
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
from jaxformer.generation.unrolled import unroll_to_decode
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.parameter_metadata import cast_parameters, check_parameters
from jaxformer.parallel import (
    check_divisible,
    num_batch_shards,
    parameter_shardings,
    put_replicated,
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
    params, padded_request, key = prepare_inputs(options, params, request, key)
    if isinstance(sampler, Beam):
        tokens, finite = decode_with_beams(options, params, padded_request)
    else:
        tokens, finite = decode_tokens(options, params, padded_request, key)
    check_logits_finite(finite)
    *batch_shape, width = request.prompt.shape
    tokens = tokens if mesh is None else tokens[: request.lengths.size].reshape(*batch_shape, -1)
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
        config: See `generate`, also for the other arguments.
        params: The parameters.
        prompt: Token ids.
        max_new_tokens: Maximum number of new tokens per row.
        sampler: `Greedy()` or `Sample(...)`.
        key: Random key.
        dtype: Dtype of computation and cache.
        prefill_chunk: Tokens per prefill step.
        mesh: Device mesh.
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
    decode_inputs = prepare_inputs(options, params, request, key)

    def last_tokens(state: DecodeState) -> Int[np.ndarray, "*batch"]:
        tokens = np.asarray(state.last_token)[: request.lengths.size]
        return tokens.reshape(request.lengths.shape)

    def tokens() -> Iterator[Int[np.ndarray, "*batch"]]:
        state = start_decoding(options, *decode_inputs)
        check_logits_finite(state.prompt_logits_finite)
        yield last_tokens(state)
        while int(state.num_generated) < max_new_tokens and not bool(jnp.all(state.is_done)):
            state = decode_next(options, *decode_inputs, state)
            yield last_tokens(state)

    return tokens()


def prepare_inputs(
    options: DecodeConfig, params: Any, request: Request, key: PRNGKeyArray | None
) -> tuple[Any, Request, PRNGKeyArray]:
    """Check the arguments, and return them as the compiled loops take them."""
    sampler = options.sampler
    if not isinstance(sampler, Sampler | Beam):
        raise ValueError(f"sampler must be Greedy(), Sample(...) or Beam(...); got {sampler!r}.")
    if options.chunk is not None:
        require_count("prefill_chunk", options.chunk)
    if key is None and isinstance(sampler, Sample):
        raise ValueError(f"{sampler} needs a random key: pass key=jax.random.key(seed).")
    key = jax.random.key(0) if key is None else key  # not used
    config = options.config
    check_parameters(config, params)
    params = unroll_to_decode(config, cast_parameters(config, params, options.dtype))
    request = pad_to_bucket(request, config.max_length)
    if options.mesh is not None:
        params, request, key = _shard_inputs(options.mesh, config, params, request, key)
    return params, request, key


def _shard_inputs(
    mesh: Mesh, config: TransformerConfig, params: Any, request: Request, key: PRNGKeyArray
) -> tuple[Any, Request, PRNGKeyArray]:
    """Shard parameters, request and key over the mesh, after checking that they divide."""
    request = pad_batch(flatten_batch(request), num_batch_shards(mesh.shape))
    check_divisible(config, mesh.shape, batch_size=len(request.lengths))
    params = jax.device_put(params, parameter_shardings(config, mesh, layout_of(params)))
    data = put_replicated(jax.random.key_data(key), mesh)
    return (
        params,
        put_replicated(request, mesh),
        jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)),
    )


def check_logits_finite(finite: Bool[Array, ""]) -> None:
    """Raise unless all logits of the prompts were finite."""
    if not finite:
        raise ValueError("Logits of the prompt are NaN or infinite; check the parameters.")
