"""FLOPs, cache bytes and activation widths of one attention layer, for each attention kind."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import Parameter, parse_logical_axes


class ActivationWidths(NamedTuple):
    """Numbers per token that an attention layer computes on one device, by group.

    `projections` are the outputs of all kernels but the last; `intermediates` are other inputs of
    norms, rotations and attention; `head_outputs` are the outputs of all heads; `ring_payload` is
    what a device sends in each step of ring attention.
    """

    projections: float
    intermediates: float
    head_outputs: float
    ring_payload: float


def visible_keys(window: c.Window, length: int) -> int:
    """Number of keys in a window, at most `length`."""
    return min(length, window) if isinstance(window, int) else length


def attention_flops(
    config: c.TransformerConfig, query_length: int, key_length: int, window: c.Window
) -> int:
    """FLOPs of one attention layer, including its projections."""
    a, d, num_keys = config.attention_kind, config.model_dim, visible_keys(window, key_length)
    match a:
        case c.MultiHead() | c.SharedKV():
            num_kv_projections = 2 if isinstance(a, c.MultiHead) else 1
            heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
            projections = query_length * 2 * d * heads + key_length * num_kv_projections * d * kv
            return 2 * (projections + 2 * query_length * num_keys * heads)
        case c.Latent(num_heads=n, latent_dim=latent, query_latent_dim=query):
            query_width, value_width = n * (a.nope_dim + a.rope_dim), n * a.value_dim
            query_projection = d * query_width if query is None else (d + query_width) * query
            key_value_projection = d * (latent + a.rope_dim) + latent * (
                n * a.nope_dim + value_width
            )
            products = (
                query_length * (query_projection + value_width * d)
                + key_length * key_value_projection
            )
            return 2 * (products + query_length * num_keys * (query_width + value_width))
        case c.Decay():
            heads = a.num_heads * a.head_dim
            return 2 * query_length * (2 * d + min(F.RECURRENCE_CHUNK, query_length)) * heads
        case c.Mixer():
            return a.flops(d, query_length)


def layer_cache_bytes(
    config: c.TransformerConfig,
    positions: c.Positions | None,
    num_tokens: int,
    bytes_per_number: int,
) -> int:
    """Cache bytes of one layer for `num_tokens` tokens."""
    match config.attention_kind:
        case c.MultiHead(num_kv_heads=heads, head_dim=features):
            numbers_per_token = 2 * heads * features
        case c.SharedKV(num_kv_heads=heads, head_dim=features) as a:
            numbers_per_token = a.num_cached_arrays(positions) * heads * features
        case c.Latent(latent_dim=latent, rope_dim=rotary):
            numbers_per_token = latent + rotary
        case c.Decay(num_heads=heads, head_dim=features):
            return 4 * heads * features  # a float32 state, independent of `num_tokens`
        case c.Mixer() as mixer:
            dtype = jnp.bfloat16 if bytes_per_number == 2 else jnp.float32
            empty = jax.eval_shape(lambda: mixer.empty_cache((), num_tokens, dtype))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(empty))
    return bytes_per_number * num_tokens * numbers_per_token


def activation_widths(
    config: c.TransformerConfig, positions: c.Positions | None, tensor: int
) -> ActivationWidths:
    """Numbers per token that an attention layer computes, heads sharded over `tensor`."""
    match config.attention_kind:
        case c.MultiHead() | c.SharedKV() as a:
            num_kv_projections = 2 if isinstance(a, c.MultiHead) else 1
            ring_arrays = 2 if isinstance(a, c.MultiHead) else a.num_cached_arrays(positions)
            heads = a.num_heads * a.head_dim / tensor
            kv = a.num_kv_heads * a.head_dim / min(tensor, a.num_kv_heads)
            return ActivationWidths(
                heads + num_kv_projections * kv, 2 * heads + kv, heads, ring_arrays * kv
            )
        case c.Latent() as a:
            n, latents = a.num_heads / tensor, a.latent_dim + (a.query_latent_dim or 0)
            query_width, value_width = n * (a.nope_dim + a.rope_dim), n * a.value_dim
            key_value_width = n * a.nope_dim + value_width + latents + a.rope_dim
            return ActivationWidths(
                query_width + key_value_width,
                2 * query_width + value_width + latents,
                value_width,
                query_width + value_width,
            )
        case c.Decay() as a:
            heads = a.num_heads * a.head_dim / tensor
            return ActivationWidths(heads, 4 * heads, heads, heads)
        case c.Mixer() as a:
            products = projected_width(a.parameters(config.model_dim)) / tensor
            return ActivationWidths(products, 2 * products, products, 0)


def projected_width(parameters: Mapping[str, Parameter]) -> int:
    """Outputs per token of all matrices with model_dim inputs."""
    shapes = [(p.shape, parse_logical_axes(p.axes)) for p in parameters.values()]
    input_matrices = [
        (x, axes.num_input_axes)
        for x, axes in shapes
        if "model" in axes.names[: axes.num_input_axes]
    ]
    return sum(math.prod(shape[inputs:]) for shape, inputs in input_matrices)
