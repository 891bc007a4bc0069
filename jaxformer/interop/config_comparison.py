"""Canonical form of a configuration, and the fields in which two configurations differ."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxformer import config as c

ROUNDING = 1e-12  # relative tolerance; JSON is exact, but the square of a root is not


def canonical(config: c.TransformerConfig) -> c.TransformerConfig:
    """The equivalent configuration of the shortest cycles, with nothing that files do not say.

    Args:
        config: A configuration.

    Returns:
        The configuration without dropout and initializers, with the scales and the order of biases
        that are usual. Equal models have equal ones.
    """
    return replace(
        with_shortest_cycles(config, _canonical_layer),
        dropout=c.Dropout(),
        initialisation=c.Initialisation(),
        model_type=None,
        max_position_embeddings=None,
    )


def with_shortest_cycles(
    config: c.TransformerConfig, change: Callable[[c.Layer], c.Layer] = lambda layer: layer
) -> c.TransformerConfig:
    """The same model, said by the shortest cycles, with a change of each layer."""
    topology, cycles = config.topology, c.cycles_of(tuple(map(change, config.layers)))
    if isinstance(topology, c.EncoderDecoder):
        own = c.cycles_of(tuple(map(change, config.encoder_layers)))
        differing: dict[str, Any] = {
            name: None if own[name] == cycles[name] else own[name]
            for name in ("attention", "feed_forward")
        }
        topology = replace(topology, **differing)
    return replace(config, **cycles, topology=topology)


def _canonical_layer(layer: c.Layer) -> c.Layer:
    return replace(layer, attention=_canonical_attention(layer.attention))


def _canonical_attention(attention: Any) -> Any:
    """The option without a scale that is the usual one, and with biases in order."""
    if isinstance(attention, c.HybridHeads):
        return replace(attention, kinds=tuple(map(_canonical_attention, attention.kinds)))
    changes: dict[str, Any] = {}
    biases = getattr(attention, "biases", ())
    if biases != (ordered := tuple(sorted(biases))):
        changes["biases"] = ordered
    if (scale := getattr(attention, "scale", None)) is not None and attention.has_scores:
        usual = attention.key_dim**-0.5
        changes["scale"] = None if math.isclose(scale, usual, rel_tol=ROUNDING) else scale
    return replace(attention, **changes) if changes else attention


def config_differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Fields in which two configurations differ, one line each.

    Args:
        expected: The first configuration.
        actual: The second configuration.
        path: Path of both inside a larger configuration.

    Returns:
        One line per field.
    """
    if dataclasses.is_dataclass(expected) and type(expected) is type(actual):
        lines = []
        for field in dataclasses.fields(expected):
            pair = getattr(expected, field.name), getattr(actual, field.name)
            lines += config_differences(*pair, f"{path}.{field.name}" if path else field.name)
        return lines
    if isinstance(expected, tuple) and isinstance(actual, tuple) and len(expected) == len(actual):
        return [
            line
            for i, pair in enumerate(zip(expected, actual, strict=True))
            for line in config_differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(actual, float | int):
        same = math.isclose(expected, actual, rel_tol=ROUNDING)
    else:
        same = expected == actual
    return [] if same else [f"{path}: {actual} instead of {expected}"]
