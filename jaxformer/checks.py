"""Validate configuration dataclasses: fields against annotations, then common constraints."""

import contextlib
import dataclasses
import functools
import numbers
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)  # models compute in float32
INT32_MAX = 2**31 - 1  # sizes and positions are int32
MAX_REPR_LENGTH = 100  # characters of a value in an error message


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


class Coerced(NamedTuple):
    """A field's value after coercion to its annotation."""

    value: Any


def check_fields(config: Any) -> None:
    """Check and coerce every field of a frozen dataclass by its annotation.

    A bool is not accepted as an int, and a float must be finite in float32. NumPy numbers become
    Python numbers, which hash, print and serialise to JSON alike; an int becomes a float where the
    annotation is float.

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


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive(config: Any, *names: str) -> None:
    """Require that the named fields are above 0 and sizes fit int32; None is allowed."""
    for name in names:
        value = getattr(config, name)
        require(
            value is None or value > 0,
            f"{type(config).__name__}.{name} must be positive; got {value}.",
        )
        require(
            type(value) is not int or value <= INT32_MAX,
            f"{type(config).__name__}.{name} must be at most {INT32_MAX}; got {value}.",
        )


def require_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Require an integer of at least `least` and at most `most`."""
    is_integer = isinstance(value, numbers.Integral)
    if not is_integer or value < least or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"in [{least}, {most}]"
        shown = int(value) if is_integer else repr(value)
        raise ValueError(f"{name} must be an integer {bound}; got {shown}.")


def require_at_least(config: Any, least: int, *names: str) -> None:
    """Require that the named fields are at least `least`; None is allowed."""
    bound = f"be at least {least}" if least else "not be negative"
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, f"{name} must {bound}; got {value}.")


def require_nonempty(config: Any, *names: str) -> None:
    """Require that the named per-layer tuples have at least one entry."""
    for name in names:
        value = getattr(config, name)
        require(
            len(value) > 0,
            f"{type(config).__name__}.{name} is cycled over the layers, so it needs at least one "
            f"entry; got {value!r}.",
        )


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass's init fields, by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _coerce(hint: Any, value: Any) -> Coerced | None:
    """Return the value coerced to the annotation, or None if it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return Coerced(value)
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
    kind = type(None) if hint is None else origin or hint
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
