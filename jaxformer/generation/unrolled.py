"""Unroll scanned layers into separate parameters and caches, for faster decoding."""

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import config as c
from jaxformer import costs
from jaxformer.functional.platforms import target_platform
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.stack import LAYER_GROUPS

MAX_UNROLLED_LAYERS = 100  # each adds 0.2 to 0.4 s to compilation, on two CPU cores
MAX_COPIED_PARAMETERS = 250_000_000  # at each call
STACKED_LAYERS = "decoder/layers/"


def unroll(
    config: c.TransformerConfig, params: Any, *, donate: bool = False
) -> tuple[c.TransformerConfig, Any]:
    """Return the same model with one parameter tree per layer instead of scanned layers.

    In a scan over layers, XLA for CPUs and GPUs (not for TPUs) copies each layer's parameters out
    of the stacked arrays for every token. Times unrolled and scanned: on an H100, 256 tokens of
    eight rows, 12 layers of width 1024 in bfloat16, 0.17 and 0.28 s; on two CPU cores, 64 tokens of
    one row, 12 layers of width 512, 0.73 and 0.86 s, but 128 tokens of four rows, 8 layers of width
    256, 1.6 and 1.25 s. Compile time of the unrolled model grows with depth: by 0.2 to 0.4 s per
    layer on two CPU cores.

    Args:
        config: A decoder or an encoder-decoder; the encoder is not unrolled.
        params: The parameters, which are copied.
        donate: Whether to delete each stacked array of `params` once its layers are copied, so that
            memory for two models is not needed.

    Returns:
        A configuration and parameters with the same logits.

    Raises:
        ValueError: The model is an encoder, or the parameters do not match it.
    """
    unrolled_config = config.unroll()
    check_parameters(config, params)
    if config == unrolled_config:
        return config, params
    arrays, unrolled = flatten_dict(params, sep="/"), dict[str, Any]()
    uses = Counter(map(id, arrays.values()))  # two paths may share an array
    for path, array in arrays.items():
        unrolled |= unroll_arrays(config, {path: array})
        uses[id(array)] -= 1
        is_last = path.startswith(STACKED_LAYERS) and not uses[id(array)]
        if donate and is_last and _is_concrete(array):
            jax.block_until_ready(unrolled)
            array.delete()
    return unrolled_config, unflatten_dict(unrolled, sep="/")


def _is_concrete(array: Any) -> bool:
    """Whether an array has memory to delete; NumPy's is freed by itself."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def unroll_arrays(config: c.TransformerConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of the unrolled model by path, from some of the model's.

    Args:
        config: A decoder or an encoder-decoder.
        arrays: Parameters by path, such as "decoder/layers/layer_0/attention/query/kernel".

    Returns:
        Each layer's part of arrays that are stacked over layers; the other arrays themselves.
    """
    groups = tuple(f"decoder/{name}/" for name in LAYER_GROUPS)
    unrolled = {path: x for path, x in arrays.items() if not path.startswith(groups)}
    segments = config.segments("decoder")
    for layer in range(config.num_layers):
        section, index = segments.locate(layer)
        for path, array in arrays.items():
            name = path.removeprefix(f"decoder/{section}/")
            if name != path:
                part = _take_layer(array, *index) if index else array
                unrolled[f"decoder/first_layers/layer_{layer}/{name}"] = part
    return unrolled


@jax.jit
def _take_layer(array: Any, index: Any) -> Any:
    """One layer's part of a stacked array, by one program for all layers."""
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


def decodes_faster_unrolled(config: c.TransformerConfig) -> bool:
    """Whether the unrolled model decodes faster, and compiles in less than a minute."""
    return target_platform() != "tpu" and config.num_layers <= MAX_UNROLLED_LAYERS


def unroll_to_decode(config: c.TransformerConfig, params: Any) -> tuple[c.TransformerConfig, Any]:
    """Return the model as it decodes faster; of a large model, which is not copied, say how."""
    num_parameters = costs.num_parameters(config)
    is_faster = config.segments("decoder").repeats > 1 and decodes_faster_unrolled(config)
    if is_faster and num_parameters <= MAX_COPIED_PARAMETERS:
        return unroll(config, params)
    if not is_faster:
        return config, params
    warnings.warn(
        f"This model decodes faster with parameters of its own for each layer. It has "
        f"{num_parameters:.2g} parameters, more than the {MAX_COPIED_PARAMETERS:.2g} that each "
        "call copies, so unroll it once: `config, params = jaxformer.generation.unroll(config, "
        "params, donate=True)`, or `load_pretrained(folder, unroll=True)`.",
        stacklevel=4,  # the caller of `generate` or `stream`
    )
    return config, params
