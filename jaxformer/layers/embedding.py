"""Token embedding, position embedding and LM head."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import zeros
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.activations import ACTIVATIONS
from jaxformer.layers.linear import Linear
from jaxformer.layers.lora import adapt_kernel
from jaxformer.layers.norms import Norm
from jaxformer.layers.parameters import initializer, sharded_parameter
from jaxformer.layers.runtime import RuntimeConfig, apply_dropout


class Embed(nn.Module):
    """An embedding table."""

    num_embeddings: int
    features: int
    embedding_init: c.Initialiser
    runtime: RuntimeConfig = RuntimeConfig()
    logical_axes: str = "rows -> features"

    @nn.compact
    def __call__(self) -> Float[Array, "rows width"]:
        shape, init_fn = (self.num_embeddings, self.features), initializer(self.embedding_init)
        options: Any = dict(dtype=self.runtime.dtype, adaptable=True)
        table = sharded_parameter(self, "embedding", init_fn, shape, self.logical_axes, **options)
        if (lora := self.runtime.lora_of(self.path)) is not None:
            table = adapt_kernel(self, lora, table, shape, self.logical_axes).merged()
        return table


class Embedder(nn.Module):
    """Token embedding with scale, positions, norm and dropout."""

    config: c.TransformerConfig
    vocab_size: int
    runtime: RuntimeConfig

    def setup(self):
        cfg, init = self.config.embedding, self.config.initialisation
        width = self.config.model_dim
        self.tokens = Embed(
            self.vocab_size,
            cfg.dim or width,
            init.embedding,
            self.runtime,
            "vocabulary -> model" if cfg.dim is None else "vocabulary -> features",
        )
        if cfg.dim is not None:
            self.projection = Linear((width,), init.projection, self.runtime, "features -> model")
        if cfg.positions is not None and (rows := cfg.positions.num_rows):
            self.positions = Embed(rows, width, init.embedding, self.runtime, "rows -> model")
        if cfg.norm is not None:
            self.norm = Norm(cfg.norm, self.runtime)

    def __call__(
        self,
        table: Float[Array, "V E"],
        tokens: Int[Array, "*batch T"],
        positions: Int[Array, "*any T"],
    ) -> Float[Array, "*batch T D"]:
        """Embed tokens by `table`, which `tokens()` returns and the LM head may share."""
        cfg = self.config.embedding
        x = F.embed(table, tokens, axis_name=self.runtime.mesh_axes.tensor)
        if cfg.scale != 1:
            x = x * jnp.asarray(cfg.scale, x.dtype)
        if cfg.dim is not None:
            x = self.projection(x)
        if cfg.positions is not None:
            x = x + jnp.broadcast_to(self.embed_positions(positions).astype(x.dtype), x.shape)
        if cfg.norm is not None:
            x = self.norm(x)
        return apply_dropout(self, x, self.config.dropout.embedding)

    def embed_positions(self, positions: Int[Array, "*any T"]) -> Float[Array, "*any T D"]:
        """Return the learned or sinusoidal position embeddings."""
        option = self.config.embedding.positions
        if option is None:
            raise ValueError("This model has no embedding positions.")
        table: Any = self.positions() if option.num_rows else None
        return option(positions, self.config.model_dim, table)


class LMHead(nn.Module):
    """LM head: float32 logits, or their statistics for targets; tied heads use the token table.

    With targets it returns `F.LogitStatistics`, computed in chunks of a large vocabulary.
    """

    config: c.TransformerConfig
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        table: Float[Array, "V E"],
        targets: Int[Array, "*batch T"] | None = None,
    ) -> Float[Array, "*batch T V"] | F.LogitStatistics:
        cfg, init, dtype = self.config.head, self.config.initialisation, self.runtime.dtype
        width, vocab_size = self.config.embedding.dim, self.config.vocab_size
        if width is not None or cfg.transform is not None:
            x = Linear(
                (width or self.config.model_dim,),
                init.projection,
                self.runtime,
                "model -> features",
                bias=cfg.transform is not None and cfg.transform.bias,
                name="projection",
            )(x)
        if cfg.transform is not None:
            x = ACTIVATIONS[cfg.transform.activation](x)
            x = Norm(cfg.transform.norm, self.runtime, name="norm")(x)
        x = F.copy_to_tensor_parallel(x.astype(dtype), self.runtime.mesh_axes.tensor)
        if cfg.tied:
            kernel = table
        else:
            init_fn, shape = initializer(init.head or init.projection), (x.shape[-1], vocab_size)
            logical_axes = "model -> vocabulary" if width is None else "features -> vocabulary"
            declared: Any = dict(dtype=dtype, adaptable=True)
            kernel = sharded_parameter(self, "kernel", init_fn, shape, logical_axes, **declared)
            if (lora := self.runtime.lora_of(("head",))) is not None:
                kernel = adapt_kernel(self, lora, kernel, shape, logical_axes).merged()
        if cfg.unit_rows:
            kernel = F.unit_vectors(kernel, axis=1 if cfg.tied else 0)
        bias = None
        if cfg.bias:
            bias = sharded_parameter(self, "bias", zeros, (vocab_size,), "vocabulary")
        options: dict[str, Any] = {
            "vocabulary_axis": 0 if cfg.tied else 1,
            "multiplier": cfg.multiplier,
            "softcap": cfg.softcap,
            "masked_ids": cfg.masked_ids,
            "axis_name": self.runtime.mesh_axes.tensor,
        }
        if targets is None:
            return F.linear_logits(x, kernel, bias, **options)
        return F.linear_logit_statistics(x, kernel, targets, bias, **options)
