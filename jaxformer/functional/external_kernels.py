"""Run external kernels (Pallas, cuDNN) and their gradients under `jax.vmap` and shard_map.

In `jax.shard_map` every array has a type with its varying mesh axes, and `pallas_call` rejects
outputs without one, such as the outputs of JAX's own kernels. In a jaxpr that is already traced
only the types of arguments and results are checked, which `call_without_vma` sets. The check is a
thread-local setting of `jax.shard_map`, so kernels are traced in another thread.

`jax.vjp` returns the residuals of the kernel. Its output and one number per output row have the
name `KERNEL_REMAT_NAME`: if a policy of `jax.checkpoint` saves them, the forward kernel does not
run again. The other residuals, such as masks, are recomputed from the inputs.
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

from jaxformer.functional.attention.online_softmax import add_sinks, sinks_gradient
from jaxformer.functional.collectives import pvary_like

KERNEL_REMAT_NAME = "attention by a kernel"  # name of its results for policies of `jax.checkpoint`
SegmentIds = tuple[Int[Array, "B T"], Int[Array, "B S"]] | None
TRACING_THREAD = ThreadPoolExecutor(1)


@dataclass(frozen=True)
class AttentionKernel(ABC):
    """An attention kernel of queries [B, T, N, H], or [B, N, T, H] if `head_axis` is 1.

    Keys and values likewise have a head axis of K heads; the output has the queries' head axis.
    """

    head_axis: ClassVar[int]

    def static_arrays(self) -> Any:
        """NumPy arrays passed as the kernel's first argument (splash: its mask info)."""
        return ()

    @abstractmethod
    def __call__(
        self, static_arrays: Any, query: Array, key: Array, value: Array, segments: SegmentIds
    ) -> Array:
        """Run attention; differentiable by the kernel's own backward pass."""

    def alternatives(self, segments: SegmentIds) -> tuple[Any, tuple["AttentionKernel", ...]]:
        """Return kernels, and the index of the one that runs, which may depend on the segments."""
        del segments
        return 0, (self,)

    def compact(self, sums: Array, segments: SegmentIds) -> Float[Array, "B N T"]:
        """Return one number per output row from the softmax sums of the forward pass."""
        del segments
        return sums

    def expand(self, sums: Float[Array, "B N T"], segments: SegmentIds) -> Array:
        """Return the softmax sums of the backward pass from one number per output row."""
        del segments
        return sums


class TracedProgram(NamedTuple):
    """A jaxpr traced without varying-axes types, with the tree structure of its results."""

    closed_jaxpr: Any
    out_tree: Any

    def __call__(self, *args: Any) -> Any:
        """Run it; results vary over every mesh axis that any argument varies over."""
        arrays = [jnp.asarray(x) for x in jax.tree.leaves(args)]
        flat = jaxpr_as_fun(self.closed_jaxpr)(*pvary_like(arrays, arrays))
        return jax.tree.unflatten(self.out_tree, pvary_like(flat, arrays))


def run_outside_traces(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function in a thread without active traces or varying-axes checks."""
    mesh = jax.sharding.get_abstract_mesh()

    def work() -> Any:
        # JAX's kernels promote dtypes and ranks implicitly.
        standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
        with jax.sharding.use_abstract_mesh(mesh), standard[0], standard[1]:
            return function(*args, **options)

    return TRACING_THREAD.submit(work).result()


def trace_program(function: Callable[..., Any], *shapes: Any) -> TracedProgram:
    """Trace a function to a `TracedProgram`; it must not return an argument unchanged."""
    closed_jaxpr, results = run_outside_traces(
        jax.make_jaxpr(jax.jit(function), return_shape=True), *shapes
    )
    return TracedProgram(closed_jaxpr, jax.tree.structure(results))


def call_without_vma(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose results carry no varying-axes types; not differentiable."""
    return trace_program(function, *_shape_structs(args))(*args)


@lru_cache(maxsize=64)
def merge_vmap_axes(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    """Merge each axis of `jax.vmap` into the first axis of all arrays: a batch is one call."""
    call = jax.custom_batching.custom_vmap(partial(function, *static))

    @call.def_vmap
    def merge(size: int, mapped: Any, *arrays: Any) -> tuple[Any, Any]:
        def merged(x: Any, is_mapped: bool) -> Any:
            x = x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        def element(x: Any, is_mapped: bool) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype)

        if size == 0:
            shapes = jax.eval_shape(call, *jax.tree.map(element, arrays, tuple(mapped)))
            results = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), shapes)
        else:
            results = call(*jax.tree.map(merged, arrays, tuple(mapped)))
            results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_attention(
    kernel: AttentionKernel,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    segments: SegmentIds,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention by an external kernel; its results are saved for remat under KERNEL_REMAT_NAME.

    Args:
        kernel: The attention kernel.
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads.
        segments: Segments of queries and keys.
        sinks: A score per query head, of a key whose value is zero; the kernel does not know it.
    """
    return _output_and_sums(kernel, query, key, value, segments, sinks)[0]


def _output_and_sums(kernel: AttentionKernel, *arrays: Any) -> tuple[Array, Array]:
    """Return output [B, T, N, H] and log-sum-exp [B, N, T], with sinks if there are any."""
    *inputs, sinks = arrays
    output, sums = merge_vmap_axes(_output, kernel)(*inputs)
    if sinks is None:
        return output, sums
    sinks = jnp.broadcast_to(sinks, sums.shape[:-1])
    output, sums = add_sinks(jnp.moveaxis(output, 1, 2), sums, sinks)
    return jnp.moveaxis(output, 1, 2), sums


def _output(kernel: AttentionKernel, *arrays: Any) -> tuple[Array, Array]:
    """Return output [B, T, N, H] and sums [B, N, T] of the kernel that the segments choose."""

    def run(kernel: AttentionKernel, *arrays: Any) -> tuple[Array, Array]:
        kernel_inputs = _kernel_inputs(kernel, *arrays)
        programs = _cached_programs(kernel, kernel_inputs)
        output, kernel_residuals = programs.forward(*kernel_inputs)
        sums = kernel.compact(kernel_residuals[programs.sums_index], arrays[-1])
        return jnp.moveaxis(output, kernel.head_axis, 2), sums

    index, kernels = kernel.alternatives(arrays[-1])
    return jax.lax.switch(index, [partial(run, x) for x in kernels], *arrays)


def _gradients(kernel: AttentionKernel, *arrays: Any) -> tuple[Array, Array, Array]:
    """Return gradients of queries, keys and values by the kernel that `_output` ran."""

    def run(kernel: AttentionKernel, *arrays: Any) -> tuple[Array, ...]:
        *inputs, output, sums, d_output = arrays
        kernel_inputs = _kernel_inputs(kernel, *inputs)
        programs = _cached_programs(kernel, kernel_inputs)
        kernel_residuals: list[Any] = [None]
        if programs.residual_sources.count(None) > 1:
            # The compiler removes the forward kernel of this call: its results are unused.
            _, kernel_residuals = programs.forward(*kernel_inputs)
        kernel_residuals[programs.sums_index] = kernel.expand(sums, inputs[-1])
        output, d_output = (jnp.moveaxis(x, 2, kernel.head_axis) for x in (output, d_output))
        inputs_and_output = [*jax.tree.leaves(kernel_inputs), output]
        remaining = iter(kernel_residuals)
        residuals = [
            next(remaining) if source is None else inputs_and_output[source]
            for source in programs.residual_sources
        ]
        gradients = programs.backward(residuals, d_output)
        return tuple(jnp.moveaxis(x, kernel.head_axis, 2) for x in gradients)

    index, kernels = kernel.alternatives(arrays[3])
    return jax.lax.switch(index, [partial(run, x) for x in kernels], *arrays)


def _kernel_inputs(
    kernel: AttentionKernel, query: Array, key: Array, value: Array, segments: SegmentIds
) -> Any:
    """Return the kernel's arguments, with the head axis moved to where it expects it."""
    heads = (jnp.moveaxis(x, 2, kernel.head_axis) for x in (query, key, value))
    return kernel.static_arrays(), *heads, segments


def _forward(kernel: AttentionKernel, *arrays: Any):
    output, sums = _output_and_sums(kernel, *arrays)
    rows = output.reshape(*output.shape[:2], -1)  # heads narrower than the lanes would be padded
    rows, sums = (checkpoint_name(x, KERNEL_REMAT_NAME) for x in (rows, sums))
    return rows.reshape(output.shape), (*arrays, rows, sums)


def _backward(kernel: AttentionKernel, residuals: Any, d_output: Array) -> Any:
    *arrays, sinks, rows, sums = residuals
    output = rows.reshape(d_output.shape)
    gradients = merge_vmap_axes(_gradients, kernel)(*arrays, output, sums, d_output)
    if sinks is None:
        return *gradients, None, None
    sinks = jnp.broadcast_to(sinks, sums.shape[:-1])
    output, d_output = (jnp.moveaxis(x, 1, 2) for x in (output, d_output))
    d_sinks = sinks_gradient(sinks, output, sums, d_output)
    return *gradients, None, jnp.sum(d_sinks, axis=0)


kernel_attention.defvjp(_forward, _backward)


class KernelPrograms(NamedTuple):
    """Forward and backward programs of a kernel, and the residuals between them.

    Attributes:
        forward: From inputs to the output and the residuals that are neither input nor output.
        backward: From all residuals and the output's cotangent to gradients.
        residual_sources: Index of the input or output that each residual equals; None for residuals
            that `forward` computes.
        sums_index: Index, among the computed residuals, of the one with a number per output row.
    """

    forward: TracedProgram
    backward: TracedProgram
    residual_sources: tuple[int | None, ...]
    sums_index: int


def _shape_structs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _cached_programs(kernel: AttentionKernel, kernel_inputs: Any) -> KernelPrograms:
    shapes, in_tree = jax.tree.flatten(_shape_structs(kernel_inputs[1:]))
    return _trace_programs(kernel, jax.sharding.get_abstract_mesh(), in_tree, *shapes)


@lru_cache(maxsize=64)
def _trace_programs(
    kernel: AttentionKernel, mesh: Hashable, in_tree: Any, *shapes: Any
) -> KernelPrograms:
    del mesh  # part of the cache key: tracing depends on it
    kernel_inputs = kernel.static_arrays(), *jax.tree.unflatten(in_tree, shapes)

    def forward(static_arrays: Any, query: Array, key: Array, value: Array, segments: SegmentIds):
        def attend(query: Array, key: Array, value: Array) -> Array:
            return kernel(static_arrays, query, key, value, segments)

        return jax.vjp(attend, query, key, value)

    closed_jaxpr, (out, pullback) = run_outside_traces(
        jax.make_jaxpr(forward, return_shape=True), *kernel_inputs
    )
    # An output that is an argument, or a repeated output, is the same jaxpr variable.
    output, *residuals = closed_jaxpr.jaxpr.outvars
    variables = [*closed_jaxpr.jaxpr.invars, output]
    source_by_id = {id(variable): source for source, variable in enumerate(variables)}
    residual_sources = tuple(source_by_id.get(id(x)) for x in residuals)

    def forward_with_residuals(*args: Any) -> tuple[Array, list[Array]]:
        output, *residuals = jaxpr_as_fun(closed_jaxpr)(*jax.tree.leaves(args))
        pairs = zip(residuals, residual_sources, strict=True)
        return output, [jnp.asarray(x) for x, source in pairs if source is None]

    def apply_vjp(residuals: list[Array], d_output: Array) -> Any:
        return jax.tree.unflatten(jax.tree.structure(pullback), residuals)(d_output)

    residual_shapes = _shape_structs([x.aval for x in residuals])
    pairs = zip(residual_shapes, residual_sources, strict=True)
    computed = [shape for shape, source in pairs if source is None]
    N, T = out.shape[kernel.head_axis], out.shape[3 - kernel.head_axis]
    (sums_index,) = (
        i for i, x in enumerate(computed) if x.dtype == jnp.float32 and x.shape[1:] == (N, T)
    )
    return KernelPrograms(
        trace_program(forward_with_residuals, *kernel_inputs),
        trace_program(apply_vjp, residual_shapes, out),
        residual_sources,
        sums_index,
    )
