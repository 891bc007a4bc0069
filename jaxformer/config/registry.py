"""`Option`: base class and name registry of extensible options."""

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import jax

from jaxformer.checks import Checked, LeftOutError, OptionError, named_errors, shown
from jaxformer.config.parameter import check_parameters

OPTION_REGISTRY: dict[str, type["Option"]] = {}
OptionT = TypeVar("OptionT")


class Option(Checked):
    """An extensible option: a frozen dataclass, registered by name when its module is imported.

    A protocol, such as `ScoreBias`, is a subclass that declares the methods of its options. An
    option that is defined again in the same module or notebook replaces the earlier one. Results of
    its methods are checked, and an exception in one becomes the cause of an `OptionError` that
    names option and method.

    Raises:
        ValueError: Another module has registered this name, or the class is no frozen dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]  # set by @dataclass

    def __init_subclass__(cls, *, protocol: bool = False) -> None:
        super().__init_subclass__()
        if protocol:
            return
        registered = OPTION_REGISTRY.get(cls.__name__, cls)
        if registered.__module__ != cls.__module__:
            raise ValueError(
                f"{registered.__module__} has already registered an option {cls.__name__}; choose "
                "another name."
            )
        OPTION_REGISTRY[cls.__name__] = cls
        for name in CHECKS:
            home = next((base for base in cls.__mro__ if name in vars(base)), None)
            if home is cls or (home is not None and not issubclass(home, Option)):
                setattr(cls, name, _checked_method(name, vars(home)[name]))

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Create an instance; a class that is no frozen dataclass is an error."""
        dataclass_params = vars(cls).get("__dataclass_params__")
        if dataclass_params is None or not dataclass_params.frozen:
            raise ValueError(
                f"{cls.__name__} must be a frozen dataclass: decorate it with "
                "@dataclass(frozen=True, kw_only=True)."
            )
        return super().__new__(cls)

    def tiny(self: OptionT) -> OptionT:
        """Return the option at test size, for `TransformerConfig.tiny`."""
        return self


def _check_flops(giver: str, flops: Any, *_: Any) -> None:
    """Check that a number of FLOPs is finite and not negative."""
    number = isinstance(flops, numbers.Real) and not isinstance(flops, bool)
    if not number or not 0 <= flops < math.inf:
        raise OptionError(f"{giver} must return a finite number of at least 0; got {shown(flops)}.")


def _check_cache(giver: str, cache: Any, batch: Sequence[int] = (), *_: Any) -> None:
    """Check that all arrays of a cache have the batch axes and an axis of heads."""
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(cache)]
    rows = tuple(batch)
    if cache is None or any(x[: len(rows)] != rows or len(x) == len(rows) for x in shapes):
        raise OptionError(
            f"{giver} must return arrays [*batch, heads, ...] with *batch = {rows}; got "
            f"{', '.join(map(str, shapes)) or shown(cache)}."
        )


def _check_tiny(giver: str, tiny: Any, *_: Any) -> None:
    """Check that `tiny` returned an option."""
    if not isinstance(tiny, Option):
        raise OptionError(f"{giver} must return an option; got {shown(tiny)}.")


# Checks of the results of an option's methods. Results of `__call__` and `constants` must match
# other arrays, so their callers check them (`layers.custom_option`).
CHECKS: dict[str, Callable[..., None]] = {
    "parameters": check_parameters,
    "flops": _check_flops,
    "empty_cache": _check_cache,
    "tiny": _check_tiny,
    "constants": lambda *_: None,
    "__call__": lambda *_: None,
}


def _checked_method(name: str, raw: Any) -> Callable[..., Any]:
    """Return the method with checks of its result and errors that name the option."""

    @functools.wraps(raw)
    def method(self: Option, *args: Any, **kwargs: Any) -> Any:
        giver = f"{type(self).__name__}.{name}"
        bound = raw.__get__(self, type(self)) if hasattr(raw, "__get__") else raw
        with named_errors(giver):
            result = bound(*args, **kwargs)
        CHECKS[name](giver, result, *args)
        return result

    return method


def unimplemented_method(name: str, caller: str) -> Any:
    """Return a method that raises NotImplementedError and names the caller that needs it.

    Args:
        name: Name of the method.
        caller: The code that needs it, for the error message.

    Returns:
        The method.
    """

    def method(self: Option, *args: Any, **kwargs: Any) -> NoReturn:
        raise LeftOutError(f"{type(self).__name__} has no {name}(...), which {caller} needs.")

    return method


def allowed_types(hint: Any) -> tuple[Any, ...]:
    """Return the types an annotation allows; a protocol is replaced by its registered options.

    Args:
        hint: A type or a union of types.

    Returns:
        The types.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    allowed: list[Any] = []
    for kind in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        if (
            isinstance(kind, type)
            and issubclass(kind, Option)
            and not dataclasses.is_dataclass(kind)
        ):
            allowed += (option for option in OPTION_REGISTRY.values() if issubclass(option, kind))
        else:
            allowed.append(kind)
    return tuple(allowed)
