"""Lossless rearrangements between a Hugging Face tensor and our parameters.

Each transform computes the shape of the tensor from the shapes of the parameters, splits the tensor
into parameters (as views if possible), and joins parameters into the tensor.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

Shape = tuple[int, ...]
TERM = re.compile(r"\([^)]*\)|\S+")  # an axis of a pattern


@runtime_checkable
class Transform(Protocol):
    """Lossless conversion between one Hugging Face tensor and one or more parameters."""

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        """Shape of the Hugging Face tensor, from the parameters' shapes."""
        ...

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        """Convert the Hugging Face tensor to parameters of these shapes."""
        ...

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Convert parameters to the Hugging Face tensor."""
        ...


class _Axes(NamedTuple):
    """How one parameter lies in the tensor.

    Attributes:
        split: Sizes of the parameter's axes, after axes of groups are split.
        order: The tensor's order of these axes.
        joined: Sizes of the tensor's axes; one that is concatenated is two, the other and itself.
    """

    split: Shape
    order: tuple[int, ...]
    joined: Shape


@dataclass(frozen=True)
class Rearrange:
    """Axes in another order, joined, split or concatenated, as a pattern says.

    The pattern names the axes of a parameter, and after an arrow the axes of the tensor:

    - `d n h -> (n h) d`: one axis of the tensor is `n` and `h`;
    - `*o`: any number of axes;
    - `1`: an axis of size 1;
    - `d o -> (+o) d`: the parameters are concatenated along `o`;
    - `d o -> (o +) d`: they are interleaved, one number of each after another;
    - `d (g r) h -> (g +r h) d`: they are concatenated in each of `g` groups;
    - `(g 2 r) -> (2 g r)`: a number is a size.

    Attributes:
        pattern: The pattern.
        groups: Size of `g`; None is the largest that divides the axes of all parameters.
    """

    pattern: str
    groups: int | None = None

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        at, axes = _axes(self.pattern, self.groups, tuple(params))
        joined = axes[0].joined
        if at is None:
            return joined
        total = sum(each.joined[at] for each in axes)
        return *joined[: at - 1], joined[at - 1] * total, *joined[at + 1 :]

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        at, axes = _axes(self.pattern, self.groups, tuple(params))
        parts = [hf_tensor]
        if at is not None:
            joined = axes[0].joined
            ends = np.cumsum([each.joined[at] for each in axes])
            whole = hf_tensor.reshape(*joined[:at], ends[-1], *joined[at + 1 :])
            parts = np.split(whole, ends[:-1], axis=at)
        return [
            part.reshape([each.split[i] for i in each.order])
            .transpose(np.argsort(each.order))
            .reshape(shape)
            for part, each, shape in zip(parts, axes, params, strict=True)
        ]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        shapes = tuple(x.shape for x in params)
        at, axes = _axes(self.pattern, self.groups, shapes)
        parts = [
            x.reshape(each.split).transpose(each.order).reshape(each.joined)
            for x, each in zip(params, axes, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=at)
        return whole.reshape(self.hf_shape(shapes))

    def of_outputs(self, num_inputs: int) -> "Rearrange | None":
        """The pattern of [rank, outputs] for kernels of this one; None if these are no matrices.

        Args:
            num_inputs: Number of the kernel's axes that are its inputs.
        """
        ours, theirs = (TERM.findall(side) for side in self.pattern.split(" -> "))
        inputs = " ".join(ours[:num_inputs])
        outputs = [term for term in theirs if term not in (inputs, f"({inputs})")]
        if len(theirs) != 2 or len(outputs) != 1:
            return None
        of_ours = " ".join(ours[num_inputs:])
        return replace(self, pattern=f"rank {of_ours} -> {outputs[0]} rank")


@lru_cache(maxsize=4096)
def _axes(
    pattern: str, groups: int | None, params: tuple[Shape, ...]
) -> tuple[int | None, list[_Axes]]:
    """Index of the concatenated axis in `joined`, and the axes of each parameter."""
    ours, theirs = (TERM.findall(side) for side in pattern.split(" -> "))
    at: int | None = None
    axes = []
    for shape in params:
        sizes = _sizes(ours, shape, params, groups)
        ends = np.cumsum([len(size) for size in sizes.values()])
        places = {
            name: range(end - len(sizes[name]), end)
            for name, end in zip(sizes, ends.tolist(), strict=True)
        }
        order: list[int] = []
        joined: list[int] = []
        for term in theirs:
            names = term.strip("()").replace("+", " + ").split()
            order += [i for name in names for i in places.get(name, ())]
            if term.startswith("*"):
                joined += sizes[term]
                continue
            if "+" in names:
                first = names[: names.index("+")]
                joined.append(_product(sizes, first))
                names, at = names[len(first) + 1 :], len(joined)
            joined.append(_product(sizes, names))
        split = tuple(n for size in sizes.values() for n in size)
        axes.append(_Axes(split, tuple(order), tuple(joined)))
    return at, axes


def _sizes(
    terms: Sequence[str], shape: Shape, params: Sequence[Shape], groups: int | None
) -> dict[str, Shape]:
    """Size of each named axis of one parameter."""
    sizes: dict[str, Shape] = {}
    at = 0
    for term in terms:
        if term.startswith("("):
            *names, rest = term.strip("()").split()
            size = shape[at]
            for name in names:
                common = groups or math.gcd(*(each[at] for each in params))
                count = int(name) if name.isdigit() else common
                sizes[name], size = (count,), size // count
            sizes[rest] = (size,)
            at += 1
        else:
            end = at + (len(shape) - len(terms) + 1 if term.startswith("*") else 1)
            sizes[term] = shape[at:end]
            at = end
    return sizes


def _product(sizes: Mapping[str, Shape], names: Sequence[str]) -> int:
    return math.prod(n for name in names for n in sizes.get(name, ()))


SAME = "*x -> *x"
FLAT = "*x -> (+*x)"
LINEAR = "d *o -> (+*o) d"  # torch's Linear: [outputs, inputs]
LINEAR_OF_HEADS = "n h d -> d (n h)"
CONV1D = "d *o -> d (+*o)"  # GPT-2's Conv1D: [inputs, outputs]
CONV1D_OF_HEADS = "n h d -> (n h) d"
DEPTHWISE = "t *c -> (+*c) 1 t"  # torch's Conv1d of each channel
LINEAR_BY_GROUP = "d (g r) *h -> (g +r *h) d"  # [q | k | v] of group 0, of group 1, ...
BY_GROUP = LINEAR_BY_GROUP, "(g r) *h -> (g +r *h)"  # of kernels and of biases
IN_TURN = "d *o -> (*o +) d", "*o -> (*o +)"  # [gate, up, gate, up, ...]


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Parameters that have absorbed constants: each is a constant times what the tensor has.

    Attributes:
        part: Transform of the tensor.
        factors: The constant of each parameter.
    """

    part: Transform
    factors: tuple[float, ...]

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return self.part.hf_shape(params)

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        parts = self.part.from_hf(hf_tensor, params)
        return [self._times(x, factor) for x, factor in zip(parts, self.factors, strict=True)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        factors = zip(params, self.factors, strict=True)
        return self.part.to_hf([self._times(x, 1 / factor) for x, factor in factors])

    @staticmethod
    def _times(x: np.ndarray, factor: float) -> np.ndarray:
        return x if factor == 1 else x.astype(np.float32) * np.float32(factor)


@dataclass(frozen=True, kw_only=True)
class SwapHeadHalves:
    """The second half of each head before the first (nanochat).

    Attributes:
        part: Transform of the parameter, a kernel [D, N, H] or a bias [N, H].
    """

    part: Transform

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return self.part.hf_shape(params)

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [self._swap(x) for x in self.part.from_hf(hf_tensor, params)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return self.part.to_hf([self._swap(x) for x in params])

    @staticmethod
    def _swap(x: np.ndarray) -> np.ndarray:
        return np.roll(x, x.shape[-1] // 2, axis=-1)


@dataclass(frozen=True, kw_only=True)
class ConstantTensor:
    """A constant tensor that holds no parameter.

    Attributes:
        values: The tensor.
    """

    values: np.ndarray

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return self.values.shape

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return []

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return self.values
