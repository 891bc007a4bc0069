"""Read JSON strictly: errors name the file, and NaN, Infinity and too deep nesting are rejected.

Python's `json` accepts NaN and Infinity, which are not JSON, and raises RecursionError on deep
nesting. Here each is a ValueError.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.atomic_files import atomic_file

T = TypeVar("T")

JSON_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def read_json(
    path: str | Path, *required_keys: str, allow_infinity: bool = False
) -> dict[str, Any]:
    """Read a JSON file and return its object.

    Args:
        path: The file.
        required_keys: Keys that the object must have.
        allow_infinity: As for `parse_json`.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`, or the JSON is not an object or lacks a key.
        OSError: The file cannot be read.
    """
    text = Path(path).read_bytes()
    return parse_json_object(text, *required_keys, location=path, allow_infinity=allow_infinity)


def parse_json_object(
    text: str | bytes, *required_keys: str, location: str | Path, allow_infinity: bool = False
) -> dict[str, Any]:
    """Parse JSON text whose top level must be an object, and return it.

    Args:
        text: JSON.
        required_keys: Keys that the object must have.
        location: Name of the text in error messages: the file, with the line number in JSON Lines.
        allow_infinity: As for `parse_json`.

    Returns:
        The object.

    Raises:
        ValueError: As for `parse_json`, or the JSON is not an object or lacks a key.
    """
    obj = parse_json(text, location=location, allow_infinity=allow_infinity)
    if not isinstance(obj, dict):
        raise ValueError(f"{location} is {JSON_TYPE_NAMES[type(obj)]}, not an object.")
    missing_keys = [name for name in required_keys if name not in obj]
    if missing_keys:
        raise ValueError(f"{location} lacks {', '.join(missing_keys)}; it has {_format_keys(obj)}.")
    return obj


def parse_json(text: str | bytes, *, location: str | Path, allow_infinity: bool = False) -> Any:
    """Parse JSON text; NaN and, by default, infinity are errors.

    Args:
        text: JSON; bytes are UTF-8, with or without a byte order mark.
        location: Name of the text in error messages.
        allow_infinity: Whether to accept `Infinity`, as Python's `json` writes it.

    Returns:
        The value.

    Raises:
        ValueError: The text is not UTF-8, not JSON or nested too deeply, or a number in it is not
            finite.
    """

    def finite(number: str) -> float:
        if allow_infinity and number == "Infinity":
            return math.inf
        if not math.isfinite(float(number)):
            raise ValueError(f"{number[:60]} is not a finite number")
        return float(number)

    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError(f"{location} is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{location} is not JSON: {error}.") from error


def get_field(obj: dict[str, Any], name: str, expected_type: type[T], *, location: str | Path) -> T:
    """Return the value of a key, checked to have the expected type.

    Args:
        obj: A parsed JSON object.
        name: The key.
        expected_type: dict, list, str, bool, int or float. An int is accepted as a float, a bool
            neither as an int nor as a float.
        location: Name of the object in error messages.

    Returns:
        The value.

    Raises:
        ValueError: The key is missing, or its value has another type.
    """
    if name not in obj:
        raise ValueError(f"{location} lacks {name}; it has {_format_keys(obj)}.")
    value = obj[name]
    if expected_type is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not expected_type:
        raise ValueError(
            f"{location}: {name} is {JSON_TYPE_NAMES[type(value)]}, not "
            f"{JSON_TYPE_NAMES[expected_type]}."
        )
    return value


def json_digest(content: Any) -> str:
    """SHA-256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json_with_checksum(path: Path) -> Any:
    """Content that `write_json_with_checksum` wrote; None if there is none, or it is damaged."""
    try:
        saved = read_json(path, "checksum", "content")
    except (OSError, ValueError):
        return None
    return saved["content"] if saved["checksum"] == json_digest(saved["content"]) else None


def json_with_checksum(content: Any) -> str:
    """JSON of a value and its checksum, for `read_json_with_checksum`."""
    return json.dumps({"checksum": json_digest(content), "content": content})


def write_json_with_checksum(path: Path, content: Any) -> None:
    """Write a value and its checksum, so that no reader sees a part of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        partial.write_text(json_with_checksum(content))


def _format_keys(obj: dict[str, Any]) -> str:
    """List the keys of an object for an error message, at most eight of them."""
    if not obj:
        return "no keys"
    shown = ", ".join(key[:60] for key in sorted(obj)[:8])
    return shown if len(obj) <= 8 else f"{shown} and {len(obj) - 8} more"
