"""What is asked of every flag before anything is started."""

import dataclasses
from pathlib import Path
from typing import Any

MOST = 2**31 - 1  # JAX counts in 32 bits


def check_counts(asked: Any, *but: str) -> None:
    """Refuse a whole number that counts nothing, or more than can be counted.

    Args:
        asked: A dataclass.
        but: Names of fields that count nothing, such as a seed.

    Raises:
        ValueError: With the field and its number.
    """
    for field in dataclasses.fields(asked):
        number = getattr(asked, field.name)
        if field.type not in (int, int | None) or field.name in but or number is None:
            continue
        if number < 1:
            raise ValueError(f"{field.name} must be at least 1; got {number}.")
        if number > MOST:
            raise ValueError(f"{field.name} must be at most {MOST}; got {number}.")


def check_seed(name: str, seed: int, *, count: int = 1) -> None:
    """Refuse seeds that JAX would not tell apart.

    Raises:
        ValueError: The seed, or one of those that follow it, is not of 32 bits.
    """
    if not 0 <= seed <= 2**32 - count:
        raise ValueError(f"{name} must lie between 0 and {2**32 - count}; got {seed}.")


def check_folder(name: str, folder: Path | None) -> None:
    """Refuse a folder without a name, which would be the one that the program is started in.

    Raises:
        ValueError: It is, or there is a file of that name.
    """
    if folder is None:
        return
    if folder == Path():
        raise ValueError(f"{name} must name a folder of its own; got '' or '.'.")
    if folder.is_file():
        raise ValueError(f"{name} must name a folder; {folder} is a file.")
