"""`MultiTokenPredictor`: a layer that predicts the token after the next (MTP)."""

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.layers.attention.inputs import TokenPositions
from jaxformer.layers.cache import Cache
from jaxformer.layers.linear import Linear
from jaxformer.layers.norms import Norm
from jaxformer.layers.runtime import RuntimeConfig
from jaxformer.layers.stack import Stack


class MultiTokenPredictor(nn.Module):
    """The module of `TransformerConfig.multi_token_prediction`, between embedding and head.

        z[t] = W [norm(embedding of token t + 1), norm(h[t])];    y = final_norm(layer(z))

    h are the last hidden vectors of the model, after its final norm. `config` is
    `TransformerConfig.multi_token_model`; the model's embedding and head serve this module too.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024. arXiv:2412.19437, section 2.2
    """

    config: c.TransformerConfig
    runtime: RuntimeConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*batch T D"],
        hidden: Float[Array, "*batch T D"],
        token_positions: TokenPositions,
        cache: Cache | None,
        *,
        contiguous_positions: bool,
    ) -> tuple[Float[Array, "*batch T D"], Cache | None]:
        """Return the hidden vectors from which the head predicts, and the updated cache.

        x are the embeddings of the tokens after those of `hidden`.
        """
        cfg, runtime, init = self.config, self.runtime, self.config.initialisation.projection
        x = Norm(cfg.norm, runtime, name="embedding_norm")(x)
        hidden = Norm(cfg.norm, runtime, name="hidden_norm")(hidden.astype(x.dtype))
        both = jnp.concatenate([x, hidden], axis=-1)
        projection = Linear((cfg.model_dim,), init, runtime, "features -> model", name="projection")
        stack = Stack(cfg, "decoder", causal=True, runtime=runtime, name="decoder")
        return stack(
            projection(both),
            token_positions,
            cache=cache,
            contiguous_positions=contiguous_positions,
        )
