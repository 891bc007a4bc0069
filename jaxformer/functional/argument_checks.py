"""`typechecked`: check and convert array arguments of public functions by their annotations.

`typechecked` reads the annotations once per function and checks dtypes, shapes and types at each
call. It reads no values, so it works on tracers and costs some microseconds.
"""

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array

from jaxformer.functional.shape_annotations import (
    ArgumentError,
    AxesSpec,
    check_axes,
    parse_dim_str,
)

P = ParamSpec("P")
R = TypeVar("R")

# Kinds of dtypes that each annotation accepts, and their description; others are not checked.
ACCEPTED_DTYPES = {
    "Shaped": ({"boolean", "signed", "unsigned", "float", "complex", "other"}, "any"),
    "Bool": ({"boolean"}, "boolean"),
    "Int": ({"signed"}, "a signed integer"),
    "Integer": ({"signed", "unsigned"}, "an integer"),
    "Float": ({"float"}, "a float"),
    "Float32": ({"float"}, "a float"),
    "Real": ({"signed", "unsigned", "float"}, "a real number"),
    "Inexact": ({"float", "complex"}, "a float or complex"),
    "Complex": ({"complex"}, "complex"),
    "Complex64": ({"complex"}, "complex"),
}


def typechecked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: check and convert arguments by their annotations at every call.

    For each argument that is annotated as an array, and each such field of a NamedTuple,

    - a list, a number or a NumPy array becomes a JAX array;
    - narrower and unsigned integers become int32 (int64 if JAX has enabled it), so that differences
      and products do not wrap around; values above its maximum are clipped to it;
    - a dtype or a number of axes other than annotated is an error;
    - two sizes for one axis letter in the arguments of a call are an error.

    An argument that is annotated as `int` or `float` must be such a number; NumPy numbers become
    Python numbers, and tracers pass unchanged. An argument that is annotated as a `Literal` must be
    one of its words.

    Args:
        function: A function with jaxtyping annotations.

    Returns:
        The function with these checks.

    Raises:
        ValueError: An argument of a call does not match; the message names argument, axis and
            sizes.
    """
    specs = _argument_specs(function)
    positional_specs = [specs.get(name) for name in inspect.signature(function).parameters]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        memo: dict[str, Any] = {}
        try:
            call_args = list(args)
            for i, (value, spec) in enumerate(zip(args, positional_specs, strict=False)):
                if spec is not None:
                    call_args[i] = spec.convert(value, memo)
            for name in kwargs:
                if (spec := specs.get(name)) is not None:
                    kwargs[name] = spec.convert(kwargs[name], memo)
        except ArgumentError as refused:
            name = function.__qualname__.removesuffix(".__call__")
            raise ValueError(f"{name}: {refused}.") from None
        return function(*call_args, **kwargs)  # type: ignore[arg-type]

    return call


def _argument_specs(function: Callable[..., Any]) -> "dict[str, _Spec]":
    """Return the spec of each argument whose annotation is checked."""
    parameters = inspect.signature(function).parameters
    specs = {name: _read_annotation(name, x.annotation) for name, x in parameters.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def _read_annotation(name: str, annotation: Any) -> "_Spec | None":
    origin = get_origin(annotation)
    if origin is Literal:
        return _WordSpec(name, get_args(annotation))
    union = get_args(annotation) if origin in (Union, UnionType) else (annotation,)
    members = tuple(m for m in union if isinstance(m, type) and get_origin(m) is None)
    arrays = [m for m in members if issubclass(m, jaxtyping.AbstractArray)]
    tuples = {m: _tuple_field_specs(name, m) for m in members if hasattr(m, "_fields")}
    other_types = tuple(m for m in members if m not in arrays and m not in tuples)
    if len(arrays) == 1 and (dtype := arrays[0].dtype.__name__) in ACCEPTED_DTYPES:
        dim_str = arrays[0].dim_str
        return _ArraySpec(name, dtype, parse_dim_str(dim_str), dim_str, other_types, tuples)
    if tuples and not arrays:
        known = len(members) == len(union)
        return _TupleSpec(name, tuples, (*tuples, *other_types) if known else (object,))
    numbers = [kind for kind in members if kind in (int, float)]
    if len(numbers) == 1 and set(union) <= {*numbers, type(None)}:
        return _NumberSpec(name, numbers[0], type(None) in union)
    return None


class _WordSpec(NamedTuple):
    """Spec of an argument that is one of some words."""

    name: str
    words: tuple[Any, ...]

    def convert(self, value: Any, memo: dict[str, Any]) -> Any:
        """Return the word."""
        if value not in self.words:
            raise ArgumentError(f"{self.name} must be one of {self.words}; got {value!r}")
        return value


class _NumberSpec(NamedTuple):
    """Spec of a number argument."""

    name: str
    kind: type  # int or float
    optional: bool  # whether None is allowed

    def convert(self, value: Any, memo: dict[str, Any]) -> Any:
        """Return the number as a Python number; traced values pass unchanged."""
        if isinstance(value, jax.Array) or (value is None and self.optional):
            return value
        if isinstance(value, np.generic):
            value = value.item()
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer and not (self.kind is float and isinstance(value, float)):
            a = "an integer" if self.kind is int else "a number"
            raise ArgumentError(f"{self.name} must be {a}; got {value!r:.60}")
        return value


def _tuple_field_specs(name: str, kind: Any) -> "dict[str, _ArraySpec]":
    """Return the specs of a NamedTuple's array fields; their axes are not compared."""
    specs = {}
    for field, annotation in kind.__annotations__.items():
        spec = _read_annotation(f"{name}.{field}", annotation)
        if isinstance(spec, _ArraySpec):
            specs[field] = spec._replace(axes=parse_dim_str("..."))
    return specs


class _TupleSpec(NamedTuple):
    """Spec of a NamedTuple argument."""

    name: str
    fields_by_type: dict[Any, "dict[str, _ArraySpec]"]
    kinds: tuple[Any, ...]  # all accepted types, including these tuples

    def convert(self, value: Any, memo: dict[str, Any]) -> Any:
        """Return the tuple with its array fields checked and converted."""
        if not isinstance(value, self.kinds):
            wanted = " or ".join(kind.__name__ for kind in self.fields_by_type)
            raise ArgumentError(f"{self.name} must be a {wanted}; got {type(value).__name__}")
        fields = self.fields_by_type.get(type(value), {})
        new = {field: spec.convert(getattr(value, field), {}) for field, spec in fields.items()}
        return value._replace(**new) if new else value


class _ArraySpec(NamedTuple):
    """Spec of an array argument."""

    name: str
    dtype: str  # in jaxtyping's name
    axes: AxesSpec
    dim_str: str
    other_types: tuple[type, ...]  # accepted types besides arrays
    tuple_specs: dict[Any, "dict[str, _ArraySpec]"]  # accepted NamedTuples

    def convert(self, value: Any, memo: dict[str, Any]) -> Any:
        """Return the array, checked and converted; bind its axis sizes in `memo`."""
        if not isinstance(value, jax.Array):
            if isinstance(value, self.other_types):
                return value
            if type(value) in self.tuple_specs:
                return _TupleSpec(self.name, self.tuple_specs, (object,)).convert(value, memo)
            if isinstance(value, np.generic) and float in self.other_types:
                return value.item()
            value = _as_array(self, value)
        kind = _dtype_kind(value.dtype)
        if kind not in ACCEPTED_DTYPES[self.dtype][0]:
            raise _dtype_error(self, value, kind)
        if kind in ("signed", "unsigned"):
            value = _widen_integers(value, kind)
        check_axes(self.name, self.axes, self.dim_str, value.shape, memo)
        return value


_Spec = _ArraySpec | _TupleSpec | _NumberSpec | _WordSpec


def _as_array(spec: _ArraySpec, value: Any) -> Array:
    """Convert a list, a number or a foreign array to a JAX array."""
    if value is None or isinstance(value, str | bytes | dict | set):
        raise ArgumentError(f"{spec.name} is {value!r:.40}, not an array")
    try:
        if isinstance(value, np.ndarray | np.generic):
            _check_integer_range(spec, np.asarray(value))
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        message = f"{spec.name}: cannot convert {type(value).__name__} to an array: {reason}"
        raise ArgumentError(message[:300]) from None
    if not isinstance(value, list | tuple | int):
        return array
    kinds, _ = ACCEPTED_DTYPES[spec.dtype]  # Python numbers have no dtype: [1, 2] may be floats
    if "float" in kinds and "signed" not in kinds and _dtype_kind(array.dtype) == "signed":
        return array.astype(jnp.float32)
    if array.size == 0 and _dtype_kind(array.dtype) not in kinds:
        return array.astype(bool if kinds == {"boolean"} else jnp.int32)
    return array


def _check_integer_range(spec: _ArraySpec, host: np.ndarray) -> None:
    """Check that NumPy integers fit JAX's widest integer dtype."""
    if host.dtype.kind not in "iu" or host.size == 0:
        return
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    for extreme in (host.min(), host.max()):
        if not limits.min <= int(extreme) <= limits.max:
            end = f"{limits.dtype}, which ends at {limits.max}"
            raise ArgumentError(f"{spec.name} holds {extreme}, outside of {end}")


@functools.cache
def _dtype_kind(dtype: Any) -> str:
    kinds = {
        "boolean": jnp.bool_,
        "signed": jnp.signedinteger,
        "unsigned": jnp.unsignedinteger,
        "float": jnp.floating,
        "complex": jnp.complexfloating,
    }
    return next((name for name, of in kinds.items() if jnp.issubdtype(dtype, of)), "other")


def _widen_integers(value: Array, kind: str) -> Array:
    """Convert integers to signed 32 bits or wider; too large unsigned values are clipped."""
    bits = jnp.iinfo(value.dtype).bits
    if kind == "signed" and bits >= 32:
        return value
    wide = jnp.dtype(jnp.int32) if bits < 32 else jax.dtypes.canonicalize_dtype(np.int64)
    if kind == "unsigned" and bits >= jnp.iinfo(wide).bits:
        value = jnp.minimum(value, jnp.asarray(jnp.iinfo(wide).max, value.dtype))
    return value.astype(wide)


def _dtype_error(spec: _ArraySpec, value: Array, kind: str) -> ArgumentError:
    """Return the error for a wrong dtype, with advice if there is any."""
    name, advice = spec.name, ""
    match spec.dtype, kind:
        case "Bool", "float":
            advice = f". If it is an additive mask, with 0 for allowed keys, use {name} == 0"
        case "Bool", "signed" | "unsigned":
            advice = f". If it is made of ones and zeros, use {name} != 0"
        case "Int", "unsigned":
            advice = ". Unsigned differences wrap below zero; convert to int32 before subtracting"
        case "Float" | "Float32", "signed" | "unsigned" | "boolean":
            advice = f". Use {name}.astype(jnp.float32)"
    _, description = ACCEPTED_DTYPES[spec.dtype]
    return ArgumentError(f"{name} is {value.dtype}, but must be {description}{advice}")
