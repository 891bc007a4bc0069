"""Shardings of parameters, optimizer state and batches on a mesh."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from jaxformer import functional as F
from jaxformer.config import TransformerConfig
from jaxformer.layers.layouts import Layout
from jaxformer.layers.lora import cast_frozen
from jaxformer.layers.parameter_metadata import ParameterMetadata, parameter_metadata
from jaxformer.layers.runtime import active_mesh_axes
from jaxformer.parallel.mesh import BATCH_AXES

BatchTree = TypeVar("BatchTree")


def parameter_specs(
    config: TransformerConfig, mesh_shape: Mapping[str, int], layout: Layout = "stacked"
) -> Any:
    """PartitionSpec of each parameter, from the axis names that its layer declares.

    Args:
        config: Model configuration.
        mesh_shape: Devices along each axis of the mesh.
        layout: As for `parameter_metadata`.

    Returns:
        A tree of `PartitionSpec` with the structure of the parameters.
    """
    return jax.tree.map(lambda x: x.partition_spec(mesh_shape), parameter_metadata(config, layout))


def parameter_shardings(config: TransformerConfig, mesh: Mesh, layout: Layout = "stacked") -> Any:
    """Sharding of each parameter.

    Args:
        config: Model configuration.
        mesh: Device mesh.
        layout: As for `parameter_metadata`.

    Returns:
        A tree of `NamedSharding` with the structure of the parameters.
    """
    specs = parameter_specs(config, mesh.shape, layout)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def abstract_parameters(config: TransformerConfig, mesh: Mesh | None) -> Any:
    """ShapeDtypeStructs of the parameters in training, with shardings if a mesh is given.

    Args:
        config: Model configuration.
        mesh: Device mesh; None for no shardings.

    Returns:
        A tree of `jax.ShapeDtypeStruct` with the structure of the parameters.
    """

    def abstract_leaf(x: ParameterMetadata, stored: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, x.partition_spec(mesh.shape))
        return jax.ShapeDtypeStruct(x.shape, stored.dtype, sharding=sharding)

    metadata = parameter_metadata(config)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), metadata)
    stored = jax.eval_shape(partial(cast_frozen, config.adapter), wide)
    return jax.tree.map(abstract_leaf, metadata, stored)


def state_specs(tree: Any, params: Any, specs: Any) -> Any:
    """PartitionSpecs of the arrays of a state, taken from the parameters they belong to.

    Args:
        tree: Train state or optimizer state, of arrays or shapes. The path of an array that belongs
            to a parameter contains the path of the parameter.
        params: Parameters, or their shapes.
        specs: PartitionSpecs of the parameters.

    Returns:
        The specs: on axes of the same size, the parameter's spec; other arrays are replicated.
    """
    pairs = zip(flatten_to_paths(params).items(), jax.tree.leaves(specs), strict=True)
    by_path = {f"/{path}/": (x.shape, spec) for (path, x), spec in pairs}

    def leaf_spec(path: str, x: Any) -> P:
        for name, (shape, spec) in by_path.items():
            if name in f"/{path}/" and len(shape) == x.ndim:
                same = zip(x.shape, shape, spec, strict=True)
                return P(*(axis if n == m else None for n, m, axis in same))
        return P()

    leaves = flatten_to_paths(tree).items()
    return jax.tree.unflatten(jax.tree.structure(tree), [leaf_spec(*leaf) for leaf in leaves])


def flatten_to_paths(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by path, such as "trained/decoder/final_norm/scale"."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that replicates an array on all devices.

    Args:
        mesh: Device mesh.

    Returns:
        The sharding, for an array of any shape.
    """
    return NamedSharding(mesh, P())


def put_sharded(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Shard an array; every process has a full copy.

    Args:
        x: The full array, equal on every process.
        sharding: Sharding of the result.

    Returns:
        The global array.
    """
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def put_replicated(tree: Any, mesh: Mesh) -> Any:
    """Replicate a tree on all devices; every process has a copy.

    Args:
        tree: Tree of arrays and numbers, equal on every process.
        mesh: Device mesh.

    Returns:
        The tree, of global arrays.
    """
    return jax.tree.map(lambda x: put_sharded(np.asarray(x), replicated(mesh)), tree)


def shardings(tree: Any) -> Any:
    """Sharding of each leaf of a tree.

    Args:
        tree: Tree of arrays or of shapes, such as `abstract_parameters`.

    Returns:
        The tree of their shardings; None for a shape without one.
    """
    return jax.tree.map(lambda x: x.sharding, tree)


def batch_spec(mesh_shape: Mapping[str, int]) -> P:
    """PartitionSpec of a [rows, time] batch.

    Args:
        mesh_shape: Devices along each axis of the mesh.

    Returns:
        Rows over the axes among "data", "fsdp" and "expert" that the mesh has, time over "context".
    """
    return P(
        tuple(name for name in BATCH_AXES if name in mesh_shape),
        active_mesh_axes(mesh_shape).context,
    )


def local_batch_slice(mesh: Mesh, batch_size: int) -> slice:
    """Slice of the global batch that this process loads.

    Args:
        mesh: Device mesh of all processes.
        batch_size: Global batch size in rows.

    Returns:
        The slice of rows.
    """
    sharding = NamedSharding(mesh, P(batch_spec(mesh.shape)[0]))
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    ends = [index[0].indices(batch_size)[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in ends), max(stop for _, stop in ends))


def put_batch(batch: BatchTree, mesh: Mesh, batch_size: int) -> BatchTree:
    """Shard a batch over the mesh; the time axis is permuted by `F.zigzag_order`.

    Args:
        batch: Tree of arrays [rows, time]: the `local_batch_slice` of the batch, or all rows.
        mesh: Device mesh.
        batch_size: Global batch size in rows.

    Returns:
        The tree, of global arrays [batch_size, time].

    Raises:
        ValueError: An array has neither all rows nor the rows of this process.
    """
    sharding = NamedSharding(mesh, batch_spec(mesh.shape))
    process_rows = local_batch_slice(mesh, batch_size)

    def put_leaf(leaf: Any) -> jax.Array:
        x = np.asarray(leaf)
        first_row = 0 if len(x) == batch_size else process_rows.start
        if len(x) not in (batch_size, process_rows.stop - process_rows.start):
            raise ValueError(
                f"This process must pass rows {process_rows.start} to {process_rows.stop} of "
                f"{batch_size}, or all; got {len(x)}."
            )
        token_order = F.zigzag_order(x.shape[1], mesh.shape.get("context", 1))

        def shard_data(index: tuple[slice, ...] | None) -> np.ndarray:
            row, column = index or (slice(None), slice(None))
            start, stop, _ = row.indices(batch_size)
            return x[start - first_row : stop - first_row, token_order[column]]

        return jax.make_array_from_callback((batch_size, x.shape[1]), sharding, shard_data)

    return jax.tree.map(put_leaf, batch)
