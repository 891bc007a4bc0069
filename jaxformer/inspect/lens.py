"""Logit lens, tuned lens and per-token losses."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.model_trace import (
    ModelTrace,
    Params,
    ResidualTrace,
    as_id_array,
    as_int_tuple,
    check_inputs,
    head_stack,
    trace,
)
from jaxformer.inspect.sizes import format_bytes
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
    layers: int | Sequence[int] | None = None,
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
            of the stack; None is all.
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
    depth = config.stacks[stack][1]
    depths = as_int_tuple("layers", range(depth + 1) if layers is None else layers) or ()
    outside = [i for i in depths if not 0 <= i <= depth]
    if outside or not depths:
        raise ValueError(f"layers must be in [0, {depth}]; got {layers}.")
    tokens, inputs = check_inputs(config, tokens, inputs)
    needed = 4 * len(depths) * tokens.size * config.vocab_size
    if needed > max_bytes:
        raise ValueError(
            f"Logits of {tokens.size:,} tokens over {config.vocab_size:,} ids at {len(depths)} "
            f"depths need {format_bytes(needed)}, but max_bytes is {format_bytes(max_bytes)}. "
            f"Select fewer layers, for example layers=({depth},), or fewer tokens, or raise "
            f"max_bytes to {needed}."
        )
    config, params = merge_lora(config, params)
    recorded = trace(config, params, tokens, dtype=dtype, **inputs)
    stream = depth_streams(config, recorded)
    if tuned is not None:
        shapes = (depth, *2 * (config.model_dim,)), (depth, config.model_dim)
        if (tuned.kernel.shape, tuned.bias.shape) != shapes:
            raise ValueError(
                f"tuned must have arrays of shapes {shapes}, those of this model; got "
                f"{tuned.kernel.shape} and {tuned.bias.shape}."
            )
        translated = jax.vmap(TunedLens.translate)(tuned, stream[:-1])
        stream = jnp.concatenate([translated, stream[-1:]])
    stream = stream[jnp.asarray(depths)]
    return apply_head(
        config, RuntimeConfig(dtype=dtype, adapter=config.adapter), stack, params, stream
    )


def depth_streams(
    config: c.TransformerConfig, recorded: ModelTrace
) -> Float[Array, "depths *batch T D"]:
    """Residual streams before the LM head: after 0, 1, ... layers."""
    stack: ResidualTrace = getattr(recorded, head_stack(config))
    return jnp.concatenate([stack.embeddings[None], stack.stream])


@partial(jax.jit, static_argnums=(0, 1, 2))
def apply_head(
    config: c.TransformerConfig, mode: RuntimeConfig, stack: str, params: Params, x: Array
) -> Float32[Array, "depths *batch T V"]:
    """Apply the model's final norm and head to a residual stream."""
    if config.final_norm:
        norm_variables = {"params": params[stack].get("final_norm", {})}
        x = jnp.asarray(Norm(config.norm, mode).apply(norm_variables, x))
    table = params["embedding"]["tokens"]["embedding"].astype(mode.dtype)
    logits: Any = LMHead(config, mode).apply({"params": params.get("head", {})}, x, table)
    return logits


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
    tokens, inputs = check_inputs(config, tokens, inputs)
    target_ids, has_loss = next_token_targets(config, tokens, targets, inputs.get("segments"))
    scores = _scores(Transformer(config, dtype=dtype), params, tokens, target_ids, inputs)
    losses = jnp.where(has_loss, F.cross_entropy_from_statistics(scores), 0.0)
    return losses if targets is not None else losses[..., :-1]


@partial(jax.jit, static_argnums=0)
def _scores(model: Transformer, params: Params, tokens: Array, targets: Array, inputs: Any) -> Any:
    check_parameters(model.config, params)
    return model.apply({"params": params}, tokens, targets=targets, **inputs)


def next_token_targets(
    config: c.TransformerConfig,
    tokens: Int[Array, "*batch T"],
    targets: Int[Array, "*batch T"] | None,
    segments: Int[Array, "*batch T"] | None,
) -> tuple[Int[Array, "*batch T"], Bool[Array, "*batch T"]]:
    """Next-token targets, and the mask of targets with loss.

    Raises:
        ValueError: The model is an encoder and has no targets, or targets have another shape or are
            outside the vocabulary.
    """
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
