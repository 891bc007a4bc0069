"""Parse jaxtyping shape annotations, and check that the axes of a call's arguments agree."""

from typing import Any, NamedTuple

from jaxformer.shapes import AXIS_LETTERS


class ArgumentError(Exception):  # noqa: N818 - `typechecked` converts it to ValueError
    """An argument does not match its annotation."""


class AxesSpec(NamedTuple):
    """Axes of a parsed annotation; sums such as "C+Q-P" are not checked."""

    # Letters and their indices, which are negative after the variadic axes.
    named_axes: tuple[tuple[str, int], ...]
    variadic: str | None  # "...", "*batch", "*#batch", or None
    num_leading: int  # axes before the variadic ones, and after them
    num_trailing: int


def parse_dim_str(dim_str: str) -> AxesSpec:
    """Parse jaxtyping's dim_str, such as "*batch T N H"."""
    letters = dim_str.split()
    variadic = next((x for x in letters if x == "..." or x.startswith("*")), None)
    num_leading = len(letters) if variadic is None else letters.index(variadic)
    num_trailing = len(letters) - num_leading - (variadic is not None)
    indices = [*range(num_leading), *range(-num_trailing, 0)]
    named_axes = tuple((letters[i], i) for i in indices if letters[i].isidentifier())
    return AxesSpec(named_axes, variadic, num_leading, num_trailing)


def check_axes(
    name: str, axes: AxesSpec, dim_str: str, shape: tuple[int, ...], memo: dict[str, Any]
) -> None:
    """Check a shape against its annotation and the sizes bound so far; bind new sizes."""
    named_axes, variadic, num_leading, num_trailing = axes
    count, min_axes = len(shape), num_leading + num_trailing
    if count < min_axes or (variadic is None and count > min_axes):
        at_least = "" if variadic is None else "at least "
        raise ArgumentError(
            f"{name} has {count} {'axis' if count == 1 else 'axes'}, shape {shape}, but must "
            f"have {at_least}{min_axes}: [{', '.join(dim_str.split())}]"
        )
    for letter, axis in named_axes:
        known = memo.get(letter)
        if known is None:
            memo[letter] = name, shape, axis
        elif known[1][known[2]] != shape[axis]:
            raise ArgumentError(axis_mismatch_message(letter, (name, shape, axis), known))
    if variadic is not None and variadic[1:].isidentifier():  # axes with # broadcast
        sizes = shape[num_leading : count - num_trailing]
        known_sizes, known_name, known_shape = memo.setdefault(variadic, (sizes, name, shape))
        if sizes != known_sizes:
            raise ArgumentError(
                f"{name} has {variadic[1:]} axes {sizes} (shape {shape}), which must be the "
                f"{known_sizes} of {known_name} (shape {known_shape})"
            )


def axis_mismatch_message(letter: str, argument: Any, known_argument: Any) -> str:
    """Return the error message for two arguments that have different sizes for one axis letter."""
    (name, shape, axis), (known, known_shape, known_axis) = argument, known_argument
    word = f"{AXIS_LETTERS[letter]} " if letter in AXIS_LETTERS else ""
    size, known_size = f"{shape[axis]} {word}", f"{known_shape[known_axis]} "
    if not word:
        size, known_size = f"{letter} = {shape[axis]} ", f"{letter} = {known_shape[known_axis]} "
    return (
        f"{name} has {size}(axis {axis % len(shape)} of shape {shape}), but {known} has "
        f"{known_size}(axis {known_axis % len(known_shape)} of shape {known_shape})"
    )
