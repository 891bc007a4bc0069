"""Argument check shared by samplers and requests: an integer of at least 1."""

from numbers import Integral
from typing import Any


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raise unless `value` is an integer of at least 1 and at most `most`."""
    whole = int(value) if isinstance(value, Integral) else 0
    if whole < 1 or (most is not None and whole > most):
        bound = "of at least 1" if most is None else f"in [1, {most}]"
        raise ValueError(f"{name} must be an integer {bound}; got {value}.")
