"""`Parameter`: shape, logical axes and initial value of a custom option's parameter."""

import math
import numbers
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.checks import FLOAT32_MAX, INT32_MAX, OptionError, shown
from jaxformer.config.initialisation import Initialiser

# Names of logical axes; shardings, optimizer groups and memory estimates are derived from them.
# "blocks" stacks the blocks of a block-diagonal matrix; "choices" is the axis of a bias that only
# chooses experts and has an update of its own; "rank" is the narrow axis of an adapter's matrices;
# "buckets" are rows of a table that is never gathered: each device looks up what all devices ask.
LOGICAL_AXES = (
    *("model", "heads", "kv_heads", "hidden", "vocabulary", "experts", "rows", "features"),
    *("blocks", "choices", "rank", "buckets"),
)


class Parameter(NamedTuple):
    """Declaration of a parameter: global shape, logical axes and initial value.

    Attributes:
        shape: Shape of the array.
        axes: One of `LOGICAL_AXES` per axis, inputs before outputs: "features -> heads".
        init: A number, a `config` initialiser, or a function of (key, shape, dtype). None
            initialises a matrix by `FanIn` and a vector with zeros.
    """

    shape: tuple[int, ...]
    axes: str
    init: Any = None


class LogicalAxes(NamedTuple):
    """Logical axes of a parameter, and how many of the last ones are outputs of a matrix."""

    names: tuple[str, ...]
    num_output_axes: int

    @property
    def num_input_axes(self) -> int:
        """Number of input axes of a matrix, or of all axes of a vector."""
        return len(self.names) - self.num_output_axes

    @property
    def bias_axes(self) -> str:
        """Axes of the bias that is added to the outputs: not sharded over fsdp."""
        return " ".join(self.names[self.num_input_axes :]).replace("model", "features")


@cache
def parse_logical_axes(axes: str) -> LogicalAxes:
    """Parse a declaration such as "model -> heads features".

    Args:
        axes: Names from `LOGICAL_AXES`, inputs before the arrow and outputs after it.

    Returns:
        Names of the axes, and how many are outputs.

    Raises:
        ValueError: A name is not in `LOGICAL_AXES`.
    """
    left, _, right = axes.partition("->")
    names, outputs = (*left.split(), *right.split()), len(right.split())
    if unknown := [name for name in names if name not in LOGICAL_AXES]:
        raise ValueError(
            f"Axes of a parameter must be among {', '.join(LOGICAL_AXES)}; "
            f"got {', '.join(map(repr, unknown))} in {axes!r}."
        )
    return LogicalAxes(names, outputs)


def check_parameters(method_name: str, declared: Any, *_: Any) -> None:
    """Check that a custom option declares a dict from names to valid `Parameter`s.

    Args:
        method_name: Name of the method, for error messages.
        declared: The value that it returned.

    Raises:
        OptionError: The value is no such dict, or a parameter is invalid; the message names it.
    """
    if not isinstance(declared, Mapping):
        raise OptionError(
            f"{method_name} must return a dict from names to Parameter; got {shown(declared)}."
        )
    for name, parameter in declared.items():
        if not isinstance(name, str) or not isinstance(parameter, Parameter):
            raise OptionError(
                f"{method_name} must return a dict from names to Parameter; got "
                f"{shown(parameter)} for {name!r}."
            )
        if not name or "/" in name:
            raise OptionError(
                f"{method_name}: the name of a parameter must be non-empty and without '/'; got "
                f"{name!r}."
            )
        if not isinstance(parameter.shape, tuple | list) or not all(map(_is_size, parameter.shape)):
            raise OptionError(
                f"{method_name}: the shape of {name!r} must be a tuple of integers from 1 to "
                f"{INT32_MAX}; got {shown(parameter.shape)}."
            )
        if not isinstance(parameter.axes, str):
            raise OptionError(
                f"{method_name}: the axes of {name!r} must be a string such as 'model -> hidden'; "
                f"got {shown(parameter.axes)}."
            )
        try:
            num_axes = len(parse_logical_axes(parameter.axes).names)
        except ValueError as error:
            raise OptionError(f"{method_name}: {name!r}: {error}") from None
        if num_axes != len(parameter.shape):
            raise OptionError(
                f"{method_name}: {name!r} {tuple(parameter.shape)} has {len(parameter.shape)} "
                f"axes, but {parameter.axes!r} names {num_axes}."
            )
        if not _is_init(parameter.init):
            raise OptionError(
                f"{method_name}: init of {name!r} must be a finite number, a config initialiser "
                "such as Normal(), a function of (key, shape, dtype), or None; got "
                f"{shown(parameter.init)}."
            )


def projected_width(parameters: Mapping[str, Parameter]) -> int:
    """Outputs per token of all matrices with model_dim inputs."""
    shapes = [(p.shape, parse_logical_axes(p.axes)) for p in parameters.values()]
    input_matrices = [
        (x, axes.num_input_axes)
        for x, axes in shapes
        if "model" in axes.names[: axes.num_input_axes]
    ]
    return sum(math.prod(shape[inputs:]) for shape, inputs in input_matrices)


def _is_size(size: Any) -> bool:
    whole = isinstance(size, numbers.Integral) and not isinstance(size, bool)
    return whole and 1 <= size <= INT32_MAX


def _is_init(init: Any) -> bool:
    if isinstance(init, jax.Array):  # the value of a tracer is unknown
        traced = isinstance(init, jax.core.Tracer)
        return init.ndim == 0 and (traced or math.isfinite(init))
    if isinstance(init, int | float | np.floating | np.integer) and not isinstance(init, bool):
        return bool(-FLOAT32_MAX <= init <= FLOAT32_MAX)
    return init is None or isinstance(init, Initialiser) or callable(init)
