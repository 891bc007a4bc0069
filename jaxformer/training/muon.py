"""Muon as an optax transformation on sharded, stacked kernels.

A kernel may have more than two axes: `[D, N, H]`, stacked over layers `[L, D, N, H]`. The rule
treats it as one matrix from inputs to outputs, as its layer declares, for each layer and each
expert separately.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxformer.layers.parameter_metadata import ParameterMetadata

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Float[Array, "*batch R C"], *, steps: int = 5) -> Float[Array, "*batch R C"]:
    """Newton-Schulz iteration: set all singular values near 1, keep the singular vectors.

        y <- x / ||x||_F;   y <- 3.4445 y - 4.7750 (y y^T) y + 2.0315 (y y^T)^2 y   `steps` times

    The polynomial is chosen to be steep at 0, not exact at 1: after five steps, singular values
    above 0.003 of the norm are between 0.68 and 1.21.

    Args:
        x: Matrices along the last two axes, in any float dtype.
        steps: Number of iterations.

    Returns:
        The matrices, in the dtype of `x`. A zero matrix stays zero.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Bernstein and Newhouse, Old Optimizer, New Norm: An Anthology, 2024. arXiv:2409.20325
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    wide = x.astype(jnp.float32)
    tall = x.shape[-2] > x.shape[-1]
    y = jnp.matrix_transpose(wide) if tall else wide  # the smaller Gram matrix is cheaper
    y = y / (jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(steps):
        gram = y @ jnp.matrix_transpose(y)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (jnp.matrix_transpose(y) if tall else y).astype(x.dtype)


def apply_to_whole_matrices(
    fn: Callable[[Array], Array], x: Float[Array, "M R C"], *, rows: str | None, columns: str | None
) -> Float[Array, "M R C"]:
    """Apply `fn` to whole matrices of a sharded stack, between two all-to-alls.

    Each of d devices gets ``ceil(M / d)`` whole matrices, so that nothing is computed twice and the
    load is even if M is a multiple of d.

    Args:
        fn: Maps matrices to matrices, and zeros to zeros.
        x: This device's shard of each of M matrices, inside `jax.shard_map`.
        rows: Mesh axis that shards the rows, or None.
        columns: Mesh axis that shards the columns, or None.

    Returns:
        This device's shard of each result.
    """
    sharded_axes = [(name, axis) for name, axis in ((rows, 1), (columns, 2)) if name is not None]
    devices = math.prod(jax.lax.axis_size(name) for name, _ in sharded_axes)
    count = x.shape[0]
    x = jnp.pad(x, ((0, -count % devices), (0, 0), (0, 0)))
    for name, axis in sharded_axes:
        x = jax.lax.all_to_all(x, name, split_axis=0, concat_axis=axis, tiled=True)
    x = fn(x)
    for name, axis in reversed(sharded_axes):
        x = jax.lax.all_to_all(x, name, split_axis=axis, concat_axis=0, tiled=True)
    return x[:count]


def scale_by_muon(metadata: Any, *, momentum: float, rms: float) -> optax.GradientTransformation:
    """Replace each matrix's momentum by the nearest orthogonal matrix.

        m <- momentum m + g
        update = rms sqrt(max(inputs, outputs)) orthogonalize(g + momentum m)

    An orthogonal matrix has root mean square `max(inputs, outputs) ** -0.5`, so the update has
    root mean square `rms` for every shape. At 0.2, as of AdamW, learning rates and weight decays of
    AdamW apply.

    `update` takes a `mesh` if the matrices are sharded: an all-to-all then gives each device whole
    matrices of some layers; see `apply_to_whole_matrices`.

    Args:
        metadata: Tree of `ParameterMetadata` with the structure of the parameters. Updates may have
            `optax.MaskedNode` for some; all others must be matrices.
        momentum: Decay rate of the sum of gradients.
        rms: Root mean square of an update at learning rate 1.

    Returns:
        The transformation.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Liu et al., Muon is Scalable for LLM Training, 2025, section 2.2. arXiv:2502.16982
    """

    def update_leaf(declared: ParameterMetadata, g: Any, mesh: Mesh | None) -> Any:
        if isinstance(g, optax.MaskedNode):
            return g
        inputs, outputs = declared.input_and_output_axes
        rows, columns = (math.prod(g.shape[i] for i in axes) for axes in (inputs, outputs))

        def orthogonal_update(matrices):
            return rms * max(rows, columns) ** 0.5 * orthogonalize(matrices)

        if mesh is None:
            matrices = g.reshape(*g.shape[: inputs[0]], rows, columns)
            return orthogonal_update(matrices).reshape(g.shape)
        spec = declared.partition_spec(mesh.shape)
        row_axis, column_axis = (_sharded_axis_name(spec, axes) for axes in (inputs, outputs))

        def per_device(share):
            sides = [math.prod(share.shape[i] for i in axes) for axes in (inputs, outputs)]
            matrices, names = share.reshape(-1, *sides), dict(rows=row_axis, columns=column_axis)
            updates = apply_to_whole_matrices(orthogonal_update, matrices, **names)
            return updates.reshape(share.shape)

        return jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec)(g)

    def update(updates, state, params=None, *, mesh=None, **extra):
        return jax.tree.map(partial(update_leaf, mesh=mesh), metadata, updates), state

    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.GradientTransformationExtraArgs(optax.init_empty_state, update),
    )


def _sharded_axis_name(spec: P, axes: tuple[int, ...]) -> str | None:
    """Mesh axis that shards one side of a matrix, or None."""
    names = [spec[i] for i in axes]
    if any(names[1:]):
        raise ValueError(f"Only the first of the axes {axes} may be sharded; got {spec}.")
    return names[0]
