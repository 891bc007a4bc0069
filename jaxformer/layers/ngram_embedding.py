"""The branch of a layer that looks up hashed n-grams (Engram)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention.layer_sizes import ConvolutionCache
from jaxformer.layers.attention.inputs import NgramInputs
from jaxformer.layers.cache import CacheUpdate
from jaxformer.layers.convolution import Convolution
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig


class NgramBranch(nn.Module):
    """The branch of `config.NgramEmbedding`; the table's rows are sharded over `fsdp`.

    A row's features are sharded over `tensor`, as the inputs of the two maps that read them.
    """

    config: c.TransformerConfig
    layer_config: c.Layer
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        stream: Float[Array, "*batch_and_T"],
        inputs: NgramInputs,
        cache: ConvolutionCache | None = None,
        cache_update: CacheUpdate | None = None,
    ) -> tuple[Float[Array, "*batch_and_T"], ConvolutionCache | None]:
        """Return what is added to the stream or the streams, and the convolution's new cache."""
        option: Any = self.layer_config.ngram_embedding
        init, recent, width = self.config.initialisation, inputs.tokens, self.config.model_dim
        tensor, dtype = self.runtime.mesh_axes.tensor, self.runtime.dtype
        shape = option.num_rows, option.head_dim
        table = sharded_parameter(
            self, "table", initializer(init.embedding), shape, "buckets -> hidden"
        )
        hashes = option.multipliers, option.vocab_sizes
        ids = F.ngram_ids(recent, *hashes, start_token=option.start_token)
        rows = F.embed(table, ids, axis_name=self.runtime.mesh_axes.fsdp, own_tokens=True)
        rows = jnp.swapaxes(rows.astype(dtype), -1, -2)
        x = stream.reshape(*recent.shape[:-1], -1, width)
        streams = x.shape[-2]

        def linear(name: str, features: tuple[int, ...], outputs: str) -> Array:
            axes = f"hidden features -> {outputs}"
            sizes = option.head_dim, len(option.vocab_sizes)
            options: Any = dict(input_shape=sizes, name=name)
            return Linear(features, init.projection, self.runtime, axes, **options)(rows)

        def norm(name: str, x: Array) -> Array:
            return Norm(self.config.norm, self.runtime, num_heads=streams, name=name)(x)

        key = linear("key", (streams, width), "features model")
        value = linear("value", (width,), "model")
        gated = F.gate_ngrams(norm("query_norm", x), norm("key_norm", key), value)
        options: Any = dict(heads_axis="features", dilation=option.size, kernel_init=c.Zeros())
        channels = 1, streams * width, option.width
        convolution = Convolution(*channels, self.runtime, **options, name="convolution")
        normed = norm("convolution_norm", gated).reshape(*recent.shape[:-1], 1, -1)
        mixed, cache = convolution(normed, inputs.mixer, cache, cache_update)
        if cache is not None and tensor is not None:  # its type does not say that copies are alike
            first = jnp.where(jax.lax.axis_index(tensor) == 0, mixed, jnp.zeros_like(mixed))
            mixed = F.reduce_from_tensor_parallel(first, tensor)
        return (gated + jax.nn.silu(mixed.reshape(gated.shape))).reshape(stream.shape), cache
