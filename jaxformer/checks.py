"""Validate configuration dataclasses: fields against annotations, then common constraints."""

import contextlib
import dataclasses
import functools
import numbers
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)  # models compute in float32
INT32_MAX = 2**31 - 1  # sizes and positions are int32
MAX_REPR_LENGTH = 100  # characters of a value in an error message

T = TypeVar("T")


class OptionError(ValueError):
    """A method of a custom option raised an error or returned an invalid value."""


class LeftOutError(NotImplementedError):
    """A custom option lacks a method; the message names the method and what needs it."""


@contextlib.contextmanager
def named_errors(giver: str) -> Iterator[None]:
    """Re-raise an exception of a custom option as an OptionError that names the method.

    Args:
        giver: The method that runs inside, such as "Pooled.__call__".

    Raises:
        OptionError: The code inside raised an exception, which becomes the cause. An OptionError or
            a LeftOutError passes unchanged.
    """
    try:
        yield
    except (OptionError, LeftOutError):
        raise
    except Exception as error:
        line = str(error).partition("\n")[0]
        raise OptionError(f"{giver} raises {type(error).__name__}: {line}"[:300]) from error


def require_like(giver: str, axes: str, result: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Require that a custom option returned an array of this shape and dtype.

    Args:
        giver: The option or its method.
        axes: Axes of the array in words, such as "[rows, tokens, width]".
        result: The returned value.
        shape: Required shape.
        dtype: Required dtype.

    Raises:
        OptionError: The value is no array, or has another shape or dtype.
    """
    actual = getattr(result, "shape", None)
    if actual is None or not hasattr(result, "dtype"):
        raise OptionError(f"{giver} must return {axes} of shape {shape}; got {shown(result)}.")
    if actual != shape:
        raise OptionError(f"{giver} must return {axes} of shape {shape}; got {actual}.")
    if result.dtype != dtype:
        raise OptionError(f"{giver} must return {axes} of dtype {dtype}; got {result.dtype}.")


class Must(NamedTuple):
    """What a field must be beside its type, in an annotation: `Annotated[float, Must(...)]`.

    Attributes:
        words: The rest of the sentence "the field must ...", for errors and `--help`.
        holds: Whether it holds for a value of the type.
        advice: A sentence to add to errors.
    """

    words: str
    holds: Callable[[Any], bool]
    advice: str = ""

    def __repr__(self) -> str:
        return self.words


Size = Annotated[
    int,
    Must("be positive", lambda size: size > 0),
    Must(f"be at most {INT32_MAX}", lambda size: size <= INT32_MAX),
]
Count = Annotated[int, Must("be at least 0", lambda count: count >= 0)]
Positive = Annotated[float, Must("be positive", lambda number: number > 0)]
NotNegative = Annotated[float, Must("be at least 0", lambda number: number >= 0)]
AboveOne = Annotated[float, Must("be above 1", lambda number: number > 1)]
AtLeastOne = Annotated[float, Must("be at least 1", lambda number: number >= 1)]
Rate = Annotated[float, Must("be in [0, 1)", lambda rate: 0 <= rate < 1)]
Fraction = Annotated[float, Must("be in (0, 1]", lambda fraction: 0 < fraction <= 1)]
Share = Annotated[float, Must("be in [0, 1]", lambda share: 0 <= share <= 1)]
NOT_EMPTY = Must("have at least one entry", lambda entries: entries != ())
Cycle = Annotated[tuple[T, ...], NOT_EMPTY]  # over the layers
Distinct = Annotated[
    tuple[T, ...], Must("not repeat an entry", lambda entries: len(set(entries)) == len(entries))
]


class Checked:
    """Base of options: their fields are checked against their annotations."""

    def __post_init__(self) -> None:
        """Check every field; subclasses add checks of several fields after this."""
        check_fields(self)


class AtPath:
    """Base of options with a `path`, in which ~ is the home folder."""

    def __post_init__(self) -> None:
        """Replace ~."""
        object.__setattr__(self, "path", os.path.expanduser(vars(self)["path"]))


class Coerced(NamedTuple):
    """A field's value after coercion to its annotation."""

    value: Any


def check_fields(config: Any) -> None:
    """Check and coerce every field of a frozen dataclass by its annotation.

    A bool is not accepted as an int, and a float must be finite in float32. NumPy numbers become
    Python numbers, which hash, print and serialise to JSON alike; an int becomes a float where the
    annotation is float, and a string a path, whose ~ is the home folder.

    Args:
        config: The dataclass instance.

    Raises:
        ValueError: A field does not match its annotation; the message names the class, the field,
            the value and the expected type.
    """
    for name, hint in field_types(config.__class__).items():
        value = getattr(config, name)
        coerced = _coerce(hint, value)
        if coerced is None:
            path, expected, actual = _find_mismatch(f"{type(config).__name__}.{name}", hint, value)
            raise ValueError(f"{path} must be {expected}; got {shown(actual)}.")
        if coerced.value is not value:
            object.__setattr__(config, name, coerced.value)
    for name, hint in restricted_fields(config.__class__).items():
        _check_range(f"{type(config).__name__}.{name}", hint, getattr(config, name))


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Require an integer of at least `least` and at most `most`."""
    is_integer = isinstance(value, numbers.Integral)
    if not is_integer or value < least or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        shown = int(value) if is_integer else repr(value)
        raise ValueError(f"{name} must be an integer {bound}; got {shown}.")


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass's init fields, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


@functools.cache
def restricted_fields(kind: type) -> dict[str, Any]:
    """Return the annotations that have a `Must`, by the name of the dataclass's init field."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in field_types(kind) if restrictions(hints[name])}


def restrictions(hint: Any) -> list[Must]:
    """Return every `Must` in an annotation."""
    if isinstance(hint, Must):
        return [hint]
    return [must for part in get_args(hint) for must in restrictions(part)]


def _check_range(path: str, hint: Any, value: Any) -> None:
    """Raise a ValueError unless every `Must` of the annotation holds for a value of its type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        _check_range(path, next(x for x in args if _coerce(x, value) is not None), value)
    elif origin is tuple:
        hints = args[:1] * len(value) if args[1:] == (...,) else args
        for index, item in enumerate(value):
            _check_range(f"{path}[{index}]", hints[index], item)
    elif origin is Annotated:
        for must in (x for x in args[1:] if isinstance(x, Must)):
            if not must.holds(value):
                advice = f" {must.advice}" if must.advice else ""
                raise ValueError(f"{path} must {must.words}; got {shown(value)}.{advice}")
        _check_range(path, args[0], value)


def _coerce(hint: Any, value: Any) -> Coerced | None:
    """Return the value coerced to the annotation, or None if it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return Coerced(value)
    if origin is Annotated:
        return _coerce(args[0], value)
    if origin in (Union, types.UnionType):
        candidates = (_coerce(option, value) for option in args)
        return next((coerced for coerced in candidates if coerced is not None), None)
    if origin is Literal:
        matches = [word for word in args if type(word) is type(value) and word == value]
        return Coerced(matches[0]) if matches else None
    if origin is tuple:
        return _coerce_tuple(args, value)
    if hint in (int, float, bool):
        return _coerce_number(hint, value)
    if hint is Path and isinstance(value, str | Path) and value != "":
        expanded = Path(os.path.expanduser(value))
        return Coerced(value if expanded == value else expanded)
    if hint is str and isinstance(value, Path):
        return Coerced(os.path.expanduser(value))
    kind: Any = type(None) if hint is None else origin or hint
    if isinstance(value, str | Path) and "path" in getattr(kind, "__dataclass_fields__", ()):
        return Coerced(kind(path=str(value)))  # a file or folder for the option that reads it
    return Coerced(value) if isinstance(value, kind) else None


def _coerce_tuple(args: tuple, value: Any) -> Coerced | None:
    if not isinstance(value, tuple):
        return None
    hints = args[:1] * len(value) if args[1:] == (...,) else args
    if len(hints) != len(value):
        return None
    items = [_coerce(hint, item) for hint, item in zip(hints, value, strict=True)]
    if any(item is None for item in items):
        return None
    coerced = tuple(item.value for item in items if item is not None)
    is_unchanged = all(new is old for new, old in zip(coerced, value, strict=True))
    return Coerced(value if is_unchanged else coerced)


def _coerce_number(kind: type, value: Any) -> Coerced | None:
    is_bool = isinstance(value, bool | np.bool_)
    if kind is bool or is_bool:
        return Coerced(bool(value)) if kind is bool and is_bool else None
    if isinstance(value, numbers.Integral):
        integer = int(value)
        if kind is int:
            return Coerced(integer)
        return Coerced(float(integer)) if abs(integer) <= FLOAT32_MAX else None
    if kind is int or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return Coerced(number) if abs(number) <= FLOAT32_MAX else None  # None for NaN too


def _find_mismatch(path: str, hint: Any, value: Any) -> tuple[str, str, Any]:
    """Return the path, expected type and value of the first mismatch inside a field."""
    if isinstance(value, tuple):
        options = [hint, *get_args(hint)]
        for item_hint in (get_args(o)[0] for o in options if get_args(o)[1:] == (...,)):
            for index, item in enumerate(value):
                if _coerce(item_hint, item) is None:
                    return _find_mismatch(f"{path}[{index}]", item_hint, item)
    return path, _describe_type(hint), value


def _describe_type(hint: Any) -> str:
    """Describe an annotation in words, for error messages."""
    origin, args = get_origin(hint), get_args(hint)
    words = {
        int: "an integer",
        float: "a finite float32 number",
        bool: "True or False",
        str: "a string",
    }
    words[type(None)] = "None"
    if origin in (Union, types.UnionType):
        return " or ".join(_describe_type(option) for option in args)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is tuple:
        return f"a tuple, each entry {_describe_type(args[0])}"
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def shown(value: Any) -> str:
    """Return the repr of a value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[: MAX_REPR_LENGTH - 3]}..."
