"""Types of attention caches, and sizes of a layer's cache and activations."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class KVCache(NamedTuple):
    """Keys and values, after RoPE. In a scanned stack, the layer axis comes first.

    This is how attention reads them. Inside a `Cache` heads stand before slots, ``[..., K, S, H]``,
    so that products need not transpose them for every token; `swap_heads_and_slots` converts
    between the two layouts. The same holds for `SharedCache` and `LatentCache`.
    """

    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K H"]


class SharedCache(NamedTuple):
    """Vectors that are key and value at once (shared-KV attention), after RoPE."""

    key_value: Float[Array, "*batch S K H"]


class LatentCache(NamedTuple):
    """Latents and the shared rotary key (MLA).

    They have one head, K = 1; under tensor parallelism every device has a copy.
    """

    latent: Float[Array, "*batch S K C"]
    rotary_key: Float[Array, "*batch S K R"]


class StateCache(NamedTuple):
    """State of a recurrence in float32, with a single slot."""

    state: Float[Array, "*layers_and_batch N 1 H"]


class ConvolutionCache(NamedTuple):
    """The last K - 1 inputs of a short convolution."""

    inputs: Float[Array, "*layers_and_batch N taps H"]


class LinearAttentionCache(NamedTuple):
    """State of linear attention in float32, and the last inputs of its convolutions, if any.

    A selective scan has one slot, of the state of each feature, and one convolution.
    """

    state: Float[Array, "*layers_and_batch N H Hv"]
    convolutions: tuple[ConvolutionCache, ...]  # of queries, keys and values


class CacheShape(NamedTuple):
    """Sizes of a layer's cache.

    Attributes:
        batch: Leading axes: layers, if several are stacked, and then the batch axes.
        num_slots: Tokens that it holds.
        dtype: Of keys and values.
        model_dim: Width of the tokens that layers read.
        tensor_parallel_size: Devices over which heads are sharded; if they do not divide the
            key-value heads, each device has one head.
    """

    batch: tuple[int, ...]
    num_slots: int
    dtype: DTypeLike
    model_dim: int
    tensor_parallel_size: int = 1

    def zeros(self, num_heads: int, width: int) -> Float[Array, "*batch K S H"]:
        """Return an empty array with this many heads and features."""
        replicates = num_heads % self.tensor_parallel_size != 0
        heads = self.tensor_parallel_size if replicates else num_heads
        return jnp.zeros((*self.batch, heads, self.num_slots, width), self.dtype)


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
