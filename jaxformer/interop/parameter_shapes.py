"""Paths and shapes of a configuration's parameters, from jax.eval_shape."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from jaxformer import config as c
from jaxformer.interop.transforms import Shape
from jaxformer.layers.layouts import Layout
from jaxformer.layers.parameter_metadata import parameter_metadata


def parameter_shapes(config: c.TransformerConfig, layout: Layout = "stacked") -> dict[str, Shape]:
    """Shape of every parameter of the model, by path.

    Args:
        config: The model.
        layout: As for `parameter_metadata`.

    Returns:
        The shapes, such as ``{"head/kernel": (4096, 32000), ...}``.
    """
    return flat_shapes(parameter_metadata(config, layout))


def flat_shapes(params: Mapping[str, Any]) -> dict[str, Shape]:
    """Shape of every array of a tree, by path."""
    return {path: tuple(x.shape) for path, x in flatten_dict(params, sep="/").items()}
