"""What parameters a configuration has: paths and shapes, without making any."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxformer import config as c
from jaxformer.interop.transforms import Shape
from jaxformer.layers import Transformer


def parameter_shapes(config: c.TransformerConfig) -> dict[str, Shape]:
    """Shape of every parameter that the model's ``init`` makes, by path.

    Args:
        config: The model.

    Returns:
        The shapes, such as ``{"head/kernel": (4096, 32000), ...}``.
    """
    tokens = jnp.zeros((1, 1), jnp.int32)
    source = tokens if isinstance(config.topology, c.EncoderDecoder) else None
    made = jax.eval_shape(
        lambda key: Transformer(config).init(key, tokens, source=source), jax.random.key(0)
    )
    return flat_shapes(made["params"])


def flat_shapes(params: Mapping[str, Any]) -> dict[str, Shape]:
    """Shape of every array of a tree, by path."""
    return {path: tuple(x.shape) for path, x in flatten_dict(params, sep="/").items()}
