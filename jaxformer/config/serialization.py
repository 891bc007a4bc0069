"""Write configurations as JSON or Python source, and read both back.

Where options repeat in a tuple, JSON has {"times": 58, "items": [...]} and Python (Option(),) * 58.
"""

import ast
import dataclasses
import json
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxformer.checks import field_types
from jaxformer.config.registry import allowed_types
from jaxformer.errors import did_you_mean
from jaxformer.json_files import parse_json

T = TypeVar("T")

MAX_LENGTH = 100_000  # of a tuple whose items are repeated
IMPORT_FIRST = "Custom options must be imported first (--import MODULE)."


def to_json(config: Any, *, indent: int | None = None) -> str:
    """Write a configuration as JSON; a dataclass carries its type's name under "type".

    Args:
        config: A configuration dataclass, or the value of one of its fields.
        indent: Spaces per nesting level; None writes a single line.

    Returns:
        The JSON, for `from_json`.
    """
    return json.dumps(_encode(config), indent=indent)


def from_json(kind: type[T], text: str | bytes) -> T:
    """Parse the JSON of `to_json` into an instance of `kind`.

    Args:
        kind: The dataclass to create.
        text: JSON; bytes are UTF-8.

    Returns:
        An instance of `kind`; missing fields have their defaults.

    Raises:
        ValueError: The text is not JSON, a field is unknown or missing, or a value does not match
            its annotation; the message has the path to it.
    """
    return _decode(kind, parse_json(text, location=f"The JSON of {kind.__name__}"), kind.__name__)


def python_source(
    value: Any, *, defaults: bool = True, width: int | None = None, indent: int = 0
) -> str:
    """Write a configuration as Python source, which `from_python` reads.

    Args:
        value: A configuration dataclass, or the value of one of its fields.
        defaults: Whether fields that equal their defaults are written.
        width: Length from which a value gets a line for each of its parts; None writes one line.
        indent: Spaces before the lines after the first.

    Returns:
        The source; options that repeat in a tuple are written once.
    """
    inner: Any = {"defaults": defaults, "width": width}
    if isinstance(value, tuple):
        parts = repetitions(value)
        if parts and parts != [(value, 1)]:
            sources = [python_source(items, indent=indent, **inner) for items, _ in parts]
            texts = [
                x if count == 1 else f"({x}) * {count}" if ") * " in x else f"{x} * {count}"
                for x, (_, count) in zip(sources, parts, strict=True)
            ]
            flat = " + ".join(texts)
            is_short = width is None or len(flat) + indent <= width
            return flat if is_short else f"\n{' ' * indent}+ ".join(texts)
        items = [python_source(x, indent=indent + 4, **inner) for x in value]
        return _bracket("(", items, ",)" if len(value) == 1 else ")", width, indent)
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = (f for f in dataclasses.fields(value) if f.repr)
    pairs = ((f, getattr(value, f.name)) for f in fields)
    items = [
        f"{f.name}={python_source(x, indent=indent + 4, **inner)}"
        for f, x in pairs
        if defaults or x != f.default
    ]
    return _bracket(f"{type(value).__name__}(", items, ")", width, indent)


def _bracket(start: str, items: list[str], end: str, width: int | None, indent: int) -> str:
    """Join items on one line if they are short, else one item per line."""
    flat = f"{start}{', '.join(items)}{end}"
    if width is None or ("\n" not in flat and len(flat) + indent <= width):
        return flat
    pad = " " * (indent + 4)
    if all(len(item) < 10 for item in items):
        body = textwrap.fill(", ".join(items), 96, initial_indent=pad, subsequent_indent=pad)
    else:
        body = "\n".join(f"{pad}{item}," for item in items)
    return f"{start}\n{body}\n{' ' * indent}{end.lstrip(',')}"


def repetitions(items: Sequence[Any]) -> list[tuple[tuple[Any, ...], int]]:
    """Divide a sequence into parts, each with the number of times that it repeats.

    Only dataclasses count as repeated. What stands between repetitions is one part.
    """
    parts, i = list[tuple[tuple[Any, ...], int]](), 0
    while i < len(items):
        period, count = 1, 1
        longest = (len(items) - i) // 2 if dataclasses.is_dataclass(items[i]) else 0
        for length in range(1, longest + 1):
            number, part = 1, items[i : i + length]
            while items[i + number * length : i + (number + 1) * length] == part:
                number += 1
            if number > 1 and number * length > count * period:
                period, count = length, number
        repeated = tuple(items[i : i + period])
        if count == 1 and parts and parts[-1][1] == 1:
            parts[-1] = parts[-1][0] + repeated, 1
        else:
            parts.append((repeated, count))
        i += period * count
    return parts


def from_python(text: str, kinds: Mapping[str, Any]) -> Any:
    """Parse a configuration from Python source such as "LayerNorm(eps=1e-6)".

    Only constructors in `kinds` are executed.

    Args:
        text: A literal, or a call of one of `kinds` with keywords; its name alone stands for a call
            without any.
        kinds: Constructors by name.

    Returns:
        The value of the literal or call.

    Raises:
        ValueError: The text is neither.
    """

    def build(node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in kinds:
                kind = kinds[name]
                values = {str(k.arg): _encode(build(k.value)) for k in keywords}
                if len(values) < len(keywords):
                    raise ValueError(f"{ast.unparse(node)[:100]} has a keyword twice.")
                return _decode_dataclass(kind, {"type": kind.__name__, **values}, name)
            case ast.Name(id=name) if name in kinds:
                return _decode_dataclass(kinds[name], {"type": kinds[name].__name__}, name)
            case ast.Tuple(elts=items):
                return tuple(build(item) for item in items)
            case ast.BinOp(op=ast.Add(), left=ast.Tuple() | ast.BinOp() as left, right=right):
                return build(left) + build(right)
            case ast.BinOp(
                op=ast.Mult(),
                left=ast.Tuple() | ast.BinOp() as left,
                right=ast.Constant(int(count)),
            ):
                return _repeated(build(left), count)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            source, known = ast.unparse(node), IMPORT_FIRST
            if kinds:
                known = f"Options are {', '.join(sorted(kinds))}. {IMPORT_FIRST}"
            hint = did_you_mean(source.partition("(")[0], kinds)
            raise ValueError(
                f"Cannot parse {source!r}: expected a number, a string, None, or an option with "
                f"keywords, such as RMSNorm(eps=1e-6).{hint} {known}"
            ) from None

    try:
        return build(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the last two on deep nesting
        raise ValueError(f"Cannot parse {text[:100]!r} as a configuration.") from None


def _repeated(items: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    if not (0 < count and len(items) * count <= MAX_LENGTH):
        raise ValueError(
            f"Options repeat at least once and have at most {MAX_LENGTH:,} items together; got "
            f"{len(items)} items {count} times."
        )
    return items * count


def _required_fields(kind: Any) -> list[str]:
    """Names of the fields without a default."""
    return [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        encoded = list[Any]()
        for items, count in repetitions(value):
            part = _encode(list(items)) if count > 1 else [_encode(x) for x in items]
            encoded += part if count == 1 else [{"times": count, "items": part}]
        return encoded
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _decode(hint: Any, data: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if (kinds := allowed_types(hint)) != (hint,):
        return _decode(_select_union_member(kinds, data, path), data, path)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list, got {data!r}.")
        items = list[Any]()
        for i, item in enumerate(data):
            if isinstance(item, dict) and item.keys() == {"times", "items"}:
                count = _decode(int, item["times"], f"{path}[{i}].times")
                items += _repeated(_decode(hint, item["items"], f"{path}[{i}].items"), count)
            else:
                items.append(_decode(args[0], item, f"{path}[{i}]"))
        return tuple(items)
    if origin is typing.Literal:
        if data not in args:
            raise ValueError(f"{path}: expected one of {list(args)}, got {data!r}.")
        return data
    if hint is float and type(data) is int:
        return data  # the dataclass converts it to float, or rejects it
    if hint in (int, float, bool, str, type(None)):
        if type(data) is not hint:
            raise ValueError(f"{path}: expected {hint.__name__}, got {data!r}.")
        return data
    return hint(data)


def _select_union_member(options: tuple, data: Any, path: str) -> Any:
    """Return the member of a union that matches the JSON data."""
    if isinstance(data, dict):
        kinds = {o.__name__: o for o in options if dataclasses.is_dataclass(o) and type(o) is type}
        if data.get("type") not in kinds:
            raise ValueError(
                f"{path}: expected one of {list(kinds)}, got type {data.get('type')!r}. "
                f"{IMPORT_FIRST}"
            )
        return kinds[data["type"]]
    if data is None and type(None) in options:
        return type(None)
    scalar_types = [o for o in options if o is not type(None) and not dataclasses.is_dataclass(o)]
    for option in scalar_types:
        origin = typing.get_origin(option)
        if type(data) is option or (isinstance(data, list) and origin is tuple):
            return option
        if origin is typing.Literal and data in typing.get_args(option):
            return option
    if not scalar_types:
        raise ValueError(f"{path}: expected an object with a type, got {data!r}.")
    return scalar_types[0]


def _decode_dataclass(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict) or data.get("type") != kind.__name__:
        got = f"one of type {data['type']!r}" if isinstance(data, dict) and "type" in data else data
        raise ValueError(f"{path}: expected an object of type {kind.__name__}, got {got}.")
    hints = field_types(kind)
    unknown = sorted(set(data) - set(hints) - {"type"})
    if unknown:
        known = ", ".join(hints) or "none"
        similar = "".join(did_you_mean(name, hints) for name in unknown)
        raise ValueError(
            f"{path}: {kind.__name__} has no field {', '.join(unknown)}; its fields are {known}."
            f"{similar}"
        )
    missing = [name for name in _required_fields(kind) if name not in data]
    if missing:
        at = "" if path == kind.__name__ else f"{path}: "
        raise ValueError(f"{at}{kind.__name__} needs {', '.join(missing)}.")
    return kind(**{n: _decode(hints[n], v, f"{path}.{n}") for n, v in data.items() if n != "type"})
