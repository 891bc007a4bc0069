"""Read JSON strictly: errors name the file, and NaN, Infinity and too deep nesting are rejected.

Python's reader takes NaN and Infinity, which JSON does not have, and its recursion ends in an error
of its own. Here each is a ValueError.
"""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

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
    """Read a JSON file and return its object.

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
    """Parse JSON text whose top level must be an object, and return it.

    Args:
        text: JSON.
        names: Keys that the object must have.
        where: What to call the text in errors: its file, and the line where it is one of many.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`; or the text is no object, or lacks a key.
    """
    obj = parse_json(text, where=where)
    if not isinstance(obj, dict):
        raise ValueError(f"{where} is {NAMES[type(obj)]}, not an object.")
    missing_keys = [name for name in names if name not in obj]
    if missing_keys:
        raise ValueError(f"{where} does not say {', '.join(missing_keys)}; it has {_some(obj)}.")
    return obj


def parse_json(text: str | bytes, *, where: str | Path) -> Any:
    """Parse JSON text and return its value; all numbers in it are finite.

    Args:
        text: JSON; bytes are UTF-8, a byte order mark may stand in front.
        where: What to call the text in errors.

    Returns:
        The value; all of its numbers are finite.

    Raises:
        ValueError: The text is not UTF-8, not JSON or nested too deeply, or a number in it is not
            finite.
    """

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number[:60]} stands where a finite number belongs")
        return float(number)

    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply.") from None
    except ValueError as error:  # of Python's reader too
        raise ValueError(f"{where} is not JSON: {error}.") from error


def field(found: dict[str, Any], name: str, kind: type[T], *, where: str | Path) -> T:
    """Return the value of a key, checked to have the expected type.

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


def _some(found: dict[str, Any]) -> str:
    """List the keys of an object for an error message, at most eight of them."""
    if not found:
        return "no keys"
    shown = ", ".join(key[:60] for key in sorted(found)[:8])
    return shown if len(found) <= 8 else f"{shown} and {len(found) - 8} more"
