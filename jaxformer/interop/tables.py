"""Mapping between Hugging Face tensor names and our parameter paths, used in both directions.

A row holds for any configuration of its family. A row whose parameters a model lacks (a bias, an
own head) is left out, so a table lists all that a family may have.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxformer import config as c
from jaxformer.interop.transforms import Flat, Kernel, Same, Shape, Transform

EMBEDDING = "embedding/tokens/embedding"
HEAD = "head/kernel"


@dataclass(frozen=True)
class Row:
    """Rule that maps one Hugging Face tensor to one or more parameters.

    Attributes:
        theirs: Its name; "{layer}" and "{expert}" stand for numbers.
        ours: Our paths, inside a layer for the rows of a stack.
        via: How the values are rearranged.
        only: Which models have the row; None is all that have its parameters.
    """

    theirs: str
    ours: str | tuple[str, ...]
    via: Transform = Same()
    only: Callable[[c.TransformerConfig], bool] | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Parameter paths as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def holds_in(self, config: c.TransformerConfig) -> bool:
        """Whether the rule applies to a configuration."""
        return self.only is None or self.only(config)


@dataclass(frozen=True, kw_only=True)
class Table:
    """All mapping rules of a family.

    Attributes:
        whole: Rows outside the layers; `ours` are full paths.
        stacks: Rows of a layer, by stack ("decoder", "encoder").
    """

    whole: tuple[Row, ...]
    stacks: Mapping[str, tuple[Row, ...]]

    def name_of(self, path: str) -> str | None:
        """Hugging Face name of a top-level parameter, or None."""
        return next((row.theirs for row in self.whole if row.paths == (path,)), None)


class Slot(NamedTuple):
    """A parameter path and the leading index of the slice."""

    path: str
    at: tuple[int, ...]


class Link(NamedTuple):
    """One Hugging Face tensor, the parameter slices it fills, and the transform."""

    theirs: str
    shape: Shape
    slots: tuple[Slot, ...]
    shapes: tuple[Shape, ...]
    via: Transform


def links(table: Table, config: c.TransformerConfig, ours: Mapping[str, Shape]) -> list[Link]:
    """Expand the rules for all layers and experts of one model.

    Args:
        table: The family's.
        config: The model.
        ours: Shape of each of our parameters, by path.

    Returns:
        One link per tensor of theirs.
    """
    tensor_mappings: list[Link] = []
    for row in (row for row in table.whole if row.holds_in(config)):
        tensor_mappings += _expand(row, row.theirs, "", (), ours)
    for stack, rows in table.stacks.items():
        rows = tuple(row for row in rows if row.holds_in(stack_config(config, stack)))
        for layer in range(stack_depth(config, stack)):
            section, index = layer_place(config, stack, layer)
            for row in rows:
                name = row.theirs.replace("{layer}", str(layer))
                tensor_mappings += _expand(row, name, f"{stack}/{section}/", index, ours)
    return tensor_mappings


def stack_config(config: c.TransformerConfig, stack: str) -> c.TransformerConfig:
    """Configuration of a stack's layers."""
    return config.encoder if stack == "encoder" else config


def stack_depth(config: c.TransformerConfig, stack: str) -> int:
    """Number of layers of "decoder" or "encoder"."""
    match config.topology:
        case c.EncoderDecoder(num_encoder_layers=layers):
            return layers if stack == "encoder" else config.num_layers
        case c.Encoder():
            return config.num_layers if stack == "encoder" else 0
        case c.Decoder():
            return config.num_layers if stack == "decoder" else 0


def layer_place(config: c.TransformerConfig, stack: str, layer: int) -> tuple[str, tuple[int, ...]]:
    """Parameter path of a layer, and its index into the stacked arrays."""
    period = stack_config(config, stack).period
    repeats = stack_depth(config, stack) // period
    if layer < repeats * period:
        return f"layers/layer_{layer % period}", (layer // period,)
    return f"tail/layer_{layer % period}", ()


def uncovered(found: list[Link], ours: Mapping[str, Shape]) -> list[str]:
    """Parameters that no tensor fills."""
    covered = {slot.path for link in found for slot in link.slots}
    return sorted(set(ours) - covered)


def linear(theirs: str, ours: str, *, input_axes: int = 1, bias: bool = True) -> tuple[Row, ...]:
    """Mapping rules of a torch Linear: weight, and bias if it has one."""
    kernel = Row(f"{theirs}.weight", f"{ours}/kernel", Kernel(input_axes=input_axes))
    return (kernel, Row(f"{theirs}.bias", f"{ours}/bias", Flat())) if bias else (kernel,)


def norm(theirs: str, ours: str) -> tuple[Row, ...]:
    """Mapping rules of a norm: weight, and bias if it has one."""
    return Row(f"{theirs}.weight", f"{ours}/scale"), Row(f"{theirs}.bias", f"{ours}/bias")


def _expand(
    row: Row, name: str, prefix: str, index: tuple[int, ...], ours: Mapping[str, Shape]
) -> Iterator[Link]:
    paths = [prefix + path for path in row.paths]
    if not all(path in ours for path in paths):
        return
    expert = "{expert}" in name
    for i in range(ours[paths[0]][len(index)] if expert else 1):
        slice_index = (*index, i) if expert else index
        shapes = tuple(ours[path][len(slice_index) :] for path in paths)
        yield Link(
            theirs=name.replace("{expert}", str(i)),
            shape=row.via.shape(shapes),
            slots=tuple(Slot(path, slice_index) for path in paths),
            shapes=shapes,
            via=row.via,
        )
