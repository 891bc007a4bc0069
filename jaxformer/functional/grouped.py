"""Grouped matrix multiplication (ragged dot): XLA, megablox on TPUs, Mosaic GPU on Hopper."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Integer

from jaxformer.functional.arguments import checked
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.foreign_kernels import untyped
from jaxformer.functional.platforms import LANES, nvidia_generation, target

LOG = logging.getLogger("jaxformer")


@checked
def grouped_linear(
    x: Float[Array, "R D"], kernels: Float[Array, "E D F"], sizes: Integer[Array, " E"]
) -> Float[Array, "R F"]:
    """Multiply consecutive groups of rows by one kernel per group.

        y[r] = x[r] @ kernels[e]    for the sizes[e] rows r of group e

    On TPUs and on Hopper GPUs Pallas kernels of JAX do it, elsewhere `jax.lax.ragged_dot`. It has a
    first gradient only, in reverse mode: a second derivative, as in a Hessian or a penalty on
    gradients, fails, and so does forward mode.

    Args:
        x: Rows, those of one group together, groups in order.
        kernels: One for each group, in the dtype of `x`.
        sizes: Rows of each group; they sum to R.

    Returns:
        The products, in the dtype of `x`.

    References:
        Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
        arXiv:2211.15841, section 5 (no token is dropped, no expert is padded)
    """
    return linear_by(_chosen(x, kernels), x, kernels, sizes.astype(jnp.int32))


class Products(ABC):
    """Both products that `grouped_linear` and its gradient are made of."""

    @abstractmethod
    def times(self, x: Array, kernels: Array, sizes: Array, *, transposed: bool = False) -> Array:
        """Multiply rows [R, D] by their kernels, [E, D, F] or transposed, to [R, F]."""

    @abstractmethod
    def outer(self, x: Array, y: Array, sizes: Array) -> Array:
        """Sum x[r] * y[r] over the rows of each group: [R, D], [R, F] to [E, D, F]."""


class Ragged(Products):
    """Backend with XLA's `jax.lax.ragged_dot`."""

    def times(self, x: Array, kernels: Array, sizes: Array, *, transposed: bool = False) -> Array:
        """`jax.lax.ragged_dot`."""
        return jax.lax.ragged_dot(x, kernels.mT if transposed else kernels, sizes)

    def outer(self, x: Array, y: Array, sizes: Array) -> Array:
        """`jax.lax.ragged_dot_general` over the ragged rows."""
        axes = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )
        return jax.lax.ragged_dot_general(x, y, sizes, axes)


@dataclass(frozen=True)
class Megablox(Products):
    """Backend with JAX's megablox kernels for TPUs."""

    interpret: bool = False

    def times(self, x: Array, kernels: Array, sizes: Array, *, transposed: bool = False) -> Array:
        """Megablox `gmm`."""
        rows, whole = len(x), padded(x, tile := self.rows(x, sizes))
        width = kernels.shape[1 if transposed else 2]

        def multiply(x: Array, kernels: Array, sizes: Array) -> Array:
            tiles = tile, *(part(n, x.dtype) for n in (x.shape[1], width))
            options = dict(transpose_rhs=transposed, interpret=self.interpret)
            return self.module.gmm(x, kernels, sizes, x.dtype, tiles, **options)

        return untyped(multiply, whole, kernels, sizes)[:rows]

    def outer(self, x: Array, y: Array, sizes: Array) -> Array:
        """Megablox `tgmm`."""
        tile = self.rows(x, sizes)

        def multiply(x: Array, y: Array, sizes: Array) -> Array:
            tiles = tile, *(part(n, x.dtype) for n in (x.shape[1], y.shape[1]))
            return self.module.tgmm(x.mT, y, sizes, x.dtype, tiles, interpret=self.interpret)

        return untyped(multiply, padded(x, tile), padded(y, tile), sizes)

    @property
    def module(self) -> Any:
        """The module `gmm`, which a function of the same name hides in its package."""
        return import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

    def rows(self, x: Array, sizes: Array) -> int:
        """Rows per tile: about the mean group size as a power of two, from LANES to 4 * LANES."""
        rows_per_group = max(1, len(x) // len(sizes))
        return min(4 * LANES, max(LANES, 2 ** int(math.log2(rows_per_group))))


class Hopper(Products):
    """Backend with JAX's Mosaic GPU kernels for Hopper."""

    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8)

    def times(self, x: Array, kernels: Array, sizes: Array, *, transposed: bool = False) -> Array:
        """Mosaic GPU `ragged_dot`."""
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        def multiply(x: Array, kernels: Array, sizes: Array) -> Array:
            options: Any = self.tiles | dict(transpose_rhs=transposed)
            return ragged_dot(x, kernels, group_sizes=sizes, **options)

        return untyped(multiply, padded(x, LANES), kernels, sizes)[: len(x)]

    def outer(self, x: Array, y: Array, sizes: Array) -> Array:
        """Mosaic GPU `transposed_ragged_dot`."""
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernels

        def multiply(x: Array, y: Array, sizes: Array) -> Array:
            return kernels.transposed_ragged_dot(x, y, group_sizes=sizes, **self.tiles)

        return untyped(multiply, padded(x, LANES), padded(y, LANES), sizes)


def padded(x: Array, multiple: int) -> Array:
    """Append zero rows, which belong to no group, up to a multiple."""
    return jnp.pad(x, [(0, -len(x) % multiple), (0, 0)])


def part(width: int, dtype: Any) -> int:
    """Width of a tile: at most 2048 bytes, a multiple of LANES, as even as possible."""
    even_width = width / math.ceil(width * dtype.itemsize / 2048)
    return min(width, math.ceil(even_width / LANES) * LANES)


def _chosen(x: Array, kernels: Array) -> Products:
    (platform, kind), dtype = target(), str(x.dtype)
    backends: dict[str, tuple[Products, str | None]] = {
        "tpu": (Megablox(), _megablox_cannot(dtype)),
        "gpu": (Hopper(), _hopper_cannot(kind, dtype, kernels)),
    }
    backend, reason = backends.get(platform, (Ragged(), f"there is no kernel for a {platform}"))
    if reason is None and jax.config.values["jax_enable_checks"]:
        reason = "in a kernel no type says how devices differ, which JAX_ENABLE_CHECKS asks for"
    backend = backend if reason is None else Ragged()
    explanation = "" if reason is None else f", since {reason}"
    LOG.info(
        "Products of %d experts: %s%s", len(kernels), type(backend).__name__.lower(), explanation
    )
    return backend


def _megablox_cannot(dtype: str) -> str | None:
    if dtype not in ("bfloat16", "float32"):
        return f"megablox computes in bfloat16 or float32; got {dtype}"
    return None


def _hopper_cannot(kind: str, dtype: str, kernels: Array) -> str | None:
    if nvidia_generation(kind) != 9:
        return f"JAX's kernels are for Hopper; got {kind}"
    if dtype not in ("bfloat16", "float16"):
        return f"Hopper's kernels compute in bfloat16 or float16; got {dtype}"
    if any(width % LANES for width in kernels.shape[1:]):
        D, F = kernels.shape[1:]
        return f"Hopper's kernels have widths in multiples of {LANES}; got {D} and {F}"
    if find_spec("jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu") is None:
        return f"JAX {jax.__version__} has no kernel for their gradient"
    return None


def _batched_as_more_groups(product: Callable[..., Array]) -> Callable[..., Array]:
    """Make `vmap` run a batch of grouped products as one product with more groups.

    JAX's own rule for a ragged product maps all operands along their first axis or none.
    """
    mappable = custom_vmap(product)

    @mappable.def_vmap
    def of_batch(count: int, mapped: list[bool], *operands: Array):
        batched = [
            x if is_mapped else jnp.broadcast_to(x, (count, *x.shape))
            for x, is_mapped in zip(operands, mapped, strict=True)
        ]
        flat_result = mappable(*(x.reshape(-1, *x.shape[2:]) for x in batched))
        return flat_result.reshape(count, -1, *flat_result.shape[1:]), True

    return mappable


def linear_by(products: Products, x: Array, kernels: Array, sizes: Array) -> Array:
    """`grouped_linear` by a choice of products. Gradients of what devices share are summed."""
    axes = frozenset[str]().union(*map(varies_over, (x, kernels, sizes)))
    return _linear(products, *(varying(a, *axes) for a in (x, kernels, sizes)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(products: Products, x: Array, kernels: Array, sizes: Array) -> Array:
    return _batched_as_more_groups(products.times)(x, kernels, sizes)


def _forward(products: Products, x: Array, kernels: Array, sizes: Array):
    return _linear(products, x, kernels, sizes), (x, kernels, sizes)


def _backward(products: Products, kept: tuple[Array, Array, Array], dy: Array):
    x, kernels, group_sizes = kept
    dx = _batched_as_more_groups(partial(products.times, transposed=True))(dy, kernels, group_sizes)
    return dx, _batched_as_more_groups(products.outer)(x, dy, group_sizes), None


_linear.defvjp(_forward, _backward)
