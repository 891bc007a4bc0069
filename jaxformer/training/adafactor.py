"""Adafactor as an optax transformation; kernels are the matrices of `jaxformer.training.muon`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxformer.layers.parameter_metadata import ParameterMetadata


class AdafactorState(NamedTuple):
    """Step count, and mean squares per parameter: (row, column) or (element,)."""

    steps: Int[Array, ""]
    mean_squares: Any


def scale_by_adafactor(
    metadata: Any, *, decay_exponent: float, clip: float, min_scale: float, eps: float = 1e-30
) -> optax.GradientTransformation:
    """Divide by the root of factored second moments: one mean square per row and per column.

        r <- b r + (1 - b) mean over columns of (g^2 + eps)       b = 1 - t ** -decay_exponent
        c <- b c + (1 - b) mean over rows of (g^2 + eps)          t = 1, 2, ...
        u = g / sqrt(r c / mean(r))                               vectors are not factored
        update = u / max(1, rms(u) / clip) * max(min_scale, rms(parameter))

    Args:
        metadata: Tree of `ParameterMetadata` with the structure of the parameters.
        decay_exponent: Exponent of the decay rate b of the mean squares.
        clip: Largest root mean square of an update, before the next factor.
        min_scale: Lower bound of the parameter's root mean square in the last factor.
        eps: Added to each squared gradient.

    Returns:
        The transformation.

    References:
        Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
            algorithms 4 and 5. arXiv:1804.04235
    """

    def init_leaf(declared: ParameterMetadata, x: Array) -> tuple[Array, ...]:
        averaged = reversed(declared.input_and_output_axes) if declared.num_output_axes else ((),)
        shapes = ([1 if i in axes else n for i, n in enumerate(x.shape)] for axes in averaged)
        return tuple(jnp.zeros(shape, x.dtype) for shape in shapes)

    def update_leaf(declared: ParameterMetadata, g, means, x, b):
        inputs, outputs = declared.input_and_output_axes
        square = jnp.square(g) + eps
        mean_axes = (outputs, inputs) if outputs else ((),)
        means = tuple(
            b * old + (1 - b) * jnp.mean(square, axis=a, keepdims=True)
            for old, a in zip(means, mean_axes, strict=True)
        )
        if outputs:
            row = means[0] / jnp.mean(means[0], axis=inputs, keepdims=True)
            u = g * jax.lax.rsqrt(row) * jax.lax.rsqrt(means[1])
        else:
            u = g * jax.lax.rsqrt(means[0])
        matrix_axes = inputs + outputs
        u = u / jnp.maximum(1, root_mean_square(u, matrix_axes) / clip)
        return u * jnp.maximum(min_scale, root_mean_square(x, matrix_axes)), means

    def init(params):
        return AdafactorState(jnp.zeros([], jnp.int32), jax.tree.map(init_leaf, metadata, params))

    def update(grads, state, params):
        decay = 1 - (state.steps + 1).astype(jnp.float32) ** -decay_exponent
        leaves, tree = jax.tree.flatten(metadata)
        other_trees = map(tree.flatten_up_to, (grads, state.mean_squares, params))
        every_leaf = zip(leaves, *other_trees, strict=True)
        updates, means = zip(*(update_leaf(*leaf, decay) for leaf in every_leaf), strict=True)
        steps = optax.safe_increment(state.steps)
        return tree.unflatten(updates), AdafactorState(steps, tree.unflatten(means))

    return optax.GradientTransformation(init, update)


def root_mean_square(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """Root mean square over `axes`, which stay with size 1."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
