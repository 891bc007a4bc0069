"""What public functions take: arrays of the right kind whose axes agree, or an error in words.

Annotations say it, and `checked` reads them: once for a function, then at each of its calls. Only
kinds, shapes and types are looked at, so it works on tracers and costs some microseconds.
"""

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxformer.functional.annotated_axes import Axes, Refused, meet, read_axes

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
    """Decorator: check and convert arguments by their annotations at every call.

    Each argument that is annotated as an array, and each such field of a NamedTuple,

    - becomes an array, if it is a list, a number or an array of NumPy;
    - becomes int32, if it holds narrower or unsigned integers (int64, where JAX has those), so that
      neither differences nor products of them wrap; what int32 does not hold becomes its largest;
    - is refused, if its kind or its number of axes is another than annotated;
    - is refused, if one of its axes disagrees with that of the same letter in another argument.

    Each that is annotated as `int` or `float` must be such a number; numbers of NumPy become
    Python's, and what is traced is left alone.

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
        except Refused as refused:
            name = function.__qualname__.removesuffix(".__call__")
            raise ValueError(f"{name}: {refused}.") from None
        return function(*given, **kwargs)  # type: ignore[arg-type]

    return call


def _wanted(function: Callable[..., Any]) -> "dict[str, _Wanted | _Fields | _Number]":
    """Return the spec of each argument that is annotated as an array, NamedTuple or number."""
    found: dict[str, _Wanted | _Fields | _Number] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if (want := _read(name, parameter.annotation)) is not None:
            found[name] = want
    return found


def _read(name: str, annotation: Any) -> "_Wanted | _Fields | _Number | None":
    origin = get_origin(annotation)
    members = get_args(annotation) if origin in (Union, UnionType) else (annotation,)
    members = tuple(m for m in members if isinstance(m, type) and get_origin(m) is None)
    arrays = [m for m in members if issubclass(m, jaxtyping.AbstractArray)]
    tuples = {m: _fields(name, m) for m in members if hasattr(m, "_fields")}
    others = tuple(m for m in members if m not in arrays and m not in tuples)
    if len(arrays) == 1 and arrays[0].dtype.__name__ in TAKES:
        axes = read_axes(arrays[0].dim_str)
        return _Wanted(name, arrays[0].dtype.__name__, axes, arrays[0].dim_str, others, tuples)
    if tuples and not arrays:
        known = len(members) == len(get_args(annotation) or (annotation,))
        return _Fields(name, tuples, (*tuples, *others) if known else (object,))
    numbers = [kind for kind in members if kind in (int, float)]
    rest = get_args(annotation) if origin in (Union, UnionType) else (annotation,)
    if len(numbers) == 1 and set(rest) <= {*numbers, type(None)}:
        return _Number(name, numbers[0], type(None) in rest)
    return None


class _Number(NamedTuple):
    """Spec of a number argument."""

    name: str
    kind: type  # int or float
    optional: bool  # whether None may stand in its place

    def take(self, given: Any, seen: dict[str, Any]) -> Any:
        """Return the number as a Python number; traced values pass unchanged."""
        if isinstance(given, jax.Array) or (given is None and self.optional):
            return given
        if isinstance(given, np.generic):
            given = given.item()
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole and not (self.kind is float and isinstance(given, float)):
            a = "a whole number" if self.kind is int else "a number"
            raise Refused(f"{self.name} must be {a}; got {given!r:.60}")
        return given


def _fields(name: str, kind: Any) -> "dict[str, _Wanted]":
    """Return the specs of a NamedTuple's array fields; their axes are not compared."""
    found = {}
    for field, annotation in kind.__annotations__.items():
        want = _read(f"{name}.{field}", annotation)
        if isinstance(want, _Wanted):
            found[field] = want._replace(axes=read_axes("..."))
    return found


class _Fields(NamedTuple):
    """Spec of a NamedTuple argument."""

    name: str
    of: dict[Any, "dict[str, _Wanted]"]
    kinds: tuple[Any, ...]  # what may be given, these tuples among them

    def take(self, given: Any, seen: dict[str, Any]) -> Any:
        """Return the tuple with its array fields checked and converted."""
        if not isinstance(given, self.kinds):
            wanted = " or ".join(kind.__name__ for kind in self.of)
            raise Refused(f"{self.name} must be a {wanted}; got {type(given).__name__}")
        fields = self.of.get(type(given), {})
        new = {field: want.take(getattr(given, field), {}) for field, want in fields.items()}
        return given._replace(**new) if new else given


class _Wanted(NamedTuple):
    """Spec of an array argument."""

    name: str
    dtype: str  # as jaxtyping calls it
    axes: Axes
    written: str
    others: tuple[type, ...]  # what may be given in its place
    tuples: dict[Any, "dict[str, _Wanted]"]  # or one of these

    def take(self, given: Any, seen: dict[str, Any]) -> Any:
        """The array, converted; its axes are added to those seen."""
        if not isinstance(given, jax.Array):
            if isinstance(given, self.others):
                return given
            if type(given) in self.tuples:
                return _Fields(self.name, self.tuples, (object,)).take(given, seen)
            if isinstance(given, np.generic) and float in self.others:
                return given.item()
            given = _as_array(self, given)
        kind = _kind(given.dtype)
        if kind not in TAKES[self.dtype]:
            raise _wrong_kind(self, given, kind)
        if kind in ("signed", "unsigned"):
            given = _widened(given, kind)
        meet(self.name, self.axes, self.written, given.shape, seen)
        return given


def _as_array(want: _Wanted, given: Any) -> Array:
    """Convert a list, a number or a foreign array to a JAX array."""
    if given is None or isinstance(given, str | bytes | dict | set):
        raise Refused(f"{want.name} is {given!r:.40}, not an array")
    try:
        if isinstance(given, np.ndarray | np.generic):
            _check_range(want, np.asarray(given))
        array = jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        kind = type(given).__name__
        raise Refused(f"{want.name}, a {kind}, makes no array: {reason}"[:300]) from None
    if isinstance(given, np.ndarray | np.generic) or not isinstance(given, list | tuple | int):
        return array
    kinds = TAKES[want.dtype]  # Python's numbers have no dtype: [1, 2] may stand for floats
    if "float" in kinds and "signed" not in kinds and _kind(array.dtype) == "signed":
        return array.astype(jnp.float32)
    if array.size == 0 and _kind(array.dtype) not in kinds:
        return array.astype(bool if kinds == {"boolean"} else jnp.int32)
    return array


def _check_range(want: _Wanted, host: np.ndarray) -> None:
    """Refuse NumPy integers that do not fit JAX's widest integer dtype."""
    if host.dtype.kind not in "iu" or host.size == 0:
        return
    most = jnp.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    for extreme in (host.min(), host.max()):
        if not most.min <= int(extreme) <= most.max:
            raise Refused(f"{want.name} holds {extreme}, and {most.dtype} ends at {most.max}")


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
    """Convert integers to signed 32 bits or wider; too large unsigned values are clipped."""
    bits = jnp.iinfo(given.dtype).bits
    if kind == "signed" and bits >= 32:
        return given
    wide = jnp.dtype(jnp.int32) if bits < 32 else jax.dtypes.canonicalize_dtype(np.int64)
    if kind == "unsigned" and bits >= jnp.iinfo(wide).bits:
        given = jnp.minimum(given, jnp.asarray(jnp.iinfo(wide).max, given.dtype))
    return given.astype(wide)


def _wrong_kind(want: _Wanted, given: Array, kind: str) -> Refused:
    """Return the error for a wrong dtype, with advice where there is any."""
    name, more = want.name, ""
    match want.dtype, kind:
        case "Bool", "float":
            more = f". If it was made to be added to scores, 0 where it allows, use {name} == 0"
        case "Bool", "signed" | "unsigned":
            more = f". If it is made of ones and zeros, use {name} != 0"
        case "Int", "unsigned":
            more = ". Below zero it has wrapped; convert to int32 before subtracting"
        case "Float" | "Float32", "signed" | "unsigned" | "boolean":
            more = f". Use {name}.astype(jnp.float32)"
    wanted = CALLED[want.dtype]
    return Refused(f"{name} is {given.dtype}, and must be {wanted}{more}")
