"""FLOPs, cache bytes and activation widths of one attention layer, for each attention kind."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.parameter import Parameter, read_axes


class Widths(NamedTuple):
    """Numbers per token that an attention layer computes on one device, by group.

    `products` are what its kernels give, but for the last; `beside` is what norms, rotations and
    the mixing need beside those; `heads` is what all heads give, side by side; `around` is
    what goes round a ring.
    """

    products: float
    beside: float
    heads: float
    around: float


def keys_seen(window: c.Window, length: int) -> int:
    """Number of keys inside a window, of `length` keys."""
    return min(length, window) if isinstance(window, int) else length


def attention_flops(
    config: c.TransformerConfig, length: int, memory_length: int, window: c.Window
) -> int:
    """FLOPs of one attention layer, from the projections to the output."""
    a, d, num_keys = config.kind, config.model_dim, keys_seen(window, memory_length)
    match a:
        case c.MultiHead() | c.SharedKV():
            num_kv_projections = 2 if isinstance(a, c.MultiHead) else 1
            heads, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
            projections = length * 2 * d * heads + memory_length * num_kv_projections * d * kv
            return 2 * (projections + 2 * length * num_keys * heads)
        case c.Latent(num_heads=n, latent_dim=latent, query_latent_dim=query):
            query_width, value_width = n * (a.nope_dim + a.rope_dim), n * a.value_dim
            query_projection = d * query_width if query is None else (d + query_width) * query
            key_value_projection = d * (latent + a.rope_dim) + latent * (
                n * a.nope_dim + value_width
            )
            products = (
                length * (query_projection + value_width * d) + memory_length * key_value_projection
            )
            return 2 * (products + length * num_keys * (query_width + value_width))
        case c.Decay():
            heads = a.num_heads * a.head_dim
            return 2 * length * (2 * d + min(F.RECURRENCE_CHUNK, length)) * heads
        case c.Mixer():
            return a.flops(d, length)


def kept_bytes(
    config: c.TransformerConfig, positions: c.Positions | None, seen: int, width: int
) -> int:
    """Cache bytes of one layer for so many tokens."""
    match config.kind:
        case c.MultiHead(num_kv_heads=heads, head_dim=features):
            numbers_per_token = 2 * heads * features
        case c.SharedKV(num_kv_heads=heads, head_dim=features) as a:
            numbers_per_token = a.arrays_kept(positions) * heads * features
        case c.Latent(latent_dim=latent, rope_dim=rotary):
            numbers_per_token = latent + rotary
        case c.Decay(num_heads=heads, head_dim=features):
            return 4 * heads * features  # in float32, once for all tokens
        case c.Mixer() as mixer:
            dtype = jnp.bfloat16 if width == 2 else jnp.float32
            empty = jax.eval_shape(lambda: mixer.empty_cache((), seen, dtype))
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(empty))
    return width * seen * numbers_per_token


def attention_widths(
    config: c.TransformerConfig, positions: c.Positions | None, tensor: int
) -> Widths:
    """Numbers per token that an attention layer computes, heads sharded over `tensor`."""
    match config.kind:
        case c.MultiHead() | c.SharedKV() as a:
            num_kv_projections = 2 if isinstance(a, c.MultiHead) else 1
            ring_arrays = 2 if isinstance(a, c.MultiHead) else a.arrays_kept(positions)
            heads = a.num_heads * a.head_dim / tensor
            kv = a.num_kv_heads * a.head_dim / min(tensor, a.num_kv_heads)
            return Widths(heads + num_kv_projections * kv, 2 * heads + kv, heads, ring_arrays * kv)
        case c.Latent() as a:
            n, latents = a.num_heads / tensor, a.latent_dim + (a.query_latent_dim or 0)
            query_width, value_width = n * (a.nope_dim + a.rope_dim), n * a.value_dim
            key_value_width = n * a.nope_dim + value_width + latents + a.rope_dim
            return Widths(
                query_width + key_value_width,
                2 * query_width + value_width + latents,
                value_width,
                query_width + value_width,
            )
        case c.Decay() as a:
            heads = a.num_heads * a.head_dim / tensor
            return Widths(heads, 4 * heads, heads, heads)
        case c.Mixer() as a:
            products = made_of_a_token(a.parameters(config.model_dim)) / tensor
            return Widths(products, 2 * products, products, 0)


def made_of_a_token(parameters: Mapping[str, Parameter]) -> int:
    """Outputs per token of all matrices that read the model width."""
    shapes = [(p.shape, read_axes(p.axes)) for p in parameters.values()]
    input_matrices = [
        (x, axes.inputs) for x, axes in shapes if "model" in axes.names[: axes.inputs]
    ]
    return sum(math.prod(shape[inputs:]) for shape, inputs in input_matrices)
