"""What public functions take: arrays of the right kind whose axes agree, or an error in words.

Annotations say it, and `checked` reads them: once for a function, then at each of its calls. Only
kinds, shapes and types are looked at, so it works on tracers and costs some microseconds.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxformer.shapes import AXES

P = ParamSpec("P")
R = TypeVar("R")

# Of an annotation, which kinds of numbers it takes; annotations of other dtypes are left alone.
TAKES = {
    "Shaped": {"boolean", "signed", "unsigned", "float", "complex", "other"},
    "Bool": {"boolean"},
    "Int": {"signed"},
    "Integer": {"signed", "unsigned"},
    "Float": {"float"},
    "Float32": {"float"},
    "Real": {"signed", "unsigned", "float"},
    "Inexact": {"float", "complex"},
    "Complex": {"complex"},
    "Complex64": {"complex"},
}
CALLED = {
    "Bool": "boolean",
    "Int": "a signed integer",
    "Integer": "an integer",
    "Float": "a float",
    "Float32": "a float",
    "Real": "a real number",
    "Inexact": "a float or complex",
    "Complex": "complex",
    "Complex64": "complex",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's annotations hold for everyone who calls it.

    Each argument that is annotated as an array, and each such field of a NamedTuple,

    - becomes an array, if it is a list, a number or an array of NumPy;
    - becomes int32, if it holds narrower or unsigned integers (int64, where JAX has those), so that
      neither differences nor products of them wrap; what int32 does not hold becomes its largest;
    - is refused, if its kind or its number of axes is another than annotated;
    - is refused, if one of its axes disagrees with that of the same letter in another argument.

    Args:
        function: Annotated with jaxtyping's types.

    Returns:
        The function with those checks in front.

    Raises:
        ValueError: At a call; names the argument, the axis and both numbers.
    """
    wanted = _wanted(function)
    names = list(inspect.signature(function).parameters)
    by_place = [wanted.get(name) for name in names]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        seen: dict[str, Any] = {}
        try:
            given = list(args)
            for i, (each, want) in enumerate(zip(args, by_place, strict=False)):
                if want is not None:
                    given[i] = want.take(each, seen)
            for name in kwargs:
                if (want := wanted.get(name)) is not None:
                    kwargs[name] = want.take(kwargs[name], seen)
        except _Refused as refused:
            reason = refused.told(function)
        else:
            return function(*given, **kwargs)  # type: ignore[arg-type]
        raise ValueError(reason)

    return call


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """An argument is not what it should be, and what its docstring says of it may help."""

    def __init__(self, reason: str, argument: str | None = None, more: str = ""):
        super().__init__(reason)
        self.reason, self.argument, self.more = reason, argument, more

    def told(self, function: Callable[..., Any]) -> str:
        """The error in full."""
        about = "" if self.argument is None else _first_sentence(function, self.argument)
        parts = [f"{function.__name__}: {self.reason}{about and f' ({about})'}.", self.more]
        return " ".join(part for part in parts if part)


def _first_sentence(function: Callable[..., Any], argument: str) -> str:
    """What a docstring says first of an argument."""
    text = inspect.getdoc(function) or ""
    found = re.search(rf"^ {{4}}{argument}: (.*?)[.:;](?:\s|$)", text, re.M | re.S)
    return " ".join(found[1].split()) if found else ""


def _wanted(function: Callable[..., Any]) -> "dict[str, _Wanted | _Fields]":
    """What is checked of each parameter; parameters without arrays have nothing."""
    found: dict[str, _Wanted | _Fields] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if (want := _read(name, parameter.annotation)) is not None:
            found[name] = want
    return found


def _read(name: str, annotation: Any) -> "_Wanted | _Fields | None":
    origin = get_origin(annotation)
    members = get_args(annotation) if origin in (Union, UnionType) else (annotation,)
    members = tuple(m for m in members if isinstance(m, type) and get_origin(m) is None)
    arrays = [m for m in members if issubclass(m, jaxtyping.AbstractArray)]
    tuples = [m for m in members if hasattr(m, "_fields")]
    others = tuple(m for m in members if m not in arrays and m not in tuples)
    fields = {kind: _fields(name, kind) for kind in tuples}
    if len(arrays) == 1 and arrays[0].dtype.__name__ in TAKES:
        axes = _axes(arrays[0].dim_str)
        return _Wanted(name, arrays[0].dtype.__name__, axes, arrays[0].dim_str, others, fields)
    return _Fields(fields) if tuples and not arrays else None


def _fields(name: str, kind: Any) -> "dict[str, _Wanted]":
    """The arrays of a NamedTuple; of their axes only it knows what goes with what."""
    found = {}
    for field, annotation in kind.__annotations__.items():
        want = _read(f"{name}.{field}", annotation)
        if isinstance(want, _Wanted):
            found[field] = want._replace(axes=_axes("..."))
    return found


class _Axes(NamedTuple):
    """What an annotation says of axes. Sums of letters, as in results, are left alone."""

    named: tuple[tuple[str, int], ...]  # letters and their places; from the end behind any number
    any_number: str | None  # "...", "*batch", "*#batch", or None where there are none
    before: int  # how many stand before those, and how many behind
    behind: int


def _axes(dim_str: str) -> _Axes:
    letters = dim_str.split()
    many = [i for i, letter in enumerate(letters) if letter == "..." or letter.startswith("*")]
    before = many[0] if many else len(letters)
    behind = len(letters) - before - len(many)
    places = [*range(before), *range(-behind, 0)]
    named = tuple((letters[i], i) for i in places if letters[i].isidentifier())
    return _Axes(named, letters[before] if many else None, before, behind)


class _Fields(NamedTuple):
    """What is checked of a NamedTuple."""

    of: dict[Any, "dict[str, _Wanted]"]

    def take(self, given: Any, seen: dict[str, Any]) -> Any:
        """The tuple with its fields converted."""
        fields = self.of.get(type(given))
        return given if fields is None else _with_fields(given, fields)


def _with_fields(given: Any, fields: "dict[str, _Wanted]") -> Any:
    new = {}
    for field, want in fields.items():
        old = getattr(given, field)
        if (taken := want.take(old, {})) is not old:
            new[field] = taken
    return given._replace(**new) if new else given


class _Wanted(NamedTuple):
    """What is checked of an array."""

    name: str
    dtype: str  # as jaxtyping calls it
    axes: _Axes
    written: str
    others: tuple[type, ...]  # what may be given in its place
    tuples: dict[Any, "dict[str, _Wanted]"]

    def take(self, given: Any, seen: dict[str, Any]) -> Any:
        """The array, converted; its axes are added to those seen."""
        if not isinstance(given, jax.Array):
            if isinstance(given, self.others):
                return given
            if (fields := self.tuples.get(type(given))) is not None:
                return _with_fields(given, fields)
            if isinstance(given, np.generic) and float in self.others:
                return given.item()
            given = _as_array(self, given)
        kind = _kind(given.dtype)
        if kind not in TAKES[self.dtype]:
            raise _wrong_kind(self, given, kind)
        if kind in ("signed", "unsigned"):
            given = _widened(given, kind)
        _meet(self, given.shape, seen)
        return given


def _as_array(want: _Wanted, given: Any) -> Array:
    """An array of JAX from a list, a number, or an array of another library."""
    if given is None or isinstance(given, str | bytes | dict | set):
        raise _Refused(f"{want.name} is {given!r:.40}, not an array", want.name)
    try:
        if isinstance(given, np.ndarray | np.generic):
            _check_range(want, np.asarray(given))
        array = jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        kind = type(given).__name__
        raise _Refused(f"{want.name}, a {kind}, makes no array: {reason}"[:300]) from None
    if isinstance(given, np.ndarray | np.generic) or not isinstance(given, list | tuple | int):
        return array
    kinds = TAKES[want.dtype]  # Python's numbers have no dtype: [1, 2] may stand for floats
    if "float" in kinds and "signed" not in kinds and _kind(array.dtype) == "signed":
        return array.astype(jnp.float32)
    if array.size == 0 and _kind(array.dtype) not in kinds:
        return array.astype(bool if kinds == {"boolean"} else jnp.int32)
    return array


def _check_range(want: _Wanted, host: np.ndarray) -> None:
    """Refuse integers of NumPy that JAX would cut down to 32 bits."""
    if host.dtype.kind not in "iu" or host.size == 0:
        return
    most = jnp.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    for extreme in (host.min(), host.max()):
        if not most.min <= int(extreme) <= most.max:
            raise _Refused(f"{want.name} holds {extreme}, and {most.dtype} ends at {most.max}")


@functools.cache
def _kind(dtype: Any) -> str:
    kinds = {
        "boolean": jnp.bool_,
        "signed": jnp.signedinteger,
        "unsigned": jnp.unsignedinteger,
        "float": jnp.floating,
        "complex": jnp.complexfloating,
    }
    return next((name for name, of in kinds.items() if jnp.issubdtype(dtype, of)), "other")


def _widened(given: Array, kind: str) -> Array:
    """Signed integers of 32 bits or more; those that are so already as they are."""
    bits = jnp.iinfo(given.dtype).bits
    if kind == "signed" and bits >= 32:
        return given
    wide = jnp.dtype(jnp.int32) if bits < 32 else jax.dtypes.canonicalize_dtype(np.int64)
    if kind == "unsigned" and bits >= jnp.iinfo(wide).bits:
        given = jnp.minimum(given, jnp.asarray(jnp.iinfo(wide).max, given.dtype))
    return given.astype(wide)


def _wrong_kind(want: _Wanted, given: Array, kind: str) -> _Refused:
    """What to do instead, where that can be told."""
    name, more = want.name, ""
    match want.dtype, kind:
        case "Bool", "float":
            more = f"If it was made to be added to scores, 0 where it allows, use {name} == 0."
        case "Bool", "signed" | "unsigned":
            more = f"If it is made of ones and zeros, use {name} != 0."
        case "Int", "unsigned":
            more = "Below zero it has wrapped; convert to int32 before subtracting."
        case "Float" | "Float32", "signed" | "unsigned" | "boolean":
            more = f"Use {name}.astype(jnp.float32)."
    wanted = CALLED[want.dtype]
    return _Refused(f"{name} is {given.dtype}, and must be {wanted}", name.split(".")[0], more)


def _meet(want: _Wanted, shape: tuple[int, ...], seen: dict[str, Any]) -> None:
    """Compare axes with those of the same letters, and remember them."""
    named, any_number, before, behind = want.axes
    count, least = len(shape), before + behind
    if count < least or (any_number is None and count > least):
        at_least = "" if any_number is None else "at least "
        raise _Refused(
            f"{want.name} has {count} {'axis' if count == 1 else 'axes'}, shape {shape}, and must "
            f"have {at_least}{least}: [{', '.join(want.written.split())}]",
            want.name,
        )
    for letter, axis in named:
        known = seen.get(letter)
        if known is None:
            seen[letter] = want.name, shape, axis
        elif known[1][known[2]] != shape[axis]:
            raise _Refused(disagreement(letter, (want.name, shape, axis), known))
    if any_number is not None and any_number != "...":
        _agree_on_many(want.name, shape, shape[before : count - behind], any_number, seen)


def disagreement(letter: str, one: Any, other: Any) -> str:
    """Two arguments, each with its name, shape and axis, that differ in what one letter counts."""
    (name, shape, axis), (known, known_shape, known_axis) = one, other
    word = f"{AXES[letter]} " if letter in AXES else ""
    size, known_size = f"{shape[axis]} {word}", f"{known_shape[known_axis]} "
    if not word:
        size, known_size = f"{letter} = {shape[axis]} ", f"{letter} = {known_shape[known_axis]} "
    return (
        f"{name} has {size}(axis {axis % len(shape)} of shape {shape}), but {known} has "
        f"{known_size}(axis {known_axis % len(known_shape)} of shape {known_shape})"
    )


def _agree_on_many(
    name: str, shape: tuple[int, ...], sizes: tuple[int, ...], letters: str, seen: dict[str, Any]
) -> None:
    """Axes of any number are equal, or broadcast where the annotation has a ``#``."""
    broadcasts = letters[1] == "#"
    key = letters[2:] if broadcasts else letters[1:]
    known, known_broadcasts, known_name, known_shape = seen.get(key, (None, True, name, shape))
    if known is None or sizes == known:
        seen[key] = sizes, known_broadcasts and broadcasts, known_name, known_shape
        return
    try:
        together = np.broadcast_shapes(sizes, known)
    except ValueError:
        together = None
    fits = (broadcasts or together == sizes) and (known_broadcasts or together == known)
    if together is None or not fits or not (broadcasts or known_broadcasts):
        how = "broadcast with" if broadcasts or known_broadcasts else "be"
        raise _Refused(
            f"{name} has {key} axes {sizes} (shape {shape}), which must {how} the {known} "
            f"of {known_name} (shape {known_shape})"
        )
    seen[key] = together, known_broadcasts and broadcasts, known_name, known_shape
