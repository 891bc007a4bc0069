"""Low-rank adapters merged into the kernels that they adapt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from jaxformer import config as c
from jaxformer.layers.lora import LORA_A, LORA_B, MAGNITUDE, LowRank, is_adapter
from jaxformer.layers.parameter_metadata import check_parameters


def merge_lora(
    config: c.TransformerConfig, params: Mapping[str, Any]
) -> tuple[c.TransformerConfig, dict[str, Any]]:
    """Merge the adapters into their kernels.

        kernel + scale * A B; with `dora`, its columns scaled to the trained lengths

    Args:
        config: A model with an adapter, or without, which is returned as it is.
        params: Its parameters.

    Returns:
        The model without adapters, and its parameters; merged kernels have the wider dtype of
        kernel and adapter.

    Raises:
        ValueError: If the parameters do not fit `config`, for example have another rank.
    """
    check_parameters(config, params)
    if (lora := config.adapter) is None:
        return config, dict(params)
    arrays = flatten_dict(params, sep="/")
    merged = {path: x for path, x in arrays.items() if not is_adapter(path)}
    for path in [path for path in arrays if path.endswith(f"/{LORA_A}")]:
        module = path.removesuffix(LORA_A)
        name = next(f"{module}{x}" for x in ("kernel", "embedding") if f"{module}{x}" in merged)
        kernel, magnitude = merged[name], arrays.get(f"{module}{MAGNITUDE}")
        merged[name] = _merge(lora, kernel, arrays[path], arrays[f"{module}{LORA_B}"], magnitude)
    return replace(config, adapter=None), unflatten_dict(merged, sep="/")


def _merge(lora: c.LoRA, kernel: Any, a: Any, b: Any, magnitude: Any) -> Array:
    num_stacks = a.ndim + b.ndim - kernel.ndim - 2
    factors = LowRank(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    total = jnp.asarray(kernel, jnp.float32) + lora.scale * factors.product(num_stacks)
    if magnitude is not None:
        inputs = tuple(range(num_stacks, a.ndim - 1))
        length = jnp.sqrt(jnp.sum(jnp.square(total), axis=inputs, keepdims=True))
        ratio = jnp.expand_dims(jnp.asarray(magnitude, jnp.float32), inputs)
        ratio = ratio / jnp.where(length == 0, 1, length)
        total = total * jnp.broadcast_to(ratio, total.shape)
    return total.astype(np.promote_types(kernel.dtype, a.dtype))
