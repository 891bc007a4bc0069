"""Unrolls scanned layers into separate parameters and caches, for faster decoding."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import costs
from jaxformer.config.attention import RECURRENT_KINDS
from jaxformer.functional.platforms import target_platform
from jaxformer.layers.parameter_metadata import check_parameters

MAX_UNROLLED_LAYERS, MAX_UNROLLED_PARAMETERS = 32, 250_000_000


def unroll(config: c.TransformerConfig, params: Any) -> tuple[c.TransformerConfig, Any]:
    """The same model with one parameter tree per layer instead of scanned layers.

    A loop over layers takes its layer's parameters out of stacks of all layers. The compilers for
    CPUs and GPUs copy them for every token; that for TPUs does not. Of eight rows, 256 tokens by 12
    layers of width 1024 in bfloat16 took an H100 0.17 s, and 0.28 by the loop; of one row, 64
    tokens by 12 layers of width 512 took two cores 0.73 s, and 0.86 by the loop; of four rows, 128
    tokens by 8 layers of width 256 took them 1.6 s, and 1.25 by the loop. A program for layers of
    their own is compiled in a time that grows with depth.

    Args:
        config: A decoder, or an encoder-decoder, whose encoder stays as it is.
        params: Its parameters; they are copied.

    Returns:
        A configuration and parameters that give the same logits.

    Raises:
        ValueError: An encoder, which decodes nothing, or parameters of another model.
    """
    if isinstance(config.topology, c.Encoder):
        raise ValueError(f"Models that decode are unrolled; got topology {config.topology}.")
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
        if isinstance(kind, RECURRENT_KINDS):
            return kind
        positions, windows = repeat_to_depth(kind.positions), repeat_to_depth(kind.windows)
        return replace(kind, positions=positions, windows=windows)

    kinds = tuple(map(with_longer_patterns, repeat_to_depth(config.attention_kinds)))
    attention = c.Hybrid(kinds=kinds) if isinstance(config.attention, c.Hybrid) else kinds[0]
    if isinstance(topology, c.EncoderDecoder):
        topology = replace(
            topology,
            attention=topology.attention or config.attention,
            feed_forward=topology.feed_forward or config.feed_forward,
        )
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
    """Whether `generate` unrolls the model: not on TPUs, and not if it is deep or large."""
    small = (
        costs.num_parameters(config) <= MAX_UNROLLED_PARAMETERS
        and config.num_layers <= MAX_UNROLLED_LAYERS
    )
    return target_platform() != "tpu" and small
