"""Logit lens, tuned lens and per-token losses."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.model_trace import (
    Arrays,
    ModelTrace,
    Params,
    ResidualTrace,
    as_id_array,
    as_int_tuple,
    check_inputs,
    head_stack,
    trace,
)
from jaxformer.inspect.sizes import check_bytes
from jaxformer.layers import Norm, RuntimeConfig, Transformer, merge_lora
from jaxformer.layers.embedding import LMHead
from jaxformer.layers.parameter_metadata import check_parameters


class TunedLens(NamedTuple):
    """Affine maps of the residual stream, for `logit_lens`; see `train_tuned_lens`.

    Attributes:
        kernel: Kernels, after 0, 1, ... layers; there is none after the last.
        bias: Biases.
    """

    kernel: Float32[Array, "layers D D"]
    bias: Float32[Array, "layers D"]

    def translate(self, x: Float[Array, "*batch T D"]) -> Float[Array, "*batch T D"]:
        """Return x + x @ kernel + bias, with the kernel and bias of one depth."""
        change = x @ self.kernel.astype(x.dtype)
        return x + change + jnp.broadcast_to(self.bias.astype(x.dtype), x.shape)


def logit_lens(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    layers: int | Sequence[int] | Literal["passes"] | None = None,
    tuned: TunedLens | None = None,
    max_bytes: int = 2**30,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> Float32[Array, "depths *batch T V"]:
    """Logits after each layer: final norm and head applied to the residual stream.

        lens[l] = head(final_norm(stream after l layers))

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        layers: Numbers of layers after which to apply the head, from 0 (the embedding) to the depth
            of the stack; None is all. "passes" are the ends of each pass through a loop, whose
            layers otherwise show the last pass.
        tuned: A tuned lens of `train_tuned_lens`, whose maps come before the norm.
        max_bytes: Maximum size of the result.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        Logits after each of `layers`; after the last layer they are the model's logits.

    Raises:
        ValueError: A number of layers is out of range, or the result exceeds `max_bytes`.

    References:
        nostalgebraist, Interpreting GPT: the Logit Lens, 2020; Belrose et al., Eliciting Latent
        Predictions from Transformers with the Tuned Lens, 2023. arXiv:2303.08112
    """
    stack = head_stack(config)
    depth = len(config.stacks[stack])
    if layers == "passes":
        if config.loop is None or tuned is not None:
            raise ValueError('layers="passes" needs a model with a Loop, and no tuned lens.')
        depths = tuple(range(1, config.loop.passes + 1))
    else:
        depths = as_int_tuple("layers", range(depth + 1) if layers is None else layers) or ()
        outside = [i for i in depths if not 0 <= i <= depth]
        if outside or not depths:
            raise ValueError(f"layers must be in [0, {depth}]; got {layers}.")
    arrays = check_inputs(config, tokens, inputs)
    count, size = arrays["tokens"].size, config.vocab_size
    what = f"Logits of {count:,} tokens over {size:,} ids at {len(depths)} depths need"
    advice = f"Select fewer layers, for example layers=({depth},), or fewer tokens"
    check_bytes(what, 4 * len(depths) * count * size, max_bytes, advice)
    config, params = merge_lora(config, params)
    recorded = trace(config, params, **arrays, dtype=dtype)
    if layers == "passes":
        looped: Any = getattr(recorded, stack)
        by_pass: Any = {stack: looped._replace(stream=looped.passes)}
        recorded = recorded._replace(**by_pass)
    stream = depth_streams(config, params, recorded)
    if tuned is not None:
        shapes = (depth, *2 * (config.model_dim,)), (depth, config.model_dim)
        if (tuned.kernel.shape, tuned.bias.shape) != shapes:
            raise ValueError(
                f"tuned must have arrays of this model's shapes {shapes}; got "
                f"{tuned.kernel.shape} and {tuned.bias.shape}."
            )
        translated = jax.vmap(TunedLens.translate)(tuned, stream[:-1])
        stream = jnp.concatenate([translated, stream[-1:]])
    stream = stream[jnp.asarray(depths)]
    runtime = RuntimeConfig(dtype=dtype, adapter=config.adapter)
    return apply_head(config, runtime, stack, params, stream)


def depth_streams(
    config: c.TransformerConfig, params: Params, recorded: ModelTrace
) -> Float[Array, "depths *batch T D"]:
    """Residual streams before the LM head: after 0, 1, ... layers.

    Of several streams it is what the option's `end` makes of them.

    Raises:
        ValueError: The state of the residual option is no single array.
    """
    option, stack = config.residual, head_stack(config)
    one: ResidualTrace = getattr(recorded, stack)
    if option is None or option.is_short:
        return jnp.concatenate([one.embeddings[None], one.stream])
    if not isinstance(option.state_shapes(config.model_dim), jax.ShapeDtypeStruct):
        name = type(option).__name__
        raise ValueError(f"A lens reads one residual stream, but {name} hands on several arrays.")
    dtype = jnp.float32 if option.in_float32 else one.embeddings.dtype
    its = {k: x.astype(dtype) for k, x in params[stack].get("residual", {}).items()}
    start = option.begin(one.embeddings, its)
    return option.end(jnp.concatenate([start[None], one.stream]), its)


@partial(jax.jit, static_argnums=(0, 1, 2))
def apply_head(
    config: c.TransformerConfig, mode: RuntimeConfig, stack: str, params: Params, x: Array
) -> Float32[Array, "depths *batch T V"]:
    """Apply the model's final norm and head to a residual stream."""
    if config.final_norm:
        norm_variables = {"params": params[stack].get("final_norm", {})}
        x = jnp.asarray(Norm(config.last_norm or config.norm, mode).apply(norm_variables, x))
    table = params["embedding"]["tokens"]["embedding"].astype(mode.dtype)
    logits: Any = LMHead(config, mode).apply({"params": params.get("head", {})}, x, table)
    return logits


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
        state = lens, moments
        lens, moments, loss = _update(config, params, recorded, state, learning_rate)
        losses.append(loss)
    if not losses:
        raise ValueError("batches is empty; pass an iterable of token arrays.")
    return lens, np.asarray(jnp.stack(losses))


@partial(jax.jit, static_argnums=0)
def _update(
    config: c.TransformerConfig,
    params: Params,
    recorded: ModelTrace,
    state: tuple[TunedLens, Any],
    learning_rate: Float[Array, ""],
) -> tuple[TunedLens, Any, Float32[Array, " layers"]]:
    """One step of Adam on the maps of all depths; they share no parameters."""
    (lens, moments), stack = state, head_stack(config)
    log_probs = jax.nn.log_softmax(recorded.logits)
    probs = jnp.exp(log_probs)

    def loss(one: TunedLens, x: Float[Array, "*batch T D"]) -> Float[Array, ""]:
        predicted = apply_head(config, RuntimeConfig(), stack, params, one.translate(x))
        ratios = log_probs - jax.nn.log_softmax(predicted)
        return jnp.mean(jnp.sum(jnp.where(probs > 0, probs * ratios, 0.0), axis=-1))

    streams = depth_streams(config, params, recorded)[:-1]
    losses, gradients = jax.lax.map(lambda pair: jax.value_and_grad(loss)(*pair), (lens, streams))
    with jax.numpy_dtype_promotion("standard"):
        changes, moments = optax.adam(learning_rate).update(gradients, moments, lens)
    return optax.apply_updates(lens, changes), moments, losses


def token_losses(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    targets: Int[Array, "*batch T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> Float32[Array, "*batch L"]:
    """Cross-entropy of each token, in nats.

        loss[t] = -log p(target[t] | tokens up to t)

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        targets: Target id of each token; None is the next token.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        A loss per target; without `targets` the last token has none. It is 0 for padding
        (segment 0) and, without `targets`, for the last token of each document (`segments`).

    Raises:
        ValueError: The model is an encoder and has no targets, or as in `Transformer`.
    """
    arrays = check_inputs(config, tokens, inputs)
    target_ids, has_loss = next_token_targets(config, arrays, targets)
    scores = _scores(Transformer(config, dtype=dtype), params, arrays, target_ids)
    losses = jnp.where(has_loss, F.cross_entropy_from_statistics(scores), 0.0)
    return losses if targets is not None else losses[..., :-1]


@partial(jax.jit, static_argnums=0)
def _scores(model: Transformer, params: Params, arrays: Arrays, targets: Array) -> Any:
    check_parameters(model.config, params)
    return model.apply({"params": params}, targets=targets, **arrays)


def next_token_targets(
    config: c.TransformerConfig, arrays: Arrays, targets: Int[Array, "*batch T"] | None
) -> tuple[Int[Array, "*batch T"], Bool[Array, "*batch T"]]:
    """Next-token targets, and the mask of targets with loss.

    Raises:
        ValueError: The model is an encoder and has no targets, or targets have another shape or are
            outside the vocabulary.
    """
    tokens, segments = arrays["tokens"], arrays.get("segments")
    if targets is not None:
        targets = as_id_array("targets", targets)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets must have the shape of tokens, {tokens.shape}; got {targets.shape}."
            )
        F.check_token_ids(targets, config.vocab_size)
        return targets, jnp.ones(targets.shape, bool) if segments is None else segments != 0
    if not config.topology.has_decoder:
        raise ValueError("An Encoder does not predict the next token; pass targets=.")
    last = jnp.arange(tokens.shape[-1]) == tokens.shape[-1] - 1
    has_loss = jnp.broadcast_to(~last, tokens.shape)
    if segments is not None:
        has_loss &= (segments == jnp.roll(segments, -1, axis=-1)) & (segments != 0)
    return jnp.roll(tokens, -1, axis=-1), has_loss
