"""Checks that samplers and requests share."""

from numbers import Integral
from typing import Any


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Refuse what is no whole number from 1 on, or is more than `most`."""
    whole = int(value) if isinstance(value, Integral) else 0
    if whole < 1 or (most is not None and whole > most):
        bound = "of at least 1" if most is None else f"in [1, {most}]"
        raise ValueError(f"{name} must be a whole number {bound}; got {value}.")
