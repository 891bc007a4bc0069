"""Tuned lens: an affine map from the stream after each layer to that after the last."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer.inspect.lens import TunedLens, apply_head, depth_streams
from jaxformer.inspect.model_trace import Params, head_stack, trace
from jaxformer.layers import RuntimeConfig, merge_lora


def train_tuned_lens(
    config: c.TransformerConfig,
    params: Params,
    batches: Iterable[Int[Array, "*batch T"]],
    *,
    learning_rate: float = 1e-3,
    dtype: DTypeLike = jnp.float32,
) -> tuple[TunedLens, Float32[np.ndarray, "steps layers"]]:
    """Train a tuned lens, for `logit_lens(..., tuned=lens)`, with a step of Adam for each batch.

        loss[l] = mean over tokens of KL(model || lens of x[l] + x[l] @ A[l] + b[l])

    It starts as the logit lens (A = 0, b = 0), and exists for every configuration that has no
    encoder beside its decoder. The model does not change.

    Args:
        config: The model.
        params: The parameters.
        batches: Token ids of texts as in training; all of one shape are one compiled program.
        learning_rate: Learning rate of Adam.
        dtype: Dtype of the model's computation.

    Returns:
        The lens, and the losses of each step and depth, in nats.

    Raises:
        ValueError: There is no batch, or the model is an encoder-decoder.

    References:
        Belrose et al., Eliciting Latent Predictions from Transformers with the Tuned Lens, 2023.
        arXiv:2303.08112, section 3
    """
    if config.topology.is_encoder_decoder:
        raise ValueError("A tuned lens needs a model of one stack; got an EncoderDecoder.")
    config, params = merge_lora(config, params)
    optimizer = optax.adam(learning_rate)
    width, depth = config.model_dim, config.num_layers
    lens = TunedLens(jnp.zeros((depth, width, width)), jnp.zeros((depth, width)))
    moments, losses = optimizer.init(lens), []
    for batch in batches:
        recorded = trace(config, params, batch, dtype=dtype)
        streams = depth_streams(config, recorded)[:-1]
        state = lens, moments
        lens, moments, loss = _update(
            config, params, streams, recorded.logits, state, learning_rate
        )
        losses.append(loss)
    if not losses:
        raise ValueError("batches is empty; pass an iterable of token arrays.")
    return lens, np.asarray(jnp.stack(losses))


@partial(jax.jit, static_argnums=0)
def _update(
    config: c.TransformerConfig,
    params: Params,
    streams: Float[Array, "layers *batch T D"],
    logits: Float[Array, "*batch T V"],
    state: tuple[TunedLens, Any],
    learning_rate: Float[Array, ""],
) -> tuple[TunedLens, Any, Float32[Array, " layers"]]:
    """One step of Adam on the maps of all depths; they share no parameters."""
    lens, moments = state
    log_probs = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_probs)

    def loss(one: TunedLens, x: Float[Array, "*batch T D"]) -> Float[Array, ""]:
        predicted = apply_head(
            config, RuntimeConfig(), head_stack(config), params, one.translate(x)
        )
        ratios = log_probs - jax.nn.log_softmax(predicted)
        return jnp.mean(jnp.sum(jnp.where(probs > 0, probs * ratios, 0.0), axis=-1))

    losses, gradients = jax.lax.map(lambda pair: jax.value_and_grad(loss)(*pair), (lens, streams))
    with jax.numpy_dtype_promotion("standard"):
        changes, moments = optax.adam(learning_rate).update(gradients, moments, lens)
    return optax.apply_updates(lens, changes), moments, losses
