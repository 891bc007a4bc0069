"""Parse jaxtyping shape annotations, and check that the axes of a call's arguments agree."""

from typing import Any, NamedTuple

from jaxformer.shapes import AXES


class Refused(Exception):  # noqa: N818 - `checked` makes a ValueError of it
    """An argument does not match its annotation."""


class Axes(NamedTuple):
    """Axes of a parsed annotation; sums such as "C+Q-P" are not checked."""

    named: tuple[tuple[str, int], ...]  # letters and their places; from the end behind any number
    any_number: str | None  # "...", "*batch", "*#batch", or None where there are none
    before: int  # how many stand before those, and how many behind
    behind: int


def read_axes(dim_str: str) -> Axes:
    """Parse jaxtyping's dim_str, such as "*batch T N H"."""
    letters = dim_str.split()
    variadic_indices = [
        i for i, letter in enumerate(letters) if letter == "..." or letter.startswith("*")
    ]
    num_leading = variadic_indices[0] if variadic_indices else len(letters)
    num_trailing = len(letters) - num_leading - len(variadic_indices)
    indices = [*range(num_leading), *range(-num_trailing, 0)]
    named_axes = tuple((letters[i], i) for i in indices if letters[i].isidentifier())
    return Axes(
        named_axes, letters[num_leading] if variadic_indices else None, num_leading, num_trailing
    )


def meet(name: str, axes: Axes, written: str, shape: tuple[int, ...], seen: dict[str, Any]) -> None:
    """Check a shape against its annotation and the sizes bound so far; bind new sizes."""
    named_axes, variadic, num_leading, num_trailing = axes
    count, min_axes = len(shape), num_leading + num_trailing
    if count < min_axes or (variadic is None and count > min_axes):
        at_least = "" if variadic is None else "at least "
        raise Refused(
            f"{name} has {count} {'axis' if count == 1 else 'axes'}, shape {shape}, and must "
            f"have {at_least}{min_axes}: [{', '.join(written.split())}]"
        )
    for letter, axis in named_axes:
        known = seen.get(letter)
        if known is None:
            seen[letter] = name, shape, axis
        elif known[1][known[2]] != shape[axis]:
            raise Refused(disagreement(letter, (name, shape, axis), known))
    if variadic is not None and variadic[1:].isidentifier():  # those with # broadcast
        sizes = shape[num_leading : count - num_trailing]
        known_sizes, known_name, known_shape = seen.setdefault(variadic, (sizes, name, shape))
        if sizes != known_sizes:
            raise Refused(
                f"{name} has {variadic[1:]} axes {sizes} (shape {shape}), which must be the "
                f"{known_sizes} of {known_name} (shape {known_shape})"
            )


def disagreement(letter: str, one: Any, other: Any) -> str:
    """Return the error message for two arguments that have different sizes for one axis letter."""
    (name, shape, axis), (known, known_shape, known_axis) = one, other
    word = f"{AXES[letter]} " if letter in AXES else ""
    size, known_size = f"{shape[axis]} {word}", f"{known_shape[known_axis]} "
    if not word:
        size, known_size = f"{letter} = {shape[axis]} ", f"{letter} = {known_shape[known_axis]} "
    return (
        f"{name} has {size}(axis {axis % len(shape)} of shape {shape}), but {known} has "
        f"{known_size}(axis {known_axis % len(known_shape)} of shape {known_shape})"
    )
