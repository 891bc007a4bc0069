"""Updates that read a kernel as a matrix: Muon and Adafactor.

A kernel is stored with its own axes: `[D, N, H]`, stacked over layers `[L, D, N, H]`. Both rules
are about one matrix from inputs to outputs, so each layer of a stack, and each expert, is updated
as if it stood alone.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath, keystr, tree_flatten_with_path, tree_map_with_path
from jaxtyping import Array, Float, Int

Role = Literal["kernel", "head", "embedding", "bias", "scale"]

INTO_HEADS = frozenset("query key value relative key_value query_latent latent rotary_key".split())
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Spread(NamedTuple):
    """How parameters are shared out over a mesh: a spec for each, by its path."""

    mesh: Mesh
    specs: dict[KeyPath, P]


class AdafactorState(NamedTuple):
    """Updates made, and per parameter its mean squares: of (rows, columns), or of (elements,)."""

    steps: Int[Array, ""]
    mean_squares: Any


def role(path: KeyPath) -> Role:
    """What a parameter is for, from its path in the tree.

    Args:
        path: As given by `jax.tree_util.tree_map_with_path`.

    Returns:
        "kernel" of a layer; "head", the kernel from features to the vocabulary; "embedding", a
        table of vectors or biases; "bias"; or "scale" of a norm.

    Raises:
        ValueError: The last name on the path is none of those.
    """
    names = path_names(path)
    match names[-1]:
        case "kernel":
            return "head" if names[-2:] == ["head", "kernel"] else "kernel"
        case "embedding" | "bias" | "scale" as name:
            return name
    raise ValueError(
        f"Parameter {'/'.join(names)} has no role: "
        "its own name must be kernel, embedding, bias or scale."
    )


def path_names(path: KeyPath) -> list[str]:
    """Names of the modules on the path, then the parameter's own."""
    return keystr(path, simple=True, separator="/").split("/")


def own_axes(path: KeyPath, ndim: int) -> tuple[int, ...]:
    """Axes of a parameter without the one that stacks layers."""
    return tuple(range(1 if "layers" in path_names(path) else 0, ndim))


def matrix_axes(path: KeyPath, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Input axes and output axes of a kernel or table; None for what is no matrix.

    Heads are outputs of query, key, value, what stands for them and relative positions, and inputs
    of out. Axes before both, of stacked layers and of experts, count matrices.
    """
    if role(path) in ("bias", "scale"):
        return None
    module = path_names(path)[-2]
    if len(own_axes(path, ndim)) >= 3 and module in INTO_HEADS:
        return (ndim - 3,), (ndim - 2, ndim - 1)
    if len(own_axes(path, ndim)) >= 3 and module == "out":
        return (ndim - 3, ndim - 2), (ndim - 1,)
    return (ndim - 2,), (ndim - 1,)


def orthogonalize(x: Float[Array, "*batch R C"], *, steps: int = 5) -> Float[Array, "*batch R C"]:
    """Bring all singular values of a matrix near 1 and keep its singular vectors.

        y <- x / ||x||_F;   y <- 3.4445 y - 4.7750 (y y^T) y + 2.0315 (y y^T)^2 y   `steps` times

    The polynomial is steep at 0 rather than exact at 1: after five steps, singular values that were
    above 0.003 of the norm lie between 0.68 and 1.21.

    Args:
        x: Matrices along the last two axes, in any float dtype.
        steps: Iterations.

    Returns:
        The matrices, in the dtype of `x`. A zero matrix stays zero.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Bernstein and Newhouse, Old Optimizer, New Norm: An Anthology, 2024. arXiv:2409.20325
    """
    a, b, c = NEWTON_SCHULZ
    wide = x.astype(jnp.float32)
    tall = x.shape[-2] > x.shape[-1]
    y = jnp.matrix_transpose(wide) if tall else wide  # the smaller Gram matrix is cheaper
    y = y / (jnp.sqrt(jnp.sum(jnp.square(y), axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(steps):
        gram = y @ jnp.matrix_transpose(y)
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (jnp.matrix_transpose(y) if tall else y).astype(x.dtype)


def in_whole(
    rule: Callable[[Array], Array],
    x: Float[Array, "M R C"],
    *,
    rows: str | None,
    columns: str | None,
) -> Float[Array, "M R C"]:
    """Apply a rule for whole matrices to devices' shares of them: one exchange each way.

    With d devices, each has all rows and columns of its ``ceil(M / d)`` matrices in between, so all
    work alike where M is a multiple of d, and nothing is computed twice.

    Args:
        rule: Maps matrices to matrices; of zeros it must make zeros.
        x: This device's share of each of M matrices, inside `jax.shard_map`.
        rows: Axis of the devices that share the rows; None if each has all.
        columns: Likewise.

    Returns:
        This device's share of each result.
    """
    shared = [(name, at) for name, at in ((rows, 1), (columns, 2)) if name is not None]
    devices = math.prod(jax.lax.axis_size(name) for name, _ in shared)
    count = x.shape[0]
    x = jnp.pad(x, ((0, -count % devices), (0, 0), (0, 0)))
    for name, at in shared:
        x = jax.lax.all_to_all(x, name, split_axis=0, concat_axis=at, tiled=True)
    x = rule(x)
    for name, at in reversed(shared):
        x = jax.lax.all_to_all(x, name, split_axis=at, concat_axis=0, tiled=True)
    return x[:count]


def scale_by_muon(*, momentum: float, rms: float) -> optax.GradientTransformation:
    """Replace each kernel's momentum by the nearest orthogonal matrix.

        m <- momentum m + g
        update = rms sqrt(max(inputs, outputs)) orthogonalize(g + momentum m)

    An orthogonal matrix has root mean square `max(inputs, outputs) ** -0.5`, so `rms` is that of
    the update, whatever the matrix's shape. AdamW's is about 0.2, and then both take the same
    learning rate and weight decay.

    `update` takes `spread`, where kernels are shared out over devices: layers are then exchanged
    for shares, so that each device works on whole matrices of some layers; see `in_whole`.

    References:
        Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
        Liu et al., Muon is Scalable for LLM Training, 2025, section 2.2. arXiv:2502.16982
    """

    def one(path, g, place):
        inputs, outputs = matrix_axes(path, g.ndim)
        rows, columns = (math.prod(g.shape[i] for i in axes) for axes in (inputs, outputs))

        def rule(matrices):
            return rms * max(rows, columns) ** 0.5 * orthogonalize(matrices)

        if place is None:
            return rule(g.reshape(*g.shape[: inputs[0]], rows, columns)).reshape(g.shape)
        mesh, spec = place
        first, second = (_shared_axis(spec, axes) for axes in (inputs, outputs))

        def per_device(share):
            sides = [math.prod(share.shape[i] for i in axes) for axes in (inputs, outputs)]
            matrices = share.reshape(-1, *sides)
            return in_whole(rule, matrices, rows=first, columns=second).reshape(share.shape)

        return jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec)(g)

    def update(updates, state, params=None, *, spread=None, **extra):
        def placed(path, g):
            return one(path, g, None if spread is None else (spread.mesh, spread.specs[path]))

        return tree_map_with_path(placed, updates), state

    return optax.chain(
        optax.trace(momentum, nesterov=True),
        optax.GradientTransformationExtraArgs(optax.init_empty_state, update),
    )


def _shared_axis(spec: P, axes: tuple[int, ...]) -> str | None:
    """Which devices share a side of a matrix; its first axis is the one that can be shared out."""
    names = [spec[i] if i < len(spec) else None for i in axes]
    if any(names[1:]):
        raise ValueError(f"Only the first of axes {axes} can be shared out; got {spec}.")
    return names[0]


def scale_by_adafactor(
    *, decay_exponent: float, clip: float, min_scale: float, eps: float = 1e-30
) -> optax.GradientTransformation:
    """Divide by the root of a mean square that is kept only per row and per column of a matrix.

        r <- b r + (1 - b) mean over columns of (g^2 + eps)       b = 1 - t ** -decay_exponent
        c <- b c + (1 - b) mean over rows of (g^2 + eps)          t = 1, 2, ...
        u = g / sqrt(r c / mean(r))                               vectors keep every mean square
        update = u / max(1, rms(u) / clip) * max(min_scale, rms(parameter))

    References:
        Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
            algorithms 4 and 5. arXiv:1804.04235
    """

    def start(path, x):
        axes = matrix_axes(path, x.ndim)
        kept = ((),) if axes is None else reversed(axes)
        shapes = [[1 if i in gone else n for i, n in enumerate(x.shape)] for gone in kept]
        return tuple(jnp.zeros(shape, x.dtype) for shape in shapes)

    def one(path, g, means, x, b):
        axes, whole = matrix_axes(path, g.ndim), own_axes(path, g.ndim)
        square = jnp.square(g) + eps
        kept = ((),) if axes is None else reversed(axes)
        means = tuple(
            b * old + (1 - b) * jnp.mean(square, axis=a, keepdims=True)
            for old, a in zip(means, kept, strict=True)
        )
        if axes is None:
            u = g * jax.lax.rsqrt(means[0])
        else:
            row = means[0] / jnp.mean(means[0], axis=axes[0], keepdims=True)
            u = g * jax.lax.rsqrt(row) * jax.lax.rsqrt(means[1])
            whole = axes[0] + axes[1]
        u = u / jnp.maximum(1, root_mean_square(u, whole) / clip)
        return u * jnp.maximum(min_scale, root_mean_square(x, whole)), means

    def init(params):
        return AdafactorState(jnp.zeros([], jnp.int32), tree_map_with_path(start, params))

    def update(grads, state, params):
        b = 1 - (state.steps + 1).astype(jnp.float32) ** -decay_exponent
        leaves, tree = tree_flatten_with_path(grads)
        rest = zip(tree.flatten_up_to(state.mean_squares), tree.flatten_up_to(params), strict=True)
        pairs = [
            one(path, g, means, x, b) for (path, g), (means, x) in zip(leaves, rest, strict=True)
        ]
        updates, means = ([pair[i] for pair in pairs] for i in (0, 1))
        steps = optax.safe_increment(state.steps)
        return tree.unflatten(updates), AdafactorState(steps, tree.unflatten(means))

    return optax.GradientTransformation(init, update)


def root_mean_square(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    """Over `axes`, which stay with length one."""
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
