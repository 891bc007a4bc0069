"""Embeddings of each token for each layer, and the branch that reads them."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers.embedding import Embed
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig


class LayerEmbedder(nn.Module):
    """Embeddings of all layers; see `config.LayerEmbedding`."""

    config: c.TransformerConfig
    option: c.LayerEmbedding
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], tokens: Int[Array, "*batch T"]
    ) -> Float[Array, "layers *batch T E"]:
        """Embed tokens; x is the input of the first layer."""
        cfg, dim, init = self.config, self.option.dim, self.config.initialisation
        width, rows = cfg.num_layers * dim, self.option.vocab_size or cfg.vocab_size
        embed = Embed(
            rows, width, init.embedding, self.runtime, "vocabulary -> model", name="tokens"
        )
        if rows < cfg.vocab_size:
            tokens = jnp.where(tokens < rows, tokens, 0)
        embedded = F.embed(embed(), tokens, axis_name=self.runtime.mesh_axes.tensor)
        projection = Linear(
            (width,), init.projection, self.runtime, "model -> features", name="projection"
        )
        projected = projection(x) * jnp.asarray(cfg.model_dim**-0.5, x.dtype)
        embedded, projected = (
            y.reshape(*tokens.shape, cfg.num_layers, dim) for y in (embedded, projected)
        )
        projected = Norm(cfg.norm, self.runtime, name="norm")(projected)
        total: Any = (projected + embedded * jnp.asarray(dim**0.5, x.dtype)) * 2**-0.5
        return jnp.moveaxis(total, -2, 0)


class LayerEmbeddingBranch(nn.Module):
    """The branch of one layer that reads its embedding."""

    config: c.TransformerConfig
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch T D"], embedding: Float[Array, "*batch T E"]
    ) -> Float[Array, "*batch T D"]:
        option: Any = self.config.layer_embedding
        init = self.config.initialisation.projection
        gate = Linear((option.dim,), init, self.runtime, "model -> features", name="gate")
        y = ACTIVATIONS[option.activation](gate(x)) * embedding
        y = Linear((self.config.model_dim,), init, self.runtime, "features -> model", name="down")(
            y
        )
        return Norm(self.config.norm, self.runtime, name="norm")(y)
