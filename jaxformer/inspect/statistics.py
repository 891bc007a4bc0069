"""Per-layer statistics of activations, gradients and branch outputs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.lens import what_follows
from jaxformer.inspect.trace import (
    Params,
    StackTrace,
    check_inputs,
    layers_of,
    observe,
    stacks_of,
    trace,
)
from jaxformer.layers import Transformer


class Statistics(NamedTuple):
    """Mean, standard deviation, RMS and largest magnitude, per layer.

    Attributes:
        mean: Their mean.
        deviation: Their standard deviation.
        rms: The root of their mean square.
        largest: The largest in size.
    """

    mean: Float32[Array, " layers"]
    deviation: Float32[Array, " layers"]
    rms: Float32[Array, " layers"]
    largest: Float32[Array, " layers"]


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
        params: Its parameters.
        tokens: Token ids.
        dtype: Of the computation; the statistics are taken in float32.
        **inputs: As in `trace`.

    Returns:
        For each stack ("decoder", "encoder") "stream" and each branch.

    Raises:
        ValueError: As `Transformer` does.
    """
    recorded = trace(config, params, tokens, dtype=dtype, **inputs)
    return {
        name: {what: _statistics(x) for what, x in _streams(stack).items()}
        for name, stack in _stacks(recorded).items()
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
        params: Its parameters.
        tokens: Token ids.
        dtype: Of the computation.
        **inputs: As in `trace`.

    Returns:
        For each stack the share of each branch, in each layer and token.

    Raises:
        ValueError: As `Transformer` does.
    """
    contributions = {}
    for name, stack in _stacks(trace(config, params, tokens, dtype=dtype, **inputs)).items():
        stream_norm = _size(jnp.concatenate([stack.embedded[None], stack.stream[:-1]]))
        branch_ratios = {
            branch: _size(added) / stream_norm for branch, added in stack.branches.items()
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

        norm[l] = sqrt(sum over the numbers of layer l of (d loss / d number) ** 2)

    The loss is the mean cross-entropy of the next token, or of `targets`.

    Args:
        config: The model.
        params: Its parameters.
        tokens: Token ids.
        targets: What should be said at each token; by default the next one.
        dtype: Of the computation.
        **inputs: As in `trace`.

    Returns:
        For each stack the norm of each part's parameters ("attention", "feed_forward",
        "pre_attention_norm", ...), 0 in layers without that part, and for "stream" that of the
        stream after the layer.

    Raises:
        ValueError: An encoder without targets, or as `Transformer` does.
    """
    tokens, inputs = check_inputs(config, tokens, inputs)
    target_ids, has_loss = what_follows(config, tokens, targets, inputs.get("segments"))
    model = Transformer(config, dtype=dtype)
    norms = _gradient_norms(model, params, tokens, target_ids, has_loss, inputs)
    return {stack: norms[stack] for stack in stacks_of(config)}  # a tree's names are sorted


@partial(jax.jit, static_argnums=0)
def _gradient_norms(
    model: Transformer, params: Params, tokens: Array, targets: Array, counts: Array, inputs: Any
) -> dict[str, dict[str, Array]]:
    """Of the loss in the parameters, and in zeros added to the stream after each layer."""
    _, shapes = jax.eval_shape(partial(observe, model), params, tokens, inputs)
    streams = {name: _only_streams(stack) for name, stack in shapes.items()}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), streams)

    def loss(params: Params, nudges: Any) -> Float[Array, ""]:
        logits, _ = observe(model, params, tokens, inputs, nudges)
        return F.cross_entropy(logits, targets, mask=counts)

    by_params, by_stream = jax.grad(loss, argnums=(0, 1))(params, zeros)
    norms_by_stack: dict[str, dict[str, Array]] = {}
    for stack in zeros:
        layers = layers_of(by_params[stack])
        parts = dict.fromkeys(part for layer in layers for part in layer)
        norms = {part: _norms([layer.get(part, {}) for layer in layers]) for part in parts}
        norms_by_stack[stack] = norms | {"stream": _norms(layers_of(by_stream[stack]))}
    return norms_by_stack


def _only_streams(said: Any) -> Any:
    """The sown residual streams of a stack, as zeros to perturb."""
    parts = {name: said[name] for name in ("layers", "tail") if name in said}
    return {
        name: {layer: {"stream": values["stream"]} for layer, values in part.items()}
        for name, part in parts.items()
    }


def _stacks(seen: Any) -> dict[str, StackTrace]:
    """The stacks that a model has, in the order in which they run."""
    pairs = {"encoder": seen.encoder, "decoder": seen.decoder}
    return {name: stack for name, stack in pairs.items() if stack is not None}


def _streams(stack: StackTrace) -> dict[str, Array]:
    return {"stream": stack.stream} | stack.branches


def _statistics(x: Float[Array, "layers ..."]) -> Statistics:
    flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
    return Statistics(
        jnp.mean(flat, axis=-1),
        jnp.std(flat, axis=-1),
        jnp.sqrt(jnp.mean(flat**2, axis=-1)),
        jnp.max(jnp.abs(flat), axis=-1),
    )


def _size(x: Float[Array, "*shape D"]) -> Float32[Array, "*shape"]:
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)


def _norms(trees: list[Any]) -> Float32[Array, " layers"]:
    """The norm of all numbers of each tree."""

    def norm(tree: Any) -> Float32[Array, ""]:
        squares = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree)]
        return jnp.sqrt(sum(squares, jnp.zeros(())))

    return jnp.stack([norm(tree) for tree in trees])
