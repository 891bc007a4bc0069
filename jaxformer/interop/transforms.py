"""Lossless rearrangements between a Hugging Face tensor and our parameters.

Each transform knows three things: the shape of their tensor from the shapes of ours, how to split
theirs into ours, and how to join ours into theirs. Splitting gives views where it can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

Shape = tuple[int, ...]


@runtime_checkable
class Transform(Protocol):
    """Lossless conversion between one Hugging Face tensor and one or more parameters."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        """Shape of the Hugging Face tensor, from the parameters' shapes."""
        ...

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        """Convert the Hugging Face tensor to parameters of these shapes."""
        ...

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Convert parameters to the Hugging Face tensor."""
        ...


@dataclass(frozen=True, kw_only=True)
class Same:
    """The tensor equals the parameter."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return ours[0]

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [theirs]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        return ours[0]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant tensor that holds no parameter.

    Attributes:
        values: What it holds.
    """

    values: np.ndarray

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return self.values.shape

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return []

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        return self.values


@dataclass(frozen=True, kw_only=True)
class Flat:
    """The parameter flattened, after `leading` axes of size 1; for example a bias by head.

    Attributes:
        leading: Axes of size one before it.
    """

    leading: int = 0

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return (1,) * self.leading + (math.prod(ours[0]),)

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [theirs.reshape(ours[0])]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        return ours[0].reshape(self.shape([ours[0].shape]))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Linear weight: [outputs, inputs] in torch, inputs first here, possibly split into heads.

    Attributes:
        input_axes: How many of our axes are inputs; 2 for the heads that enter `attention/out`.
        outputs_first: Whether theirs is [outputs, inputs] (torch's Linear) or the other way round
            (GPT-2's Conv1D).
    """

    input_axes: int = 1
    outputs_first: bool = True

    def shape(self, ours: Sequence[Shape]) -> Shape:
        inputs, outputs = self._sizes(ours[0])
        return (outputs, inputs) if self.outputs_first else (inputs, outputs)

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [(theirs.T if self.outputs_first else theirs).reshape(ours[0])]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        matrix = ours[0].reshape(self._sizes(ours[0].shape))
        return matrix.T if self.outputs_first else matrix

    def _sizes(self, ours: Shape) -> tuple[int, int]:
        return math.prod(ours[: self.input_axes]), math.prod(ours[self.input_axes :])


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Several parameters concatenated along an axis: [q | k | v], [gate | up].

    Attributes:
        part: How each of ours is arranged in it.
        axis: The axis they follow each other along.
    """

    part: Transform = Kernel()
    axis: int = 0

    def shape(self, ours: Sequence[Shape]) -> Shape:
        parts = [self.part.shape([shape]) for shape in ours]
        first = list(parts[0])
        first[self.axis] = sum(part[self.axis] for part in parts)
        return tuple(first)

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        sizes = [self.part.shape([shape])[self.axis] for shape in ours]
        parts = np.split(theirs, np.cumsum(sizes)[:-1], axis=self.axis)
        return [self.part.split(x, [shape])[0] for x, shape in zip(parts, ours, strict=True)]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.part.join([x]) for x in ours], axis=self.axis)


@dataclass(frozen=True, kw_only=True)
class GroupedHeads:
    """Fused QKV: for each KV head its query heads, then its key, then its value.

    Ours are query, key and value: kernels ([D, N, H] and [D, K, H]) or biases ([N, H] and [K, H]).
    With as many key/value heads as heads this is [q, k, v] head by head (GPT-NeoX, BLOOM), with
    one it is [all queries, k, v] (Falcon 7B).
    """

    def shape(self, ours: Sequence[Shape]) -> Shape:
        outputs = sum(math.prod(shape[-2:]) for shape in ours)
        return (outputs, *ours[0][:-2])

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        *inputs, heads, width = ours[0]
        groups = ours[1][-2]
        by_group = theirs.reshape(groups, heads // groups + 2, width, *inputs)
        parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
        return [np.moveaxis(part.reshape(-1, width, *inputs), (0, 1), (-2, -1)) for part in parts]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        width, groups = ours[0].shape[-1], ours[1].shape[-2]
        inputs = ours[0].shape[:-2]
        front = [np.moveaxis(x, (-2, -1), (0, 1)) for x in ours]
        parts = [x.reshape(groups, -1, width, *inputs) for x in front]
        return np.concatenate(parts, axis=1).reshape(self.shape([x.shape for x in ours]))


@dataclass(frozen=True, kw_only=True)
class HeadByHead:
    """Matrix [outputs, inputs] with the parameters concatenated per head: [k, v] of head 0, ...

    Ours are kernels [D, N, H] of as many heads, each of a width of its own: [k, v] head by head
    (DeepSeek).
    """

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return sum(math.prod(shape[1:]) for shape in ours), ours[0][0]

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        inputs, heads, _ = ours[0]
        by_head = theirs.T.reshape(inputs, heads, -1)
        return np.split(by_head, np.cumsum([shape[-1] for shape in ours])[:-1], axis=-1)

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(ours, axis=-1).reshape(ours[0].shape[0], -1).T


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """Parameters interleaved along the first axis: gate, up, gate, up (Phi-3-small).

    Attributes:
        part: How each of ours is arranged in it.
    """

    part: Transform = Kernel()

    def shape(self, ours: Sequence[Shape]) -> Shape:
        first, *rest = self.part.shape([ours[0]])
        return (len(ours) * first, *rest)

    def split(self, theirs: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        count = len(ours)
        return [self.part.split(theirs[i::count], [s])[0] for i, s in enumerate(ours)]

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        parts = [self.part.join([x]) for x in ours]
        return np.stack(parts, axis=1).reshape(self.shape([x.shape for x in ours]))
