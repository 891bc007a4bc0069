"""Canonical form of a configuration, and the fields in which two configurations differ."""

import dataclasses
import math
from dataclasses import replace
from typing import Any, TypeVar

from jaxformer import config as c

T = TypeVar("T")
ROUNDING = 1e-12  # relative tolerance; JSON is exact, but the square of a root is not


def shortest_cycle(pattern: tuple[T, ...]) -> tuple[T, ...]:
    """Shortest prefix whose repetition gives the pattern."""
    for length in range(1, len(pattern)):
        if all(entry == pattern[i % length] for i, entry in enumerate(pattern)):
            return pattern[:length]
    return pattern


def canonical(config: c.TransformerConfig) -> c.TransformerConfig:
    """The shortest equivalent configuration, without dropout, initializers and what only files say.

    Args:
        config: A configuration.

    Returns:
        A configuration that is equal for equal models.
    """
    depth, topology = config.num_layers, config.topology
    encoder = config.encoder_config
    if isinstance(topology, c.EncoderDecoder):
        depth = max(depth, topology.num_encoder_layers)
    attention = _canonical_attention(config.attention, depth)
    branches = _layer_cycle(config.feed_forward, depth)
    if isinstance(topology, c.EncoderDecoder):
        encoder_attention = _canonical_attention(encoder.attention, depth)
        encoder_branches = _layer_cycle(encoder.feed_forward, depth)
        topology = replace(
            topology,
            attention=None if encoder_attention == attention else encoder_attention,
            feed_forward=None if encoder_branches == branches else encoder_branches,
        )
    placements = _layer_cycle(config.norm_placements, depth)
    return replace(
        config,
        norm_placement=placements[0] if len(placements) == 1 else placements,
        attention=attention,
        feed_forward=branches,
        topology=topology,
        dropout=c.Dropout(),
        initialisation=c.Initialisation(),
        model_type=None,
        max_position_embeddings=None,
    )


def _layer_cycle(pattern: tuple[T, ...], depth: int) -> tuple[T, ...]:
    """Shortest cycle that gives the same `depth` layers."""
    return shortest_cycle(tuple(pattern[i % len(pattern)] for i in range(depth)))


def _canonical_attention(attention: c.Attention, depth: int) -> c.Attention:
    """The shortest equivalent attention configuration."""
    biases: Any = tuple(sorted(getattr(attention, "biases", ())))
    match attention:
        case c.Mixer() | c.NoAttention():
            return attention
        case c.Hybrid():
            return _canonical_hybrid(attention, depth)
        case c.HybridHeads(kinds=kinds):
            parts: Any = tuple(_canonical_attention(kind, depth) for kind in kinds)
            return replace(attention, kinds=parts)
        case c.Decay() | c.ShortConvolution() | c.LinearAttention():
            return replace(attention, biases=biases)
        case c.Latent(nope_dim=plain, rope_dim=rotary):
            width = plain + rotary
        case c.MultiHead(head_dim=width) | c.SharedKV(head_dim=width):
            pass
    usual = attention.scale is not None and math.isclose(
        attention.scale, width**-0.5, rel_tol=ROUNDING
    )
    return replace(
        attention,
        positions=_layer_cycle(attention.positions, depth),
        windows=_layer_cycle(attention.windows, depth),
        scale=None if usual else attention.scale,
        biases=biases,
    )


def _canonical_hybrid(hybrid: c.Hybrid, depth: int) -> c.Hybrid:
    """The shortest cycle of kinds, each with the positions and the window of its layers."""
    layers: list[Any] = []
    for i in range(depth):
        kind: Any = hybrid.kinds[i % len(hybrid.kinds)]
        positions = kind.positions[i % len(kind.positions)]
        kind = kind.at_layer(positions, kind.windows[i % len(kind.windows)])
        layers.append(_canonical_attention(kind, 1))
    return c.Hybrid(kinds=shortest_cycle(tuple(layers)))


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
