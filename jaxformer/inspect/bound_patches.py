"""Patches bound to the layers of a model, as perturbations of what its modules sow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer import config as c
from jaxformer.inspect.model_trace import Arrays, as_int_tuple
from jaxformer.inspect.named_values import (
    Layer,
    ModelRun,
    is_of_source,
    names_with_heads,
    path_of,
    shapes_of,
)
from jaxformer.inspect.patches import Add, At, Change, Mean, Replace, Zero
from jaxformer.layers.layouts import Layout, segments_of

AnyArray = Array | np.ndarray


STATIC = {"static": True}  # part of the compiled program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BoundPatch:
    """A patch whose place exists.

    Attributes:
        name: Name of the value.
        layers: Layers whose compiled program has the patch: repetitions of a block are one program.
        change: The change; its arrays have all axes of `x[..., positions, heads, :]`.
        active: Which of `layers` it changes.
        positions: Positions.
        heads: Heads; None of a value without heads.
    """

    name: str = field(metadata=STATIC)
    layers: tuple[Layer, ...] = field(metadata=STATIC)
    change: Change
    active: Bool[AnyArray, " layers"]
    positions: Int[AnyArray, " positions"]
    heads: Int[AnyArray, " heads"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerPatch:
    """A patch in one layer: the function that `layers.runtime.sow_and_perturb` applies."""

    change: Change
    active: Bool[AnyArray, ""]
    positions: Int[AnyArray, " positions"]
    heads: Int[AnyArray, " heads"] | None
    sown_field: str | None = field(metadata=STATIC)

    def __call__(self, sown: Any) -> Any:
        """Return the value, or the tree whose `sown_field` it is, after the patch."""
        x = sown if self.sown_field is None else getattr(sown, self.sown_field)
        index = _index(self.positions, self.heads)
        before = x[index]
        after = jnp.broadcast_to(self.change(x, index), before.shape).astype(x.dtype)
        x = x.at[index].set(jnp.where(self.active, after, before))
        return x if self.sown_field is None else sown._replace(**{self.sown_field: x})


def _index(positions: AnyArray, heads: AnyArray | None) -> tuple[Any, ...]:
    """Index of a place in a value [*batch, T, features] or [*batch, T, heads, features]."""
    if heads is None:
        return ..., positions, slice(None)
    return ..., positions[:, None], heads[None], slice(None)


def perturbations(
    config: c.TransformerConfig, patches: tuple[BoundPatch, ...], layout: Layout
) -> Any:
    """The collection "perturbations" of these patches, for `layers.runtime.sow_and_perturb`."""
    tree: dict[str, Any] = {}
    for patch in patches:
        stack, path, sown_field = path_of(config, patch.name)
        by_layer = list[tuple[tuple[str, ...], LayerPatch]]()
        for active, layer in zip(patch.active, patch.layers, strict=True):
            change: Change = patch.change
            if isinstance(change, Replace) and isinstance(change.value, ModelRun):
                run_value = change.value.values[patch.name][layer]
                change = Replace(run_value[_index(patch.positions, patch.heads)])
            bound = LayerPatch(change, active, patch.positions, patch.heads, sown_field)
            where, is_stacked = _block_path(config, stack, layer, layout)
            by_layer.append((where, bound))
        if is_stacked:
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *(x for _, x in by_layer))
            by_layer = [(where, stacked)]
        for where, bound in by_layer:
            node = tree
            for part in (stack, *where, *path[:-1]):
                node = node.setdefault(part, {})
            node[path[-1]] = (*node.get(path[-1], ()), bound)
    return tree


def _block_path(
    config: c.TransformerConfig, stack: c.Stack, layer: Layer, layout: Layout = "stacked"
) -> tuple[tuple[str, ...], bool]:
    """Path of a layer's block in the parameters of its stack, and whether it is repeated."""
    if layer is None:
        return (), False
    path, repeat = segments_of(config, stack, layout).locate(layer)
    return tuple(path.split("/")), bool(repeat)


def bind_patches(
    config: c.TransformerConfig, patches: Mapping[At | str, Change], arrays: Arrays
) -> tuple[BoundPatch, ...]:
    """Check patches, and divide each among the blocks whose layers it changes.

    Raises:
        ValueError: As in `run`.
    """
    bound: list[tuple[At, BoundPatch]] = []
    for name_or_place, change in patches.items():
        at = At(name_or_place) if isinstance(name_or_place, str) else name_or_place
        text = arrays["source" if is_of_source(at.name) else "tokens"]
        bound += [(at, x) for x in _bind(config, at, change, text.shape)]
    for (first, one), (second, other) in combinations(bound, 2):
        if one.name == other.name and one.layers == other.layers and _overlap(one, other):
            raise ValueError(
                f"Two patches change one place: {first} and {second} have a layer, a position and "
                "a head in common."
            )
    return tuple(patch for _, patch in bound)


def _overlap(one: BoundPatch, other: BoundPatch) -> bool:
    """Whether two patches of the same value and block have a place in common."""
    heads = one.heads is None or other.heads is None or np.isin(one.heads, other.heads).any()
    positions = np.isin(one.positions, other.positions).any()
    return bool((one.active & other.active).any() and positions and heads)


def _bind(
    config: c.TransformerConfig, at: At, change: Change, text_shape: tuple[int, ...]
) -> list[BoundPatch]:
    """A patch for each block that has a layer of the place, which must exist."""
    shapes, (stack, *_) = shapes_of(config, at.name), path_of(config, at.name)
    selected = as_int_tuple("layer", at.layer)
    layers: tuple[Layer, ...] = tuple(shapes) if selected is None else selected
    outside = [i for i in layers if i not in shapes]
    if outside or not layers:
        known = [i for i in shapes if i is not None]
        where = f"of {known}" if known else "outside the layers: leave out layer"
        raise ValueError(f"{at} needs layers that have {at.name!r}, {where}; got {list(layers)}.")
    blocks = {i: _block_path(config, stack, i) for i in shapes}
    bound = []
    for block in dict.fromkeys(blocks[i] for i in layers):
        in_block = tuple(i for i, x in blocks.items() if x == block)
        shape = shapes[in_block[0]]
        if len(shape) == 1 and at.head is not None:
            raise ValueError(
                f"{at.name!r} has no heads, but got head={at.head}; values with heads: "
                f"{', '.join(names_with_heads(config))}."
            )
        positions = _numbers(at, "position", text_shape[-1])
        heads = _numbers(at, "head", shape[0]) if len(shape) == 2 else None
        if isinstance(getattr(change, "value", None), ModelRun):
            _check_run(at, change, {i: (*text_shape, *shapes[i]) for i in in_block})
        else:
            change = _with_all_axes(at, change, text_shape[:-1], positions, heads, shape[-1])
        active = np.asarray([i in layers for i in in_block])
        bound.append(BoundPatch(at.name, in_block, change, active, positions, heads))
    return bound


def _numbers(at: At, axis: str, count: int) -> Int[np.ndarray, " n"]:
    """Selected positions or heads, from 0 to count - 1."""
    selected = as_int_tuple(axis, getattr(at, axis))
    if selected is None:
        return np.arange(count)
    lowest = -count if axis == "position" else 0
    if not selected or any(not lowest <= i < count for i in selected):
        raise ValueError(f"The {axis} of {at} must be in [{lowest}, {count - 1}]; got {selected}.")
    return np.asarray(selected) % count


def _with_all_axes(
    at: At,
    change: Change,
    batch: tuple[int, ...],
    positions: np.ndarray,
    heads: np.ndarray | None,
    features: int,
) -> Change:
    """The change, whose array has an axis for each of `x[..., positions, heads, :]`."""
    if isinstance(change, Zero | Mean):
        return change
    if not isinstance(change, Replace | Add):
        raise ValueError(f"A patch is Replace, Zero, Mean or Add; got {change!r} at {at}.")
    axes = [(size, True) for size in batch]
    for numbers, selected in ((positions, at.position), (heads, at.head)):
        if numbers is not None:
            axes.append((len(numbers), selected is None or np.ndim(selected) > 0))
    axes.append((features, True))
    place = tuple(size for size, is_selected in axes if is_selected)
    value = jnp.asarray(change.value)
    sizes = (*(1,) * (len(place) - value.ndim), *value.shape)
    if len(sizes) != len(place) or any(n not in (1, m) for n, m in zip(sizes, place, strict=True)):
        raise ValueError(
            f"The value of {type(change).__name__} must broadcast to {place}, the shape of {at}; "
            f"got {value.shape}."
        )
    axis_sizes = iter(sizes)
    return type(change)(
        value.reshape([next(axis_sizes) if is_selected else 1 for _, is_selected in axes])
    )


def _check_run(at: At, change: Change, shapes: Mapping[Layer, tuple[int, ...]]) -> None:
    """Check that the run of `Replace` recorded the value, in the same shapes."""
    if not isinstance(change, Replace):
        raise ValueError(f"{type(change).__name__} takes an array; got a ModelRun at {at}.")
    values, name = change.value.values, at.name
    if name not in values:
        raise ValueError(
            f"The run for {at} has recorded {', '.join(values) or 'nothing'}; run it with "
            f"record=[{name!r}]."
        )
    for layer, shape in shapes.items():
        recorded_shape = getattr(values[name].get(layer), "shape", None)
        if recorded_shape != shape:
            raise ValueError(
                f"{name!r} of layer {layer} has shape {shape}, in the run that replaces it "
                f"{recorded_shape}; run both on tokens of one shape."
            )
