"""Options that are known by name: the library's own, and those of a person's own file."""

import dataclasses
import types
import typing
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from jaxformer.checks import check_fields

KNOWN: dict[str, type["Option"]] = {}
Own = TypeVar("Own")


class Option:
    """What is chosen: a frozen dataclass, which text finds by its name once its file is imported.

    A protocol, such as `ScoreBias`, is a class of options that says what they must be able to do.
    Defined once more in its own file or notebook, an option replaces the earlier one.

    Raises:
        ValueError: Another file's option has this name; it is no frozen dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]  # each option has them

    def __init_subclass__(cls, *, protocol: bool = False) -> None:
        super().__init_subclass__()
        if protocol:
            return
        other = KNOWN.get(cls.__name__, cls)
        if other.__module__ != cls.__module__:
            raise ValueError(
                f"{other.__module__} has an option {cls.__name__} already: this one needs another "
                "name."
            )
        KNOWN[cls.__name__] = cls

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """An instance, of a frozen dataclass alone."""
        chosen = vars(cls).get("__dataclass_params__")
        if chosen is None or not chosen.frozen:
            raise ValueError(
                f"{cls.__name__} is chosen and compared, so it is a frozen dataclass: write "
                "@dataclass(frozen=True, kw_only=True) above it."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Hold every field against its annotation; what more there is to check follows this."""
        check_fields(self)

    def small(self: Own) -> Own:
        """The option with small sizes, as `TransformerConfig.tiny` has them."""
        return self


class Parameter(NamedTuple):
    """What an option learns: a shape on all devices together, and what its axes count.

    Attributes:
        shape: Of the array.
        axes: A word for each axis, such as "features -> heads" (see `layers.parameters`).
        start: A number, a `config` initialiser, or a function of (key, shape, dtype). None draws a
            matrix by `FanIn`; vectors begin with zeros.
    """

    shape: tuple[int, ...]
    axes: str
    start: Any = None


def left_out(name: str, caller: str) -> Any:
    """A method that an option may lack: whoever calls it then is told so.

    Args:
        name: Of the method.
        caller: Who asks for it.

    Returns:
        The method.
    """

    def method(self: Option, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} has no {name}(...), which {caller} asks for."
        )

    return method


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """What may stand where an annotation is: for a protocol, every option of it that is imported.

    Args:
        hint: A type or a union of types.

    Returns:
        The types.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found: list[Any] = []
    for kind in typing.get_args(hint) if is_union else (hint,):
        if (
            isinstance(kind, type)
            and issubclass(kind, Option)
            and not dataclasses.is_dataclass(kind)
        ):
            found += (option for option in KNOWN.values() if issubclass(option, kind))
        else:
            found.append(kind)
    return tuple(found)
