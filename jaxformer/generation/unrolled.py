"""Unroll scanned layers into separate parameters and caches, for faster decoding."""

from dataclasses import replace
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import costs
from jaxformer.functional.platforms import target_platform
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.stack import LAYER_GROUPS, unstack_layers

MAX_UNROLLED_LAYERS, MAX_UNROLLED_PARAMETERS = 32, 250_000_000


def unroll(config: c.TransformerConfig, params: Any) -> tuple[c.TransformerConfig, Any]:
    """Return the same model with one parameter tree per layer instead of scanned layers.

    In a scan over layers, XLA for CPUs and GPUs (not for TPUs) copies each layer's parameters out
    of the stacked arrays for every token. Times unrolled and scanned: on an H100, 256 tokens of
    eight rows, 12 layers of width 1024 in bfloat16, 0.17 and 0.28 s; on two CPU cores, 64 tokens of
    one row, 12 layers of width 512, 0.73 and 0.86 s, but 128 tokens of four rows, 8 layers of width
    256, 1.6 and 1.25 s. Compile time of the unrolled model grows with depth.

    Args:
        config: A decoder or an encoder-decoder; the encoder is not unrolled.
        params: The parameters, which are copied.

    Returns:
        A configuration and parameters with the same logits.

    Raises:
        ValueError: The model is an encoder, or the parameters do not match it.
    """
    if not config.topology.has_decoder:
        raise ValueError(f"unroll needs a Decoder or an EncoderDecoder; got {config.topology}.")
    check_parameters(config, params)
    if len(config.first_layers) == config.num_layers:
        return config, params
    layers = tuple(config.layer(i).to_layer() for i in range(config.num_layers))
    return replace(config, first_layers=layers), {**params, "decoder": _unroll(params["decoder"])}


@jax.jit
def _unroll(stack: Any) -> Any:
    """Split stacked layer parameters into one tree per layer."""
    other_params = {name: x for name, x in stack.items() if name not in LAYER_GROUPS}
    layers = {f"layer_{i}": layer for i, layer in enumerate(unstack_layers(stack))}
    return {**other_params, "first_layers": layers}


def should_unroll(config: c.TransformerConfig) -> bool:
    """Whether `generate` unrolls the model: not on TPUs, and not deep or large models."""
    small = (
        costs.num_parameters(config) <= MAX_UNROLLED_PARAMETERS
        and config.num_layers <= MAX_UNROLLED_LAYERS
    )
    return target_platform() != "tpu" and small
