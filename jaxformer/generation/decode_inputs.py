"""Arguments of decoding as the compiled loops take them, and their result."""

from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxformer.checks import require_count
from jaxformer.config import TransformerConfig
from jaxformer.generation.decode_loop import DecodeConfig
from jaxformer.generation.prompts import Request, flatten_batch, pad_batch, pad_to_bucket
from jaxformer.generation.samplers import Beam, Sample, Sampler
from jaxformer.generation.unrolled import unroll_to_decode
from jaxformer.layers.layouts import layout_of
from jaxformer.layers.parameter_metadata import cast_parameters, check_parameters
from jaxformer.parallel import (
    check_divisible,
    num_batch_shards,
    parameter_shardings,
    put_replicated,
)


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
        params, request, key = shard_inputs(options.mesh, config, params, request, key)
    return params, request, key


def shard_inputs(
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


def rows_of_request(
    options: DecodeConfig, request: Request, tokens: Int[Array, "*rows padded"]
) -> Int[Array, "*batch P_plus_new"]:
    """The tokens of the rows that were asked for, at the width that they need."""
    *batch_shape, width = request.prompt.shape
    if options.mesh is not None:
        tokens = tokens[: request.lengths.size].reshape(*batch_shape, -1)
    return tokens[..., : width + options.max_new_tokens]
