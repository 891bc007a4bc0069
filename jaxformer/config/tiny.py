"""Test-size configurations: every option keeps its kind, with small sizes."""

import math
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from jaxformer.config.embedding import Embedding, LMHead
from jaxformer.config.positions import (
    BlockSparse,
    Chunks,
    Learned,
    Positions,
    Rope,
    ScoreBias,
    Window,
)
from jaxformer.config.rope_scaling import DynamicNTK, Llama3Scaling, LongRope, RopeScaling, Yarn

TINY_VOCAB_SIZE = 128
TINY_HEAD_DIM = 16
TINY_HIDDEN_DIM = 88
TINY_WINDOW = 6
TINY_MAX_LENGTH = 64
TINY_NUM_EXPERTS = 4
MAX_PATTERN_LENGTH = 8

T = TypeVar("T")
Scale = TypeVar("Scale", float, float | None)


def tiny_num_heads(num_heads: int) -> int:
    """Return 4 heads for a power of two, else 6."""
    return 4 if num_heads & (num_heads - 1) == 0 else 6


def tiny_positions(positions: Positions | None) -> Positions | None:
    """Return position options for heads of `TINY_HEAD_DIM` features."""
    match positions:
        case Rope():
            pairs = max(1, round(TINY_HEAD_DIM * positions.fraction / 2))
            if positions.fraction < 1:
                pairs = min(pairs, TINY_HEAD_DIM // 2 - 1)
            return replace(
                positions,
                fraction=2 * pairs / TINY_HEAD_DIM,
                scaling=_tiny_scaling(positions.scaling, pairs),
            )
        case ScoreBias():
            return positions.tiny()
    return positions


def _tiny_scaling(scaling: RopeScaling | None, pairs: int) -> RopeScaling | None:
    match scaling:
        case DynamicNTK() | Llama3Scaling() | Yarn():
            return replace(scaling, original_max_length=TINY_MAX_LENGTH // 4)
        case LongRope(short_factors=short, long_factors=long):
            step = len(short) / pairs
            pair_indices = [int(i * step) for i in range(pairs)]
            return replace(
                scaling,
                short_factors=tuple(short[i] for i in pair_indices),
                long_factors=tuple(long[i] for i in pair_indices),
                original_max_length=TINY_MAX_LENGTH // 4,
                max_length=TINY_MAX_LENGTH,
            )
    return scaling


def tiny_window(window: Window) -> Window:
    """Return a window short enough to matter in a tiny model."""
    if isinstance(window, BlockSparse):
        return BlockSparse(block_size=4, local_blocks=2, stride=3)
    if isinstance(window, Chunks):
        return Chunks(size=min(window.size, TINY_WINDOW))
    return None if window is None else min(window, TINY_WINDOW)


def tiny_embedding(embedding: Embedding, old_width: int, new_width: int) -> Embedding:
    """Return the embedding for another model width."""
    positions = embedding.positions
    if isinstance(positions, Learned):
        positions = replace(positions, max_length=TINY_MAX_LENGTH)
    factorised = embedding.dim is not None
    return replace(
        embedding,
        scale=rescale_with_width(embedding.scale, old_width, new_width),
        positions=positions,
        dim=new_width // 2 if factorised else None,
    )


def tiny_head(head: LMHead, old_width: int, new_width: int, vocab_size: int) -> LMHead:
    """Return the head for another model width and vocabulary."""
    return replace(
        head,
        multiplier=rescale_with_width(head.multiplier, old_width, new_width),
        masked_ids=(vocab_size - 1,) if head.masked_ids else (),
    )


def rescale_with_width(scale: Scale, old_width: int, new_width: int) -> Scale:
    """If the scale is a power of the old width, return that power of the new width."""
    for power in (0.5, -0.5, -1):
        if scale is not None and math.isclose(scale, old_width**power, rel_tol=1e-2):
            return new_width**power
    return scale


def shorten_pattern(pattern: tuple[T, ...]) -> tuple[T, ...]:
    """Shorten a per-layer pattern to its cycle, or else to one entry per run, and so on.

    A pattern without runs becomes its different entries.
    """
    if len(pattern) <= MAX_PATTERN_LENGTH:
        return pattern
    for length in range(1, MAX_PATTERN_LENGTH + 1):
        if all(entry == pattern[i % length] for i, entry in enumerate(pattern)):
            return pattern[:length]
    runs = tuple(key for key, _ in groupby(pattern))
    return tuple(dict.fromkeys(runs)) if len(runs) == len(pattern) else shorten_pattern(runs)
