"""Test-size configurations: every option keeps its kind, with small sizes."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

TINY_VOCAB_SIZE = 128
TINY_HEAD_DIM = 16
TINY_NUM_EXPERTS = 4
MAX_PATTERN_LENGTH = 8

T = TypeVar("T")
Scale = TypeVar("Scale", float, float | None)


def tiny_num_heads(num_heads: int) -> int:
    """Return 4 heads for a power of two, else 6."""
    return 4 if num_heads & (num_heads - 1) == 0 else 6


def tiny_window(window: int) -> int:
    """Return a window short enough to matter in a tiny model."""
    return min(window, 6)


WIDTHS = (
    "head_dim",
    "key_dim",
    "value_dim",
    "nope_dim",
    "rope_dim",
    "state_dim",
    "step_rank",
    "rank",
)
# A size, or a function of the old size, by the name of a field or of one option's field.
SIZES: Mapping[str, Any] = dict.fromkeys(WIDTHS, TINY_HEAD_DIM) | {
    "hidden_dim": 88,
    "latent_dim": 2 * TINY_HEAD_DIM,
    "max_length": 64,
    "num_heads": tiny_num_heads,
    "original_max_length": 16,
    "query_latent_dim": 3 * TINY_HEAD_DIM,
    "windows": tiny_window,
    "BlockSparse.block_size": 4,
    "BlockSparse.local_blocks": 2,
    "BlockSparse.stride": 3,
    "Chunks.size": tiny_window,
    "ExpertGroups.num_groups": 4,
    "ExpertGroups.top_k": 2,
    "ExpertLatent.latent_dim": TINY_HEAD_DIM,
    "LayerEmbedding.dim": TINY_HEAD_DIM,
    "LayerEmbedding.vocab_size": TINY_VOCAB_SIZE - 8,
    "MultiHead.value_dim": TINY_HEAD_DIM // 2,
    "SelectiveScan.width": 4 * TINY_HEAD_DIM,
    "TimeMixing.width": 4 * TINY_HEAD_DIM,
}


def shrink(option: T, **changes: Any) -> T:
    """Return an option at test size: it, and every option in it, with the sizes of `SIZES`.

    Args:
        option: The option.
        changes: Its fields whose size follows from other fields.
    """
    names = [field.name for field in fields(option)]  # type: ignore[arg-type]
    owner = type(option).__name__
    small = {name: _shrink_value(owner, name, getattr(option, name)) for name in names}
    return replace(option, **small | changes)  # type: ignore[type-var]


def _shrink_value(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_shrink_value(owner, name, entry) for entry in value)
    if is_dataclass(value):
        return value.tiny() if hasattr(value, "tiny") else shrink(value)
    size = SIZES.get(f"{owner}.{name}", SIZES.get(name))
    if value is None or size is None:
        return value
    return size(value) if callable(size) else size


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
