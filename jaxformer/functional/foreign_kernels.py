"""Run external kernels (Pallas, cuDNN) and their gradients under `jax.vmap` and shard_map.

`jax.shard_map` asks of each result how it varies over devices, and `pallas_call` refuses results
that do not say so; JAX's own kernels do not. Of a program that is traced already only its arguments
and results are asked, and `untyped` tells of those. Whether `pallas_call` asks is a setting of
the thread that traces, and `jax.shard_map` makes it for its own thread: so kernels are traced in
another one, which no context manager of the caller reaches.

`jax.vjp` gives what attention's kernel keeps for its backward pass. What it made beside arguments,
its output and a number for each row of it, has the name `BY_KERNEL`, so that policies of
`jax.checkpoint` may keep it and the kernel need not run forwards again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int

from jaxformer.functional.collectives import varies_over, varying

BY_KERNEL = "attention by a kernel"  # what a policy of `jax.checkpoint` knows its results by
Segments = tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
THREAD = ThreadPoolExecutor(1)


@dataclass(frozen=True)
class Kernel(ABC):
    """An attention kernel; `head_axis` is the head axis of its queries, keys, values and output."""

    head_axis: ClassVar[int]

    def tables(self) -> Any:
        """NumPy arrays passed as the kernel's first argument (splash: its mask info)."""
        return ()

    @abstractmethod
    def __call__(
        self, tables: Any, query: Array, key: Array, value: Array, segments: Segments
    ) -> Array:
        """Run attention; differentiable by the kernel's own backward pass."""


class Program(NamedTuple):
    """A jaxpr traced without varying-axes types, with the tree structure of its results."""

    closed: Any
    structure: Any

    def __call__(self, *given: Any) -> Any:
        """Run it; results vary over every mesh axis that any argument varies over."""
        arrays = [jnp.asarray(x) for x in jax.tree.leaves(given)]
        axes = frozenset[str]().union(*map(varies_over, arrays))
        flat = jaxpr_as_fun(self.closed)(*(varying(x, *axes) for x in arrays))
        return jax.tree.unflatten(self.structure, [varying(y, *axes) for y in flat])


def outside_traces(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call a function in a thread without active traces or varying-axes checks."""
    mesh = jax.sharding.get_abstract_mesh()

    def work() -> Any:
        # Others' code may promote types and ranks where ours is not allowed to.
        standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with jax.sharding.use_abstract_mesh(mesh), standard[0], standard[1]:
            return function(*given, **options)

    return THREAD.submit(work).result()


def traced(function: Callable[..., Any], *shapes: Any) -> Program:
    """A program of one equation. It may return no argument, which would be said not to vary."""
    closed, results = outside_traces(jax.make_jaxpr(jax.jit(function), return_shape=True), *shapes)
    return Program(closed, jax.tree.structure(results))


def untyped(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function whose results carry no varying-axes types; not differentiable."""
    return traced(function, *_shapes(given))(*given)


@jax.custom_batching.custom_vmap
def alike(*arrays: Array) -> tuple[Array, ...]:
    """Identity; under `jax.vmap` either all arrays are batched or none, as cuDNN needs."""
    return arrays


@alike.def_vmap
def _alike_under_vmap(size: int, mapped: Any, *arrays: Array) -> tuple[tuple[Array, ...], Any]:
    wide = (
        x if has else jnp.broadcast_to(x[None], (size, *x.shape))
        for x, has in zip(arrays, mapped, strict=True)
    )
    return alike(*wide), (True,) * len(arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_kernel(
    kernel: Kernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segments: Segments,
) -> Float[Array, "B T N H"]:
    """Attention by a kernel, whose output and sums are kept by name.

    Args:
        kernel: It attends.
        query: Of N heads.
        key: Of K heads.
        value: Of K heads.
        segments: Of queries and keys.
    """
    given = _given(kernel, query, key, value, segments)
    return jnp.moveaxis(untyped(kernel, *given), kernel.head_axis, 2)


def _given(kernel: Kernel, query: Array, key: Array, value: Array, segments: Segments) -> Any:
    """Return the kernel's arguments, with the head axis moved to where it expects it."""
    query, key, value, *ids = alike(query, key, value, *(segments or ()))
    heads = (jnp.moveaxis(x, 2, kernel.head_axis) for x in (query, key, value))
    return kernel.tables(), *heads, tuple(ids) or None


def _forward(kernel: Kernel, *arrays: Any):
    given = _given(kernel, *arrays)
    output, made = _programs_for(kernel, given).forward(*given)
    whole = jnp.moveaxis(output, kernel.head_axis, 2)
    rows = whole.reshape(*whole.shape[:2], -1)  # heads that do not fill lanes would take their room
    rows = checkpoint_name(rows, BY_KERNEL)
    sums = output.size // output.shape[-1]  # masks, which are larger, are made again
    made = [checkpoint_name(x, BY_KERNEL) if x.size == sums else x for x in made]
    return rows.reshape(whole.shape), (arrays, rows, made)


def _backward(kernel: Kernel, kept: Any, slopes: Array) -> Any:
    leaves, structure = jax.tree.flatten((*kept, slopes))
    arrays, rows, made, slopes = jax.tree.unflatten(structure, alike(*leaves))
    given, made = _given(kernel, *arrays), iter(made)
    programs = _programs_for(kernel, given)
    output, slopes = (
        jnp.moveaxis(x.reshape(slopes.shape), 2, kernel.head_axis) for x in (rows, slopes)
    )
    known = [*jax.tree.leaves(given), output]
    residuals = [next(made) if place is None else known[place] for place in programs.places]
    found = programs.backward(residuals, slopes)
    return *(jnp.moveaxis(x, kernel.head_axis, 2) for x in found), None


by_kernel.defvjp(_forward, _backward)


class Programs(NamedTuple):
    """Forward and backward program, and which argument or output each residual equals."""

    forward: Program
    backward: Program
    places: tuple[int | None, ...]


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _programs_for(kernel: Kernel, given: Any) -> Programs:
    shapes, structure = jax.tree.flatten(_shapes(given[1:]))
    return _programs(kernel, jax.sharding.get_abstract_mesh(), structure, *shapes)


@lru_cache(maxsize=64)
def _programs(kernel: Kernel, mesh: Hashable, structure: Any, *shapes: Any) -> Programs:
    del mesh  # a program is traced under it
    given = kernel.tables(), *jax.tree.unflatten(structure, shapes)

    def forward(tables: Any, query: Array, key: Array, value: Array, segments: Segments):
        def attend(query: Array, key: Array, value: Array) -> Array:
            return kernel(tables, query, key, value, segments)

        return jax.vjp(attend, query, key, value)

    whole, (out, pullback) = outside_traces(jax.make_jaxpr(forward, return_shape=True), *given)
    # What a program returns of its arguments, or twice, is the very same variable.
    output, *residuals = whole.jaxpr.outvars
    known = {var: place for place, var in enumerate([*whole.jaxpr.invars, output])}
    places = tuple(known.get(x) for x in residuals)

    def results(*given: Any) -> tuple[Array, list[Array]]:
        output, *residuals = jaxpr_as_fun(whole)(*jax.tree.leaves(given))
        return output, [x for x, place in zip(residuals, places, strict=True) if place is None]

    def pull(residuals: list[Array], slopes: Array) -> Any:
        return jax.tree.unflatten(jax.tree.structure(pullback), residuals)(slopes)

    kept = _shapes([x.aval for x in residuals])
    return Programs(traced(results, *given), traced(pull, kept, out), places)
