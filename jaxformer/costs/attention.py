"""FLOPs and cache bytes of one layer, from what its options declare."""

import jax
import jax.numpy as jnp

from jaxformer import config as c
from jaxformer.config.attention.layer_sizes import CacheShape


def visible_keys(window: c.Window, length: int) -> int:
    """Number of keys in a window, at most `length`."""
    return min(length, window) if isinstance(window, int) else length


def layer_flops(layer: c.LayerConfig, model_dim: int, length: int) -> int:
    """FLOPs of one layer over one sequence."""
    num_keys = visible_keys(layer.window, length)
    total = layer.attention.attention_flops(model_dim, length, length, num_keys)
    total += layer.feed_forward.flops(model_dim, length)
    if isinstance(layer.positions, c.TransformerXL):
        heads = layer.attention.heads_width
        total += 2 * length * model_dim * heads  # W times one sinusoid per distance
        total += 2 * length * num_keys * heads  # scores of distances
    return total


def layer_cache_bytes(layer: c.LayerConfig, num_tokens: int, bytes_per_number: int) -> int:
    """Cache bytes of one layer for `num_tokens` tokens; a recurrent state stays float32."""
    dtype = jnp.dtype("float32" if bytes_per_number == 4 else "bfloat16")
    shape = CacheShape((), num_tokens, dtype)
    cache = jax.eval_shape(lambda: layer.attention.empty_layer_cache(layer.positions, shape))
    return sum(
        x.size * (bytes_per_number if x.dtype == dtype else x.dtype.itemsize)
        for x in jax.tree.leaves(cache)
    )
