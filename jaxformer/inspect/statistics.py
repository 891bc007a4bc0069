"""Per-layer statistics of activations, gradients and branch outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.lens import next_token_targets
from jaxformer.inspect.model_trace import (
    Arrays,
    Params,
    ResidualTrace,
    apply_with_intermediates,
    check_inputs,
    trace,
)
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import LAYER_GROUPS, unstack_layers


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
    statistics = {}
    for name, stack in _present_stacks(recorded).items():
        values = {"residual_stream": stack.stream, **stack.branches}
        statistics[name] = {what: _statistics(x) for what, x in values.items()}
    return statistics


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
    recorded, contributions = trace(config, params, tokens, dtype=dtype, **inputs), {}
    for name, stack in _present_stacks(recorded).items():
        norm = _vector_norm(jnp.concatenate([stack.embeddings[None], stack.stream[:-1]]))
        contributions[name] = {
            branch: _vector_norm(added) / norm for branch, added in stack.branches.items()
        }
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
    arrays = check_inputs(config, tokens, inputs)
    model, with_loss = Transformer(config, dtype=dtype), next_token_targets(config, arrays, targets)
    norms = _gradient_norms(model, params, arrays, *with_loss)
    return {stack: norms[stack] for stack in config.stacks}  # not in alphabetical order


@partial(jax.jit, static_argnums=0)
def _gradient_norms(
    model: Transformer, params: Params, arrays: Arrays, targets: Array, has_loss: Array
) -> dict[str, dict[str, Array]]:
    """Norms of the gradient in the parameters, and in zeros added to the stream of each layer."""
    _, shapes = jax.eval_shape(partial(apply_with_intermediates, model), params, arrays)

    def add_zeros(x: jax.ShapeDtypeStruct) -> tuple[Callable[[Array], Array]]:
        return (jax.tree_util.Partial(jnp.add, jnp.zeros(x.shape, x.dtype)),)

    zeros = {name: jax.tree.map(add_zeros, _only_streams(x)) for name, x in shapes.items()}

    def loss(params: Params, perturbations: Any) -> Float[Array, ""]:
        logits, _ = apply_with_intermediates(model, params, arrays, perturbations)
        return F.cross_entropy(logits, targets, mask=has_loss)

    by_params, by_stream = jax.grad(loss, argnums=(0, 1))(params, zeros)
    norms_by_stack: dict[str, dict[str, Array]] = {}
    for stack in zeros:
        layers = unstack_layers(by_params[stack])
        parts = dict.fromkeys(part for layer in layers for part in layer)
        norms = {part: _tree_norms([layer.get(part, {}) for layer in layers]) for part in parts}
        norms["residual_stream"] = _tree_norms(unstack_layers(by_stream[stack]))
        norms_by_stack[stack] = norms
    return norms_by_stack


def _only_streams(intermediates: Any) -> Any:
    """Select the sown residual streams of a stack."""
    paths = flatten_dict({name: x for name, x in intermediates.items() if name in LAYER_GROUPS})
    return unflatten_dict({path: x for path, x in paths.items() if path[2] == "residual_stream"})


def _present_stacks(recorded: Any) -> dict[str, ResidualTrace]:
    """Return the stacks of the model, in the order in which they run."""
    pairs = {"encoder": recorded.encoder, "decoder": recorded.decoder}
    return {name: stack for name, stack in pairs.items() if stack is not None}


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
