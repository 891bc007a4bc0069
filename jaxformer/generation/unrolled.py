"""Unroll scanned layers into separate parameters and caches, for faster decoding."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import costs
from jaxformer.functional.platforms import target_platform
from jaxformer.layers.parameter_metadata import check_parameters

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
    depth = config.num_layers
    if config.pattern_length >= depth:
        return config, params
    decoder = _unstack_layers(params["decoder"], depth, config.pattern_length)
    return _unroll_config(config), {**params, "decoder": decoder}


@lru_cache(maxsize=64)
def _unroll_config(config: c.TransformerConfig) -> c.TransformerConfig:
    depth, topology = config.num_layers, config.topology

    def repeat_to_depth(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(kinds[i % len(kinds)] for i in range(depth))

    def with_longer_patterns(kind: c.AttentionKind) -> c.AttentionKind:
        if not kind.has_scores:
            return kind
        positions, windows = repeat_to_depth(kind.positions), repeat_to_depth(kind.windows)
        return replace(kind, positions=positions, windows=windows)

    kinds = tuple(map(with_longer_patterns, repeat_to_depth(config.attention_kinds)))
    attention = kinds[0] if config.attention is config.attention_kinds[0] else c.Hybrid(kinds=kinds)
    topology = topology.with_encoder_layers(config.attention, config.feed_forward)
    feed_forward = repeat_to_depth(config.feed_forward)
    return replace(config, attention=attention, topology=topology, feed_forward=feed_forward)


@partial(jax.jit, static_argnums=(1, 2))
def _unstack_layers(stack: Any, depth: int, period: int) -> Any:
    """Split stacked layer parameters into one tree per layer."""
    num_stacked = depth - depth % period
    layers = {}
    for index in range(depth):
        repeat, pattern_index = divmod(index, period)
        if index < num_stacked:
            layer = jax.tree.map(
                lambda x, at=repeat: x[at], stack["layers"][f"layer_{pattern_index}"]
            )
        else:
            layer = stack["tail"][f"layer_{pattern_index}"]
        layers[f"layer_{index}"] = jax.tree.map(lambda x: x[None], layer)
    other_params = {name: x for name, x in stack.items() if name not in ("layers", "tail")}
    return {**other_params, "layers": layers}


def should_unroll(config: c.TransformerConfig) -> bool:
    """Whether `generate` unrolls the model: not on TPUs, and not deep or large models."""
    small = (
        costs.num_parameters(config) <= MAX_UNROLLED_PARAMETERS
        and config.num_layers <= MAX_UNROLLED_LAYERS
    )
    return target_platform() != "tpu" and small
