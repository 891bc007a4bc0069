"""Products of groups of rows as a loop over blocks of rows, on any device."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.matmul_precision import float32_matmul_operands, matmul
from jaxformer.functional.platforms import target_platform


class RowBlock(NamedTuple):
    """Rows from `start` on: rows of `group`, followed by rows of later groups or padding."""

    group: Int[Array, ""]
    start: Int[Array, ""]
    in_group: Bool[Array, " rows"]

    def of(self, x: Float[Array, "R D"]) -> Float[Array, "rows D"]:
        """Slice the block's rows of an array."""
        return jax.lax.dynamic_slice_in_dim(x, self.start, len(self.in_group))


@partial(jax.jit, static_argnames="transposed")
def blocked_matmul(
    x: Float[Array, "R D"],
    kernels: Float[Array, "E ..."],
    group_sizes: Int[Array, " E"],
    *,
    transposed: bool = False,
) -> Float[Array, "R F"]:
    """Multiply rows [R, D] by the kernels of their groups, [E, D, F] or transposed."""
    size, width = _block_size(x, group_sizes), kernels.shape[1 if transposed else 2]

    def multiply(block: RowBlock, products: Array, x: Array, kernels: Array) -> Array:
        kernel = jax.lax.dynamic_index_in_dim(kernels, block.group, keepdims=False)
        product = matmul(block.of(x), kernel.T if transposed else kernel).astype(products.dtype)
        # Later blocks overwrite the rows behind the group.
        return jax.lax.dynamic_update_slice_in_dim(products, product, block.start, 0)

    initial = jnp.zeros((len(x) + size, width), np.promote_types(x.dtype, jnp.float32))
    products = _fold_blocks(multiply, initial, size, group_sizes, _append_rows(x, size), kernels)
    return products[: len(x)].astype(x.dtype)


@jax.jit
def blocked_outer_product(
    x: Float[Array, "R D"], y: Float[Array, "R F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "E D F"]:
    """Sum x[r] * y[r] over the rows of each group, in float32 or wider."""
    size = _block_size(x, group_sizes)

    def add(block: RowBlock, sums: Array, x: Array, y: Array) -> Array:
        x, y = (jnp.where(block.in_group[:, None], block.of(rows), 0) for rows in (x, y))
        operands = float32_matmul_operands(x.T, y)
        product = jnp.matmul(*operands, preferred_element_type=sums.dtype)
        product += jax.lax.dynamic_index_in_dim(sums, block.group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, product, block.group, 0)

    shape = len(group_sizes), x.shape[1], y.shape[1]
    initial = jnp.zeros(shape, np.promote_types(x.dtype, jnp.float32))
    padded = (_append_rows(rows, size) for rows in (x, y))
    return _fold_blocks(add, initial, size, group_sizes, *padded).astype(x.dtype)


def _block_size(x: Array, group_sizes: Array) -> int:
    """Rows per block: the mean size of a group down to a power of two, from 8 to 256."""
    mean = len(x) // max(1, len(group_sizes))
    return min(256, max(8, 2 ** (mean.bit_length() - 1)))


def _append_rows(x: Array, count: int) -> Array:
    return jnp.pad(x, [(0, count), (0, 0)])


def _fold_blocks(
    step: Callable[..., Array], initial: Array, size: int, group_sizes: Array, *arrays: Array
) -> Array:
    """Fold ``step(block, carry, *arrays)`` over the blocks of `size` rows, in order."""
    num_rows = len(arrays[0]) - size
    blocks = -(-group_sizes // size)
    last_blocks, last_rows = jnp.cumsum(blocks), jnp.cumsum(group_sizes)
    total = last_blocks[-1]

    def body(index: Array, carry: Array) -> Array:
        # XLA for CPUs slices bfloat16 as float32, and would convert the whole arrays before the
        # loop if they did not depend on its index.
        index, *whole = jax.lax.optimization_barrier((index, *arrays))
        number = jnp.minimum(index, total - 1)
        group = jnp.sum(number >= last_blocks)
        first_block, first_row = (last_blocks - blocks)[group], (last_rows - group_sizes)[group]
        start = first_row + (number - first_block) * size
        in_group = (start + jnp.arange(size) < last_rows[group]) & (index < total)
        return step(RowBlock(group, start, in_group), carry, *whole)

    # A GPU would wait for a number of steps that is not known before.
    most = min(num_rows, num_rows // size + len(group_sizes))
    num_steps = total if target_platform() == "cpu" else most
    return jax.lax.fori_loop(0, num_steps, body, pvary_like(initial, arrays[0]))
