"""Run external kernels (Pallas, cuDNN) and their gradients under `jax.vmap` and shard_map.

`jax.shard_map` asks of each result how it varies over devices, and `pallas_call` refuses results
that do not say so; JAX's own kernels do not. Of a program that is traced already only its arguments
and results are asked, and `untyped` tells of those. Whether `pallas_call` asks is a setting of
the thread that traces, and `jax.shard_map` makes it for its own thread: so kernels are traced in
another one, which no context manager of the caller reaches.

`jax.vjp` gives what attention's kernel keeps for its backward pass. Its output and a number for
each row of it have the name `BY_KERNEL`, so that policies of `jax.checkpoint` may keep them and the
kernel need not run forwards again. The rest, such as a mask, is made again from the arguments.
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

    def alternatives(self, segments: Segments) -> tuple[Any, tuple["Kernel", ...]]:
        """Kernels, and the index of the one that runs, which may depend on the segments."""
        del segments
        return 0, (self,)

    def compact(self, sums: Array, segments: Segments) -> Float[Array, "B N T"]:
        """Return a number for each row of the output, from what the forward pass keeps."""
        del segments
        return sums

    def expand(self, sums: Float[Array, "B N T"], segments: Segments) -> Array:
        """Return what the backward pass reads, from a number for each row of the output."""
        del segments
        return sums


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


@lru_cache(maxsize=64)
def over_batch(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """Merge each axis of `jax.vmap` into the first axis of all arrays: a batch is one call."""
    call = jax.custom_batching.custom_vmap(partial(function, *static))

    @call.def_vmap
    def merge(size: int, mapped: Any, *arrays: Any) -> tuple[Any, Any]:
        def merged(x: Array, is_mapped: bool) -> Array:
            x = x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = call(*jax.tree.map(merged, arrays, tuple(mapped)))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call


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
    return over_batch(_output, kernel)(query, key, value, segments)[0]


def _output(kernel: Kernel, *arrays: Any) -> tuple[Array, Array]:
    """Output [B, T, N, H] and sums [B, N, T] of the alternative that the segments choose."""

    def run(kernel: Kernel, *arrays: Any) -> tuple[Array, Array]:
        arguments = _arguments(kernel, *arrays)
        programs = _programs_for(kernel, arguments)
        output, residuals = programs.forward(*arguments)
        sums = kernel.compact(residuals[programs.sums], arrays[-1])
        return jnp.moveaxis(output, kernel.head_axis, 2), sums

    index, kernels = kernel.alternatives(arrays[-1])
    return jax.lax.switch(index, [partial(run, x) for x in kernels], *arrays)


def _gradients(kernel: Kernel, *arrays: Any) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values, by the alternative that `_output` ran."""

    def run(kernel: Kernel, *arrays: Any) -> tuple[Array, ...]:
        *inputs, output, sums, cotangent = arrays
        arguments = _arguments(kernel, *inputs)
        programs = _programs_for(kernel, arguments)
        # The compiler drops the kernel of this call: nothing reads its output and its sums.
        _, made = programs.forward(*arguments)
        made[programs.sums] = kernel.expand(sums, inputs[-1])
        output, cotangent = (jnp.moveaxis(x, 2, kernel.head_axis) for x in (output, cotangent))
        known, others = [*jax.tree.leaves(arguments), output], iter(made)
        residuals = [next(others) if place is None else known[place] for place in programs.places]
        gradients = programs.backward(residuals, cotangent)
        return tuple(jnp.moveaxis(x, kernel.head_axis, 2) for x in gradients)

    index, kernels = kernel.alternatives(arrays[3])
    return jax.lax.switch(index, [partial(run, x) for x in kernels], *arrays)


def _arguments(kernel: Kernel, query: Array, key: Array, value: Array, segments: Segments) -> Any:
    """Return the kernel's arguments, with the head axis moved to where it expects it."""
    heads = (jnp.moveaxis(x, 2, kernel.head_axis) for x in (query, key, value))
    return kernel.tables(), *heads, segments


def _forward(kernel: Kernel, *arrays: Any):
    output, sums = over_batch(_output, kernel)(*arrays)
    rows = output.reshape(*output.shape[:2], -1)  # heads that do not fill lanes take their room
    rows, sums = checkpoint_name(rows, BY_KERNEL), checkpoint_name(sums, BY_KERNEL)
    return rows.reshape(output.shape), (*arrays, rows, sums)


def _backward(kernel: Kernel, residuals: Any, cotangent: Array) -> Any:
    *arrays, rows, sums = residuals
    output = rows.reshape(cotangent.shape)
    return *over_batch(_gradients, kernel)(*arrays, output, sums, cotangent), None


by_kernel.defvjp(_forward, _backward)


class Programs(NamedTuple):
    """Programs of a kernel, and what the residuals between them are.

    Attributes:
        forward: From arguments to the output and the residuals that are neither of them.
        backward: From all residuals and the output's cotangent to gradients.
        places: Which argument or output each residual is; None for those that `forward` makes.
        sums: Which of those that `forward` makes has a number for each row of the output.
    """

    forward: Program
    backward: Program
    places: tuple[int | None, ...]
    sums: int


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
    known = {id(var): place for place, var in enumerate([*whole.jaxpr.invars, output])}
    places = tuple(known.get(id(x)) for x in residuals)

    def results(*given: Any) -> tuple[Array, list[Array]]:
        output, *residuals = jaxpr_as_fun(whole)(*jax.tree.leaves(given))
        return output, [x for x, place in zip(residuals, places, strict=True) if place is None]

    def pull(residuals: list[Array], slopes: Array) -> Any:
        return jax.tree.unflatten(jax.tree.structure(pullback), residuals)(slopes)

    kept = _shapes([x.aval for x in residuals])
    made = [x.aval for x, place in zip(residuals, places, strict=True) if place is None]
    N, T = out.shape[kernel.head_axis], out.shape[3 - kernel.head_axis]
    (sums,) = (i for i, x in enumerate(made) if x.dtype == jnp.float32 and x.shape[1:] == (N, T))
    return Programs(traced(results, *given), traced(pull, kept, out), places, sums)
