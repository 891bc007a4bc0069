"""Grouped matrix multiplication: by blocks, by megablox on TPUs, by Mosaic GPU on Hopper."""

import logging
import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.blocked_gemm import blocked_matmul, blocked_outer_product
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.external_kernels import call_without_vma, merge_vmap_axes
from jaxformer.functional.platforms import LANES, compute_capability_major, target_device

LOG = logging.getLogger("jaxformer")
GROUPED_MATMUL_REMAT_NAME = "grouped product"  # name of results for policies of `jax.checkpoint`


@typechecked
def grouped_matmul(
    x: Float[Array, "R D"],
    kernels: Float[Array, "E D F"],
    group_sizes: Integer[Array, " E"],
    biases: Float[Array, "E F"] | None = None,
) -> Float[Array, "R F"]:
    """Multiply consecutive groups of rows by one kernel per group, and add the group's bias.

        y[r] = x[r] @ kernels[e] + biases[e]    for the sizes[e] rows r of group e

    TPUs and Hopper GPUs use Pallas kernels of JAX, other devices a loop over blocks of rows. Only
    the first reverse-mode derivative is supported: forward mode and second derivatives fail.

    Args:
        x: Rows, sorted by group.
        kernels: One kernel per group, in the dtype of `x`.
        group_sizes: Rows of each group; they sum to R.
        biases: One bias per group; None has none.

    Returns:
        The products, in the dtype of `x`.

    References:
        Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022.
        arXiv:2211.15841, section 5 (no token is dropped, no expert is padded)
    """
    sizes = group_sizes.astype(jnp.int32)
    y = grouped_matmul_by(_choose_backend(x, kernels), x, kernels, sizes)
    return y if biases is None else y + _row_biases(biases, sizes, len(x)).astype(y.dtype)


def _row_biases(
    biases: Float[Array, "E F"], group_sizes: Integer[Array, " E"], num_rows: int
) -> Float[Array, "R F"]:
    """The bias of each row's group, as a product with a one-hot matrix: its gradient is one too."""
    ends, row = jnp.cumsum(group_sizes)[None], jnp.arange(num_rows)[:, None]
    is_in_group = (row < ends) & (row >= ends - group_sizes[None])
    return jnp.matmul(is_in_group.astype(biases.dtype), biases, precision="highest")


class BlockedBackend:
    """Backend for any device: a loop over blocks of rows.

    `jax.lax.ragged_dot` multiplies all rows by all kernels where XLA has no kernel for it: on CPUs,
    and on GPUs since JAX 0.9, whatever `jax_ragged_dot_use_ragged_dot_instruction` says.

    Attributes:
        name: Name in the log.
        matmul: Multiplies rows [R, D] by their kernels, [E, D, F] or transposed, to [R, F].
        outer_product: Sums x[r] * y[r] over the rows of each group, [R, D], [R, F] to [E, D, F]:
            the gradient of the kernels.
    """

    name = "a loop over blocks"
    matmul = staticmethod(blocked_matmul)
    outer_product = staticmethod(blocked_outer_product)


@dataclass(frozen=True)
class MegabloxBackend:
    """Backend with JAX's megablox kernels for TPUs."""

    name = "megablox"
    interpret: bool = False

    def matmul(
        self, x: Array, kernels: Array, group_sizes: Array, *, transposed: bool = False
    ) -> Array:
        """Megablox `gmm`."""
        tiles = self.tiles(x, group_sizes, kernels.shape[1 if transposed else 2])
        options: Any = dict(transpose_rhs=transposed, interpret=self.interpret)

        def multiply(x: Array, kernels: Array, group_sizes: Array) -> Array:
            return self.gmm_module.gmm(x, kernels, group_sizes, x.dtype, tiles, **options)

        return call_without_vma(multiply, pad_rows(x, tiles[0]), kernels, group_sizes)[: len(x)]

    def outer_product(self, x: Array, y: Array, group_sizes: Array) -> Array:
        """Megablox `tgmm`."""
        tiles, options = self.tiles(x, group_sizes, y.shape[1]), dict(interpret=self.interpret)

        def multiply(x: Array, y: Array, group_sizes: Array) -> Array:
            return self.gmm_module.tgmm(x.mT, y, group_sizes, x.dtype, tiles, **options)

        padded = (pad_rows(rows, tiles[0]) for rows in (x, y))
        return call_without_vma(multiply, *padded, group_sizes)

    @property
    def gmm_module(self) -> Any:
        """Return the module `gmm`; in its package the function `gmm` hides it."""
        return import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

    def tiles(self, x: Array, group_sizes: Array, width: int) -> tuple[int, int, int]:
        """Return the rows, inputs and outputs per tile of a product of this output width."""
        row_tile = self.row_tile(x, group_sizes)
        return row_tile, tile_width(x.shape[1], x.dtype), tile_width(width, x.dtype)

    def row_tile(self, x: Array, group_sizes: Array) -> int:
        """Rows per tile: about the mean group size as a power of two, from LANES to 4 * LANES."""
        rows_per_group = max(1, len(x) // len(group_sizes))
        return min(4 * LANES, max(LANES, 2 ** int(math.log2(rows_per_group))))


class HopperBackend:
    """Backend with JAX's Mosaic GPU kernels for Hopper."""

    name = "Mosaic GPU ragged_dot"
    tiles = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8)

    def matmul(
        self, x: Array, kernels: Array, group_sizes: Array, *, transposed: bool = False
    ) -> Array:
        """Mosaic GPU `ragged_dot`."""
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        def multiply(x: Array, kernels: Array, group_sizes: Array) -> Array:
            options: Any = self.tiles | dict(transpose_rhs=transposed)
            return ragged_dot(x, kernels, group_sizes=group_sizes, **options)

        return call_without_vma(multiply, pad_rows(x, LANES), kernels, group_sizes)[: len(x)]

    def outer_product(self, x: Array, y: Array, group_sizes: Array) -> Array:
        """Mosaic GPU `transposed_ragged_dot`."""
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as kernels

        def multiply(x: Array, y: Array, group_sizes: Array) -> Array:
            return kernels.transposed_ragged_dot(x, y, group_sizes=group_sizes, **self.tiles)

        return call_without_vma(multiply, pad_rows(x, LANES), pad_rows(y, LANES), group_sizes)


GroupedMatmulBackend = BlockedBackend | MegabloxBackend | HopperBackend


def pad_rows(x: Array, multiple: int) -> Array:
    """Append zero rows, which belong to no group, up to a multiple."""
    return jnp.pad(x, [(0, -len(x) % multiple), (0, 0)])


def tile_width(width: int, dtype: Any) -> int:
    """Width of a tile: at most 2048 bytes, a multiple of LANES, as even as possible."""
    even_width = width / math.ceil(width * dtype.itemsize / 2048)
    return min(width, math.ceil(even_width / LANES) * LANES)


def _choose_backend(x: Array, kernels: Array) -> GroupedMatmulBackend:
    (platform, kind), dtype = target_device(), str(x.dtype)
    backends: dict[str, tuple[GroupedMatmulBackend, str | None]] = {
        "tpu": (MegabloxBackend(), _megablox_unsupported_reason(dtype)),
        "gpu": (HopperBackend(), _hopper_unsupported_reason(kind, dtype, kernels)),
    }
    backend, reason = backends.get(
        platform, (BlockedBackend(), f"JAX has no kernel for {platform}")
    )
    if reason is None and jax.config.values["jax_enable_checks"]:
        reason = "JAX_ENABLE_CHECKS rejects kernels, whose results carry no varying mesh axes"
    backend = backend if reason is None else BlockedBackend()
    explanation = "" if reason is None else f", since {reason}"
    LOG.info("Grouped matmul of %d experts: %s%s", len(kernels), backend.name, explanation)
    return backend


def _megablox_unsupported_reason(dtype: str) -> str | None:
    if dtype not in ("bfloat16", "float32"):
        return f"megablox computes in bfloat16 or float32; got {dtype}"
    return None


def _hopper_unsupported_reason(kind: str, dtype: str, kernels: Array) -> str | None:
    if compute_capability_major(kind) != 9:
        return f"JAX's kernels need a Hopper GPU; got {kind}"
    if dtype not in ("bfloat16", "float16"):
        return f"Hopper's kernels compute in bfloat16 or float16; got {dtype}"
    if any(width % LANES for width in kernels.shape[1:]):
        D, F = kernels.shape[1:]
        return f"Hopper's kernels need widths that are multiples of {LANES}; got {D} and {F}"
    if find_spec("jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu") is None:
        return f"JAX {jax.__version__} has no kernel for the gradient"
    return None


def grouped_matmul_by(
    backend: GroupedMatmulBackend, x: Array, kernels: Array, group_sizes: Array
) -> Array:
    """`grouped_matmul` by a backend, with all operands varying over the same mesh axes."""
    operands = x, kernels, group_sizes
    product = _grouped_matmul(backend, *pvary_like(operands, operands))
    return checkpoint_name(product, GROUPED_MATMUL_REMAT_NAME)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    backend: GroupedMatmulBackend, x: Array, kernels: Array, group_sizes: Array
) -> Array:
    # A batch of products under `jax.vmap` is one product with more groups.
    return merge_vmap_axes(backend.matmul)(x, kernels, group_sizes)


def _forward(backend: GroupedMatmulBackend, x: Array, kernels: Array, group_sizes: Array):
    return _grouped_matmul(backend, x, kernels, group_sizes), (x, kernels, group_sizes)


def _backward(backend: GroupedMatmulBackend, residuals: tuple[Array, Array, Array], dy: Array):
    x, kernels, group_sizes = residuals
    dx = merge_vmap_axes(partial(backend.matmul, transposed=True))(dy, kernels, group_sizes)
    return dx, merge_vmap_axes(backend.outer_product)(x, dy, group_sizes), None


_grouped_matmul.defvjp(_forward, _backward)
