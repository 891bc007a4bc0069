"""Per-layer statistics of activations, gradients and branch outputs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.lens import next_token_targets
from jaxformer.inspect.model_trace import (
    Params,
    ResidualTrace,
    apply_with_intermediates,
    check_inputs,
    trace,
)
from jaxformer.layers import Transformer
from jaxformer.layers.stack import LAYER_GROUPS, unstack_layers


class Statistics(NamedTuple):
    """Mean, standard deviation, RMS and largest magnitude, per layer.

    Attributes:
        mean: Mean.
        std: Standard deviation.
        rms: Root mean square.
        max_abs: Largest magnitude.
    """

    mean: Float32[Array, " layers"]
    std: Float32[Array, " layers"]
    rms: Float32[Array, " layers"]
    max_abs: Float32[Array, " layers"]


def activation_statistics(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> dict[str, dict[str, Statistics]]:
    """Statistics of the residual stream after each layer and of each branch.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        dtype: Dtype of the computation; statistics are computed in float32.
        **inputs: As in `trace`.

    Returns:
        For each stack ("decoder", "encoder"), statistics of "residual_stream" and of each branch.

    Raises:
        ValueError: As in `Transformer`.
    """
    recorded = trace(config, params, tokens, dtype=dtype, **inputs)
    return {
        name: {what: _statistics(x) for what, x in _stream_and_branches(stack).items()}
        for name, stack in _present_stacks(recorded).items()
    }


def residual_contributions(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> dict[str, dict[str, Float32[Array, "layers *batch T"]]]:
    """Norm of each branch relative to the residual stream it is added to.

        contribution[l, t] = |branch[l, t]| / |stream[l - 1, t]|

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        For each stack, the relative norm of each branch in each layer and token.

    Raises:
        ValueError: As in `Transformer`.
    """
    contributions = {}
    for name, stack in _present_stacks(
        trace(config, params, tokens, dtype=dtype, **inputs)
    ).items():
        stream_norm = _vector_norm(jnp.concatenate([stack.embeddings[None], stack.stream[:-1]]))
        branch_ratios = {
            branch: _vector_norm(added) / stream_norm for branch, added in stack.branches.items()
        }
        contributions[name] = branch_ratios
    return contributions


def gradient_statistics(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    targets: Int[Array, "*batch T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> dict[str, dict[str, Float32[Array, " layers"]]]:
    """Gradient norms of each layer's parameters and of the stream after it.

        norm[l] = sqrt(sum over parameters p of layer l of (d loss / d p) ** 2)

    The loss is the mean cross-entropy of the next token, or of `targets`.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        targets: Target id of each token; None is the next token.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        For each stack, the gradient norm of each module's parameters ("attention", "feed_forward",
        "pre_attention_norm", ...), 0 in layers without that module, and of the stream after each
        layer ("residual_stream").

    Raises:
        ValueError: The model is an encoder and has no targets, or as in `Transformer`.
    """
    tokens, inputs = check_inputs(config, tokens, inputs)
    target_ids, has_loss = next_token_targets(config, tokens, targets, inputs.get("segments"))
    model = Transformer(config, dtype=dtype)
    norms = _gradient_norms(model, params, tokens, target_ids, has_loss, inputs)
    return {stack: norms[stack] for stack in config.stacks}  # not in alphabetical order


@partial(jax.jit, static_argnums=0)
def _gradient_norms(
    model: Transformer, params: Params, tokens: Array, targets: Array, has_loss: Array, inputs: Any
) -> dict[str, dict[str, Array]]:
    """Norms of the gradient in the parameters, and in zeros added to the stream of each layer."""
    _, shapes = jax.eval_shape(partial(apply_with_intermediates, model), params, tokens, inputs)
    streams = {name: _stream_shapes(stack) for name, stack in shapes.items()}
    zeros = jax.tree.map(
        lambda x: (jax.tree_util.Partial(jnp.add, jnp.zeros(x.shape, x.dtype)),), streams
    )

    def loss(params: Params, perturbations: Any) -> Float[Array, ""]:
        logits, _ = apply_with_intermediates(model, params, tokens, inputs, perturbations)
        return F.cross_entropy(logits, targets, mask=has_loss)

    by_params, by_stream = jax.grad(loss, argnums=(0, 1))(params, zeros)
    norms_by_stack: dict[str, dict[str, Array]] = {}
    for stack in zeros:
        layers = unstack_layers(by_params[stack])
        parts = dict.fromkeys(part for layer in layers for part in layer)
        norms = {part: _tree_norms([layer.get(part, {}) for layer in layers]) for part in parts}
        norms_by_stack[stack] = norms | {
            "residual_stream": _tree_norms(unstack_layers(by_stream[stack]))
        }
    return norms_by_stack


def _stream_shapes(intermediates: Any) -> Any:
    """Select the shapes of the sown residual streams of a stack."""
    parts = {name: intermediates[name] for name in LAYER_GROUPS if name in intermediates}
    return {
        name: {
            layer: {"residual_stream": values["residual_stream"]} for layer, values in part.items()
        }
        for name, part in parts.items()
    }


def _present_stacks(recorded: Any) -> dict[str, ResidualTrace]:
    """Return the stacks of the model, in the order in which they run."""
    pairs = {"encoder": recorded.encoder, "decoder": recorded.decoder}
    return {name: stack for name, stack in pairs.items() if stack is not None}


def _stream_and_branches(stack: ResidualTrace) -> dict[str, Array]:
    return {"residual_stream": stack.stream} | stack.branches


def _statistics(x: Float[Array, "layers ..."]) -> Statistics:
    flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
    return Statistics(
        jnp.mean(flat, axis=-1),
        jnp.std(flat, axis=-1),
        jnp.sqrt(jnp.mean(flat**2, axis=-1)),
        jnp.max(jnp.abs(flat), axis=-1),
    )


def _vector_norm(x: Float[Array, "*shape D"]) -> Float32[Array, "*shape"]:
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def _tree_norms(trees: list[Any]) -> Float32[Array, " layers"]:
    """Return the norm of each tree."""

    def norm(tree: Any) -> Float32[Array, ""]:
        squares = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree)]
        return jnp.sqrt(sum(squares, jnp.zeros(())))

    return jnp.stack([norm(tree) for tree in trees])
