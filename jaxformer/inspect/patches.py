"""Patches of intermediate values: a place, and what happens there."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclass(frozen=True)
class At:
    """A place in a model; None is all layers, positions or heads.

    Attributes:
        name: Name of a value, from `names`.
        layer: Layers, counted from 0.
        position: Positions in the row; -1 is the last token.
        head: Heads, counted from 0; for `key`, key heads.
    """

    name: str
    layer: int | tuple[int, ...] | None = None
    position: int | tuple[int, ...] | None = None
    head: int | tuple[int, ...] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replace:
    """Replace the values at a place (activation patching).

    Attributes:
        value: An array that broadcasts to `x[..., position, head, :]`, for each layer of the place;
            or a `ModelRun`, whose values at the same place are taken.
    """

    value: Any

    def __call__(self, x: Array, index: tuple[Any, ...]) -> Array:
        """Return the value."""
        return self.value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Zero:
    """Replace the values at a place by zeros (zero ablation)."""

    def __call__(self, x: Array, index: tuple[Any, ...]) -> Array:
        """Return zeros."""
        return jnp.zeros_like(x[index])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """Replace the values at a place by their mean over all rows and tokens (mean ablation)."""

    def __call__(self, x: Array, index: tuple[Any, ...]) -> Array:
        """Return the mean of each head and feature."""
        token_axes = tuple(range(x.ndim + 2 - len(index)))  # index is (..., positions, [heads], :)
        mean = jnp.mean(x.astype(jnp.float32), axis=token_axes, keepdims=True)
        return jnp.broadcast_to(mean, x.shape)[index]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Add:
    """Add a direction to the values at a place (steering).

    Attributes:
        value: An array that broadcasts to `x[..., position, head, :]`.
    """

    value: Any

    def __call__(self, x: Array, index: tuple[Any, ...]) -> Array:
        """Return the sums."""
        return x[index] + jnp.broadcast_to(self.value, x[index].shape).astype(x.dtype)


Change = Replace | Zero | Mean | Add
