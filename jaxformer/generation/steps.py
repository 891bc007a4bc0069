"""Prefill and single-token decode step, with a KV cache."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer import functional as F
from jaxformer import layers
from jaxformer.config import TransformerConfig
from jaxformer.functional.ngrams import NO_TOKEN
from jaxformer.generation.prompts import pad_right
from jaxformer.layers import Cache, LayerCache, Transformer, empty_cache
from jaxformer.layers.cache import EMPTY_SLOT_POSITION, arrange_cache, check_capacity
from jaxformer.layers.layouts import LAYER_GROUPS, layout_of
from jaxformer.layers.rope import rope_invalidates_cache
from jaxformer.parallel import active_mesh_axes, batch_spec, parameter_specs


class Context(NamedTuple):
    """Tokens processed so far, and their KV cache.

    Attributes:
        tokens: The tokens.
        cache: The cache.
        hidden: Last hidden vectors of a prompt, if they were asked for.
    """

    tokens: Int[Array, "*batch room"]
    cache: Cache
    hidden: Float[Array, "*batch P D"] | None = None


class Outputs(NamedTuple):
    """Logits of tokens that follow a cache, the updated cache, and the last hidden vectors."""

    logits: Float[Array, "*batch Q V"]
    cache: Cache
    hidden: Float[Array, "*batch T D"]


def take_rows(context: Context, rows: Int[Array, " B"]) -> Context:
    """Return the context of these rows, in this order; rows may repeat."""
    return Context(context.tokens[rows], layers.take_rows(context.cache, rows))


def prefill(
    config: TransformerConfig,
    params: Any,
    prompt: Int[Array, "*batch P"],
    lengths: Int[Array, "*batch"],
    *,
    capacity: int,
    chunk: int | None = None,
    source: Int[Array, "*batch S"] | None = None,
    source_segments: Int[Array, "*batch S"] | None = None,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    lookahead: int = 0,
    keep_hidden: bool = False,
) -> tuple[Float[Array, "*batch V"], Context]:
    """Process prompts of different lengths and fill the KV cache.

    Args:
        config: A decoder, or an encoder-decoder.
        params: The parameters, ``variables["params"]``.
        prompt: Token ids, right-padded.
        lengths: Tokens per row.
        capacity: Cache capacity, in tokens per row.
        chunk: Tokens to process at a time, which limits the memory of attention; None processes all
            at once. The result is the same.
        source: Token ids of an encoder-decoder's source, which is encoded once.
        source_segments: 0 for padding of the source.
        dtype: Dtype of computation and cache.
        mesh: Device mesh; rows then have one batch axis.
        lookahead: As in `empty_cache`.
        keep_hidden: Whether the context has the last hidden vectors; not with chunks.

    Returns:
        The logits after each row's last token, and the context for `decode_step`.

    Raises:
        ValueError: The capacity is below the width of the prompt.
    """
    *batch, length = prompt.shape
    if length > capacity:
        raise ValueError(
            f"capacity must be at least the prompt's width of {length} plus one for each new "
            f"token; got {capacity}."
        )
    chunk = length if chunk is None else min(chunk, length)
    num_chunks = -(-length // chunk)
    padded = pad_right(prompt, num_chunks * chunk)
    model = Transformer(config, dtype=dtype)
    devices = 1 if mesh is None else mesh.shape.get("tensor", 1)
    cache = empty_cache(
        config,
        tuple(batch),
        capacity,
        dtype=dtype,
        tensor_parallel_size=devices,
        lookahead=lookahead,
    )
    cache = arrange_cache(config, cache, layout_of(params))._replace(min_rope_length=lengths)

    def read_chunk(
        cache: Cache, start: Int[Array, ""], *, cache_is_empty: bool = False, **encoded: Any
    ):
        """Process the chunk that starts at `start`; logits are valid for rows that end in it."""
        tokens = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=-1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk), tokens.shape)
        last = jnp.clip(lengths - 1 - start, 0, chunk - 1)[..., None]
        segments = (positions < lengths[..., None]).astype(jnp.int32)
        inputs = {"segments": segments, "cache": cache, "logits_at": last, **encoded}
        return apply_model(model, mesh, params, tokens, cache_is_empty=cache_is_empty, **inputs)

    def read_next_chunk(carry: tuple[Array, Cache], start: Int[Array, ""]):
        logits_so_far, cache = carry
        outputs = read_chunk(cache, start)
        logits = outputs.logits[..., 0, :]
        ends = jnp.broadcast_to((lengths > start)[..., None], logits.shape)
        return (jnp.where(ends, logits, logits_so_far), outputs.cache), None

    encoded = dict(source=source, source_segments=source_segments)
    first = read_chunk(cache, jnp.int32(0), cache_is_empty=True, **encoded)
    carry = first.logits[..., 0, :], first.cache
    if num_chunks > 1:
        carry, _ = jax.lax.scan(read_next_chunk, carry, chunk * jnp.arange(1, num_chunks))
    logits, cache = carry
    hidden = first.hidden if keep_hidden else None
    return logits, Context(pad_right(prompt, capacity), cache, hidden)


def decode_step(
    config: TransformerConfig,
    params: Any,
    tokens: Int[Array, "*batch"],
    context: Context,
    *,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "*batch V"], Context]:
    """Process one more token of each row.

    If the new length changes the RoPE scaling, the whole sequence is processed again, so that the
    result always equals the result of the model without a cache.

    Args:
        config: As in `prefill`.
        params: As in `prefill`.
        tokens: The next token of each row.
        context: Tokens processed so far, and their cache.
        dtype: Dtype of the computation.
        mesh: As in `prefill`.

    Returns:
        The logits after these tokens, and the context with them. If the cache is full, logits of
        the row are NaN under `jax.jit`.

    Raises:
        ValueError: The cache is full (outside `jax.jit`).
    """
    model = Transformer(config, dtype=dtype)
    all_tokens, cache = context.tokens, context.cache
    check_capacity(config, cache, jnp.ones((*tokens.shape, 1), bool))
    all_tokens = F.write_slots(all_tokens, tokens[..., None], cache.length[..., None])
    length = cache.length + 1

    def decode_token() -> tuple[Array, Cache]:
        return last_logits(model, mesh, params, tokens[..., None], cache=cache)

    def recompute_cache() -> tuple[Array, Cache]:
        inputs = {
            "segments": F.length_mask(length, all_tokens.shape[-1]).astype(jnp.int32),
            "cache": _clear(cache)._replace(min_rope_length=length),
            "logits_at": length[..., None] - 1,
        }
        return last_logits(model, mesh, params, all_tokens, cache_is_empty=True, **inputs)

    ropes = (layer.rope for layer in config.layers)
    if not any(rope is not None and rope.depends_on_length for rope in ropes):
        logits, cache = decode_token()
    else:
        logits, cache = jax.lax.cond(
            jnp.any(rope_invalidates_cache(config, length)), recompute_cache, decode_token
        )
    return logits, Context(all_tokens, cache)


def last_logits(
    model: Transformer,
    mesh: Mesh | None,
    params: Any,
    tokens: Int[Array, "*batch T"],
    **inputs: Any,
) -> tuple[Float[Array, "*batch V"], Cache]:
    """Return logits of one token per row, and the updated cache; inputs as in `apply_model`."""
    logits, cache, _ = apply_model(model, mesh, params, tokens, **inputs)
    return logits[..., 0, :], cache


def apply_model(
    model: Transformer,
    mesh: Mesh | None,
    params: Any,
    tokens: Int[Array, "*batch T"],
    *,
    cache_is_empty: bool = False,
    **arguments: Any,
) -> Outputs:
    """Apply the model, on a mesh if there is one, to tokens that follow a cache."""
    inputs = {name: value for name, value in arguments.items() if value is not None}
    if mesh is not None:
        model = model.clone(mesh_axes=replace(active_mesh_axes(mesh.shape), context=None))

    def apply(params: Any, tokens: Array, inputs: dict[str, Any]) -> Any:
        options: Any = dict(cache_is_empty=cache_is_empty, mutable=["hidden"], **inputs)
        (logits, cache), sown = model.apply({"params": params}, tokens, **options)
        return logits, cache, sown["hidden"]["last"][0]

    if mesh is not None:
        rows, tensor = batch_spec(mesh.shape)[0], model.mesh_axes.tensor
        specs_of_cache = cache_specs(rows, tensor)
        param_specs = parameter_specs(model.config, mesh.shape, layout_of(params))
        specs = {name: specs_of_cache if name == "cache" else P(rows) for name in inputs}
        apply = jax.shard_map(
            apply,
            mesh=mesh,
            in_specs=(param_specs, P(rows), specs),
            out_specs=(P(rows, None, tensor), specs_of_cache, P(rows)),
        )
    return Outputs(*apply(params, tokens, inputs))


def cache_specs(rows: Any, heads: str | None) -> Any:
    """PartitionSpecs of a cache: rows and KV heads are sharded."""
    parts: Any = {
        "first_layers": P(rows, heads),
        "layers": P(None, rows, heads),
        "tail": P(rows, heads),
        "capacity": P(),
    }
    return Cache(**{name: parts.get(name, P(rows)) for name in Cache._fields})


def _clear(cache: Cache) -> Cache:
    """Return the cache without tokens; what cross-attention reads stays."""

    def clear_layer(layer: LayerCache) -> LayerCache:
        zeros = jax.tree.map(jnp.zeros_like, layer)
        return zeros._replace(cross_attention=layer.cross_attention)

    groups: Any = {name: tuple(map(clear_layer, getattr(cache, name))) for name in LAYER_GROUPS}
    return cache._replace(
        **groups,
        positions=jax.tree.map(lambda x: jnp.full_like(x, EMPTY_SLOT_POSITION), cache.positions),
        length=jnp.zeros_like(cache.length),
        recent_tokens=jax.tree.map(lambda x: jnp.full_like(x, NO_TOKEN), cache.recent_tokens),
    )
