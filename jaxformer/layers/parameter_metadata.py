"""Metadata of every parameter: shape, logical axes and role, without arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxformer.config import TransformerConfig
from jaxformer.layers.parameters import AnnotatedParameter, mesh_axes, raise_misfits
from jaxformer.layers.runtime import active_mesh_axes
from jaxformer.layers.transformer import Transformer

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

        "layers" and "experts" are neither inputs nor outputs: they stack matrices and vectors.
        """
        split = len(self.shape) - self.num_output_axes
        inputs = [i for i in range(split) if self.logical_axes[i] not in ("layers", "experts")]
        return tuple(inputs), tuple(range(split, len(self.shape)))

    @property
    def role(self) -> ParameterRole:
        """Role of the parameter: kernel, head, embedding, vector, selection bias or adapter.

        A "kernel" maps features to features, the "head" features to the vocabulary. An "embedding"
        has a row for each token, position or distance. A "vector" is no matrix. A "selection_bias"
        only chooses experts. An "adapter" is one of the two matrices of a low-rank update.
        """
        if "rank" in self.logical_axes:
            return "adapter"
        if "choices" in self.logical_axes:
            return "selection_bias"
        if not self.num_output_axes:
            return "vector"
        if "vocabulary" in self.logical_axes[-self.num_output_axes :]:
            return "head"
        return "embedding" if {"vocabulary", "rows"} & set(self.logical_axes) else "kernel"

    def partition_spec(self, mesh_shape: Mapping[str, int]) -> P:
        """Return the PartitionSpec of the parameter on a mesh of this shape."""
        return P(
            *mesh_axes(self.logical_axes, self.shape, active_mesh_axes(mesh_shape), mesh_shape)
        )


@cache
def parameter_metadata(config: TransformerConfig) -> Any:
    """Return the tree of `ParameterMetadata` of a model, by abstract evaluation of `init`.

    Args:
        config: The model.

    Returns:
        A tree of `ParameterMetadata` with the structure of the parameters.
    """
    return jax.tree.map(
        lambda x: ParameterMetadata(x.value.shape, x.names, x.num_output_axes),
        _annotated_parameters(config, jnp.dtype(jnp.float32)),
        is_leaf=_is_annotated,
    )


def _is_annotated(x: Any) -> bool:
    return isinstance(x, AnnotatedParameter)


@cache
def _annotated_parameters(config: TransformerConfig, dtype: jnp.dtype) -> Any:
    """Tree of `AnnotatedParameter` of the model that computes in `dtype`."""
    has_encoder = config.topology.is_encoder_decoder

    def init() -> Any:
        tokens = jnp.zeros((1, 2), jnp.int32)
        source = tokens if has_encoder else None
        # "auto" would ask which kernels the device has.
        options: Any = dict(annotate_axes=True, attention_implementation="xla")
        model = Transformer(config, dtype=dtype, **options)
        return model.init(jax.random.key(0), tokens, source=source)

    return jax.eval_shape(init)["params"]


def cast_parameters(config: TransformerConfig, params: Any, dtype: DTypeLike) -> Any:
    """Convert to `dtype` the parameters that the model reads in it, so that no step does.

    Args:
        config: The model.
        params: Its parameters.
        dtype: Dtype of the model's computation.

    Returns:
        The parameters. Those that are read in float32, such as norms, are the same arrays, and so
        are those with at most as many bits as `dtype`.
    """
    boxes, arrays = flatten_dict(_annotated_parameters(config, jnp.dtype(dtype))), {}
    for path, x in flatten_dict(params).items():
        is_wider = x.dtype.itemsize > boxes[path].dtype.itemsize
        arrays[path] = x.astype(boxes[path].dtype) if is_wider else x
    return unflatten_dict(arrays)


def check_parameters(config: TransformerConfig, params: Any) -> None:
    """Check that parameters have the names and shapes of a model's.

    Args:
        config: The model.
        params: Arrays or their global shapes.

    Raises:
        ValueError: Names the parameters that are missing, unexpected or have another shape.
    """
    expected, got = (flatten_dict(tree, sep="/") for tree in (parameter_metadata(config), params))
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
    unrolled = [any("/first_layers/" in path for path in paths) for paths in (expected, got)]
    remedy = ""
    if unrolled[0] != unrolled[1]:
        which = "configuration is" if unrolled[0] else "parameters are"
        remedy = f" Only the {which} of an unrolled model: take both from `unroll`."
    raise_misfits(complaints, remedy)
