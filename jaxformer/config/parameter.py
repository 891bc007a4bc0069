"""What an option learns: shapes, what axes count, and where numbers start."""

import math
import numbers
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.checks import LARGEST, LARGEST_SIZE, OptionError, shown
from jaxformer.config.initialisation import Initialiser

# What an axis of a parameter may count.
COUNTED = ("model", "heads", "kv_heads", "hidden", "vocabulary", "experts", "rows", "features")


class Parameter(NamedTuple):
    """Declaration of a parameter: global shape, logical axes and initial value.

    Attributes:
        shape: Of the array.
        axes: A word for each axis, such as "features -> heads" (see `layers.parameters`).
        start: A number, a `config` initialiser, or a function of (key, shape, dtype). None draws a
            matrix by `FanIn`; vectors begin with zeros.
    """

    shape: tuple[int, ...]
    axes: str
    start: Any = None


class ParameterAxes(NamedTuple):
    """Logical axes of a parameter, and how many of the last are a matrix's outputs."""

    names: tuple[str, ...]
    outputs: int

    @property
    def inputs(self) -> int:
        """Number of input axes of a matrix, or of all axes of a vector."""
        return len(self.names) - self.outputs


@cache
def read_axes(axes: str) -> ParameterAxes:
    """Parse a declaration such as "model -> heads features".

    Args:
        axes: Of `COUNTED`, for instance "model -> heads features".

    Returns:
        Names of the axes, and how many are outputs.

    Raises:
        ValueError: A word is none of `COUNTED`.
    """
    left, _, right = axes.partition("->")
    names, outputs = (*left.split(), *right.split()), len(right.split())
    if unknown := [name for name in names if name not in COUNTED]:
        raise ValueError(
            f"An axis of a parameter counts one of {', '.join(COUNTED)}; "
            f"got {', '.join(map(repr, unknown))} in {axes!r}."
        )
    return ParameterAxes(names, outputs)


def check_parameters(giver: str, declared: Any, *_: Any) -> None:
    """Refuse what is no dict of names and a sound `Parameter` each.

    Args:
        giver: The method that gave it, named in the message.
        declared: What it gave.

    Raises:
        OptionError: Names the parameter and what of it is wrong.
    """
    if not isinstance(declared, Mapping):
        raise OptionError(
            f"{giver} gives a dict of names, a Parameter each; got {shown(declared)}."
        )
    for name, parameter in declared.items():
        if not isinstance(name, str) or not isinstance(parameter, Parameter):
            raise OptionError(
                f"{giver} gives a dict of names, a Parameter each; got {shown(parameter)} for "
                f"{name!r}."
            )
        if not name or "/" in name:
            raise OptionError(f"{giver}: a parameter has a name without '/'; got {name!r}.")
        if not isinstance(parameter.shape, tuple | list) or not all(map(_is_size, parameter.shape)):
            raise OptionError(
                f"{giver}: the shape of {name!r} is a tuple of whole numbers from 1 to "
                f"{LARGEST_SIZE}; got {shown(parameter.shape)}."
            )
        if not isinstance(parameter.axes, str):
            raise OptionError(
                f"{giver}: the axes of {name!r} are words in a text, such as 'model -> hidden'; "
                f"got {shown(parameter.axes)}."
            )
        try:
            num_axes = len(read_axes(parameter.axes).names)
        except ValueError as error:
            raise OptionError(f"{giver}: {name!r}: {error}") from None
        if num_axes != len(parameter.shape):
            raise OptionError(
                f"{giver}: {name!r} {tuple(parameter.shape)} has {len(parameter.shape)} axes; "
                f"{parameter.axes!r} "
                f"names {num_axes}."
            )
        if not _is_start(parameter.start):
            raise OptionError(
                f"{giver}: {name!r} starts from a finite number, a config initialiser such as "
                "Normal(), a function of (key, shape, dtype), or None; got "
                f"{shown(parameter.start)}."
            )


def _is_size(size: Any) -> bool:
    whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
    return whole and 1 <= size <= LARGEST_SIZE


def _is_start(start: Any) -> bool:
    if isinstance(start, jax.Array):  # which numbers it holds, a traced one does not tell
        traced = isinstance(start, jax.core.Tracer)
        return start.ndim == 0 and (traced or math.isfinite(start))
    if isinstance(start, int | float | np.floating | np.integer) and not isinstance(start, bool):
        return bool(-LARGEST <= start <= LARGEST)
    return start is None or isinstance(start, Initialiser) or callable(start)
