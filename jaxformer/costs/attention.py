"""FLOPs and cache bytes of one layer, from what its options declare."""

import jax
import jax.numpy as jnp

from jaxformer import config as c
from jaxformer.config.attention.layer_sizes import CacheShape
from jaxformer.config.positions import window_size

CACHE_DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}


def visible_keys(window: c.Window, length: int) -> int:
    """Number of keys in a window, at most `length`."""
    size = window_size(window)
    return length if size is None else min(length, size)


def layer_flops(layer: c.Layer, model_dim: int, length: int) -> int:
    """FLOPs of one layer over one sequence."""
    num_keys = visible_keys(layer.window, length)
    total = layer.attention.attention_flops(model_dim, length, length, num_keys)
    total += layer.feed_forward.flops(model_dim, length)
    if layer.transformer_xl is not None:
        heads = layer.attention.main.num_heads * layer.attention.main.head_dim
        total += 2 * length * model_dim * heads  # W times one sinusoid per distance
        total += 2 * length * num_keys * heads  # scores of distances
    return total


def layer_cache_bytes(
    layer: c.Layer, model_dim: int, num_tokens: int, bytes_per_number: int, *, stream_width: int = 0
) -> int:
    """Cache bytes of one layer for `num_tokens` tokens; a recurrent state stays float32.

    The convolution of hashed n-grams has `stream_width` channels, those of all streams.

    Raises:
        ValueError: `bytes_per_number` is not 1, 2 or 4.
    """
    if isinstance(bytes_per_number, bool) or bytes_per_number not in CACHE_DTYPES:
        raise ValueError(f"bytes_per_number must be 1, 2 or 4; got {bytes_per_number!r}.")
    shape = CacheShape((), num_tokens, CACHE_DTYPES[bytes_per_number], model_dim)
    cache = jax.eval_shape(lambda: layer.empty_cache(shape, stream_width))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
