"""Metadata of every parameter: shape, logical axes and role, without arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxformer.config import TransformerConfig
from jaxformer.layers.layouts import Layout, layout_of
from jaxformer.layers.parameters import mesh_axes, raise_misfits
from jaxformer.layers.runtime import active_mesh_axes
from jaxformer.layers.transformer import annotated_parameters

ParameterRole = Literal["kernel", "head", "embedding", "vector", "selection_bias", "adapter"]
AxisIndices = tuple[int, ...]


@dataclass(frozen=True)
class ParameterMetadata:
    """Global shape and logical axes of a parameter.

    Attributes:
        shape: Global shape.
        logical_axes: Name of each axis.
        num_output_axes: Number of trailing output axes of a matrix; 0 for a vector.
    """

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    num_output_axes: int

    @property
    def input_and_output_axes(self) -> tuple[AxisIndices, AxisIndices]:
        """Indices of a matrix's input axes and of its output axes; a vector has input axes only.

        "layers", "experts" and "blocks" are neither: they stack matrices and vectors.
        """
        split = len(self.shape) - self.num_output_axes
        stacks = "layers", "experts", "blocks"
        inputs = [i for i in range(split) if self.logical_axes[i] not in stacks]
        return tuple(inputs), tuple(range(split, len(self.shape)))

    @property
    def role(self) -> ParameterRole:
        """Role of the parameter: kernel, head, embedding, vector, selection bias or adapter.

        A "kernel" maps features to features, the "head" features to the vocabulary. An "embedding"
        has a row for each token, n-gram, position or distance. A "vector" is no matrix. A
        "selection_bias" only chooses experts. An "adapter" is one of the two matrices of a low-rank
        update.
        """
        if "rank" in self.logical_axes:
            return "adapter"
        if "choices" in self.logical_axes:
            return "selection_bias"
        if not self.num_output_axes:
            return "vector"
        if "vocabulary" in self.logical_axes[-self.num_output_axes :]:
            return "head"
        return (
            "embedding" if {"vocabulary", "rows", "buckets"} & set(self.logical_axes) else "kernel"
        )

    def partition_spec(self, mesh_shape: Mapping[str, int]) -> P:
        """Return the PartitionSpec of the parameter on a mesh of this shape."""
        return P(
            *mesh_axes(self.logical_axes, self.shape, active_mesh_axes(mesh_shape), mesh_shape)
        )


@cache
def parameter_metadata(config: TransformerConfig, layout: Layout = "stacked") -> Any:
    """Return the tree of `ParameterMetadata` of a model, by abstract evaluation of `init`.

    Args:
        config: The model.
        layout: Layout of the parameters, from `layers.layouts.layout_of`; `init` stacks layers.

    Returns:
        A tree of `ParameterMetadata` with the structure of the parameters.
    """
    boxes = annotated_parameters(config, layout=layout).items()
    metadata = {p: ParameterMetadata(x.value.shape, x.names, x.num_output_axes) for p, x in boxes}
    return unflatten_dict(metadata, sep="/")


def cast_parameters(config: TransformerConfig, params: Any, dtype: DTypeLike) -> Any:
    """Convert to `dtype` the parameters that the model reads in it, so that no step does.

    Args:
        config: The model.
        params: Its parameters.
        dtype: Dtype of the model's computation.

    Returns:
        The parameters. Parameters that are read in float32, such as norms, are the same arrays, and
        so are parameters with at most as many bits as `dtype`.
    """
    boxes, arrays = annotated_parameters(config, np.dtype(dtype), layout_of(params)), {}
    for path, x in flatten_dict(params, sep="/").items():
        is_wider = x.dtype.itemsize > boxes[path].dtype.itemsize
        arrays[path] = x.astype(boxes[path].dtype) if is_wider else x
    return unflatten_dict(arrays, sep="/")


def check_parameters(config: TransformerConfig, params: Any) -> None:
    """Check that parameters have the names and shapes of a model's.

    Args:
        config: The model.
        params: Arrays or their global shapes.

    Raises:
        ValueError: Names the parameters that are missing, unexpected or have another shape.
    """
    metadata = parameter_metadata(config, layout_of(params))
    expected, got = (flatten_dict(tree, sep="/") for tree in (metadata, params))
    if not expected.keys() & got.keys():
        names = ", ".join(params) or "nothing"
        raise ValueError(f"params must be variables['params']; got a tree with {names}.")
    complaints = [f"{path} is missing" for path in sorted(expected.keys() - got.keys())]
    complaints += [
        f"{path} is not a parameter of the model" for path in sorted(got.keys() - expected.keys())
    ]
    for path in sorted(expected.keys() & got.keys()):
        shapes = list(got[path].shape), list(expected[path].shape)
        if shapes[0] != shapes[1]:
            complaints.append(f"{path} is {shapes[0]}, not {shapes[1]}")
    raise_misfits(complaints)
