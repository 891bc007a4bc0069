"""JSON that others wrote: read whole and strictly, or refused in a sentence that names the file.

Python's reader takes NaN and Infinity, which JSON does not have; of a key that stands twice it
keeps the last; and its recursion ends in an error of its own. Here each is a ValueError.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_DEPTH = 100  # levels of objects and lists; a config.json has 5, a tokenizer.json 8
NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


def read_json(path: str | Path, *names: str) -> dict[str, Any]:
    """The object in a file.

    Args:
        path: The file.
        names: Keys that the object must have.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`; or the text is no object, or lacks a key.
        OSError: The file cannot be read.
    """
    return parse_object(Path(path).read_bytes(), *names, where=path)


def parse_object(text: str | bytes, *names: str, where: str | Path) -> dict[str, Any]:
    """The object that a text is.

    Args:
        text: JSON.
        names: Keys that the object must have.
        where: What to call the text in errors: its file, and the line where it is one of many.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`; or the text is no object, or lacks a key.
    """
    found = parse_json(text, where=where)
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {NAMES[type(found)]}, not an object.")
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{where} does not say {', '.join(missing)}; it has {_some(found)}.")
    return found


def parse_json(text: str | bytes, *, where: str | Path) -> Any:
    """The value that a text is.

    Args:
        text: JSON; bytes are UTF-8, a byte order mark may stand in front.
        where: What to call the text in errors.

    Returns:
        The value; all of its numbers are finite.

    Raises:
        ValueError: The text is not UTF-8 or not JSON, a number in it is not finite or too long, a
            key stands twice in one object, or it is nested deeper than `MAX_DEPTH` levels.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{where} has {_clipped(digits)} where a finite number belongs.")
        return value

    def whole(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # so many digits that Python refuses to read them
            raise ValueError(f"{where} has a number of {len(digits)} digits.") from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            shown = ", ".join(repr(_clipped(key)) for key in twice[:5])
            raise ValueError(f"{where} has keys twice in one object: {shown}.")
        return found

    if not text:
        raise ValueError(f"{where} is empty.")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            text,
            parse_constant=number,
            parse_float=number,
            parse_int=whole,
            object_pairs_hook=unique,
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start} "
            f"of {len(error.object)}."
        ) from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise ValueError(
            f"{where} is not JSON: {error.msg} at {line}column {error.colno}."
        ) from error
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels.") from None
    if _deeper(value):
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    return value


def field(found: dict[str, Any], name: str, kind: type[T], *, where: str | Path) -> T:
    """What stands under a key, if it is of the type that belongs there.

    Args:
        found: An object that was read.
        name: The key.
        kind: dict, list, str, bool, int or float; a whole number is a number, a truth value is
            none.
        where: What to call the object in errors.

    Returns:
        The value.

    Raises:
        ValueError: The key is missing, or its value is of another type.
    """
    if name not in found:
        raise ValueError(f"{where} does not say {name}; it has {_some(found)}.")
    value = found[name]
    if kind is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not kind:
        raise ValueError(f"{where}: {name} is {NAMES[type(value)]}, not {NAMES[kind]}.")
    return value


def _deeper(value: Any) -> bool:
    """Whether there are more than `MAX_DEPTH` levels; counted one by one, so without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if type(x) in (dict, list))
        level = [item for items in inner for item in items if type(item) in (dict, list)]
        if not level:
            return False
    return True


def _some(found: dict[str, Any]) -> str:
    """The keys of an object, the first of them if they are many."""
    if not found:
        return "no keys"
    shown = ", ".join(_clipped(key) for key in sorted(found)[:8])
    return shown if len(found) <= 8 else f"{shown} and {len(found) - 8} more"


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
