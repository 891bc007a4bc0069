"""Read JSON strictly: errors name the file, and NaN, Infinity and too deep nesting are rejected.

Python's reader takes NaN and Infinity, which JSON does not have, and its recursion ends in an error
of its own. Here each is a ValueError.
"""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

JSON_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


def read_json(path: str | Path, *required_keys: str) -> dict[str, Any]:
    """Read a JSON file and return its object.

    Args:
        path: The file.
        required_keys: Keys that the object must have.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`; or the text is no object, or lacks a key.
        OSError: The file cannot be read.
    """
    return parse_json_object(Path(path).read_bytes(), *required_keys, location=path)


def parse_json_object(
    text: str | bytes, *required_keys: str, location: str | Path
) -> dict[str, Any]:
    """Parse JSON text whose top level must be an object, and return it.

    Args:
        text: JSON.
        required_keys: Keys that the object must have.
        location: What to call the text in errors: its file, and the line where it is one of many.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`; or the text is no object, or lacks a key.
    """
    obj = parse_json(text, location=location)
    if not isinstance(obj, dict):
        raise ValueError(f"{location} is {JSON_TYPE_NAMES[type(obj)]}, not an object.")
    missing_keys = [name for name in required_keys if name not in obj]
    if missing_keys:
        raise ValueError(
            f"{location} does not say {', '.join(missing_keys)}; it has {_format_keys(obj)}."
        )
    return obj


def parse_json(text: str | bytes, *, location: str | Path) -> Any:
    """Parse JSON text and return its value; all numbers in it are finite.

    Args:
        text: JSON; bytes are UTF-8, a byte order mark may stand in front.
        location: What to call the text in errors.

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
        raise ValueError(f"{location} is nested too deeply.") from None
    except ValueError as error:  # of Python's reader too
        raise ValueError(f"{location} is not JSON: {error}.") from error


def get_field(obj: dict[str, Any], name: str, expected_type: type[T], *, location: str | Path) -> T:
    """Return the value of a key, checked to have the expected type.

    Args:
        obj: An object that was read.
        name: The key.
        expected_type: dict, list, str, bool, int or float; a whole number is a number, a truth
            value is none.
        location: What to call the object in errors.

    Returns:
        The value.

    Raises:
        ValueError: The key is missing, or its value is of another type.
    """
    if name not in obj:
        raise ValueError(f"{location} does not say {name}; it has {_format_keys(obj)}.")
    value = obj[name]
    if expected_type is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not expected_type:
        raise ValueError(
            f"{location}: {name} is {JSON_TYPE_NAMES[type(value)]}, not "
            f"{JSON_TYPE_NAMES[expected_type]}."
        )
    return value


def _format_keys(obj: dict[str, Any]) -> str:
    """List the keys of an object for an error message, at most eight of them."""
    if not obj:
        return "no keys"
    shown = ", ".join(key[:60] for key in sorted(obj)[:8])
    return shown if len(obj) <= 8 else f"{shown} and {len(obj) - 8} more"
