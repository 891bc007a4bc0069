"""Lossless rearrangements between a Hugging Face tensor and our parameters.

Each transform computes the shape of the tensor from those of the parameters, splits the tensor into
parameters (as views if possible), and joins parameters into the tensor.
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

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        """Shape of the Hugging Face tensor, from the parameters' shapes."""
        ...

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        """Convert the Hugging Face tensor to parameters of these shapes."""
        ...

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Convert parameters to the Hugging Face tensor."""
        ...


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The tensor equals the parameter."""

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return params[0]

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [hf_tensor]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return params[0]


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


@dataclass(frozen=True, kw_only=True)
class Flatten:
    """The parameter flattened, between axes of size 1; for example a bias by head.

    Attributes:
        leading: Axes of size 1 before it.
        trailing: Axes of size 1 after it.
    """

    leading: int = 0
    trailing: int = 0

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return (1,) * self.leading + (math.prod(params[0]),) + (1,) * self.trailing

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [hf_tensor.reshape(params[0])]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return params[0].reshape(self.hf_shape([params[0].shape]))


@dataclass(frozen=True, kw_only=True)
class LinearKernel:
    """Linear weight: [outputs, inputs] in torch, inputs first here, possibly split into heads.

    Attributes:
        input_axes: Number of input axes of the kernel; 2 for the heads of `attention/out`.
        outputs_first: Whether the tensor is [outputs, inputs] (torch's Linear) or
            [inputs, outputs] (GPT-2's Conv1D).
    """

    input_axes: int = 1
    outputs_first: bool = True

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        inputs, outputs = self._sizes(params[0])
        return (outputs, inputs) if self.outputs_first else (inputs, outputs)

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [(hf_tensor.T if self.outputs_first else hf_tensor).reshape(params[0])]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        matrix = params[0].reshape(self._sizes(params[0].shape))
        return matrix.T if self.outputs_first else matrix

    def _sizes(self, params: Shape) -> tuple[int, int]:
        return math.prod(params[: self.input_axes]), math.prod(params[self.input_axes :])


@dataclass(frozen=True, kw_only=True)
class ConvolutionKernel:
    """Kernel of a depthwise convolution: [channels, 1, taps] in torch, [taps, N, H] here."""

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        taps, *heads = params[0]
        return math.prod(heads), 1, taps

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [hf_tensor.T.reshape(params[0])]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return params[0].reshape(params[0].shape[0], 1, -1).T


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Several parameters concatenated along an axis: [q | k | v], [gate | up].

    Attributes:
        part: Transform of each parameter.
        axis: Axis of the concatenation.
    """

    part: Transform = LinearKernel()
    axis: int = 0

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        parts = [self.part.hf_shape([shape]) for shape in params]
        first = list(parts[0])
        first[self.axis] = sum(part[self.axis] for part in parts)
        return tuple(first)

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        sizes = [self.part.hf_shape([shape])[self.axis] for shape in params]
        parts = np.split(hf_tensor, np.cumsum(sizes)[:-1], axis=self.axis)
        return [self.part.from_hf(x, [shape])[0] for x, shape in zip(parts, params, strict=True)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.part.to_hf([x]) for x in params], axis=self.axis)


@dataclass(frozen=True, kw_only=True)
class FusedQKVPerGroup:
    """Fused QKV: for each KV head its query heads, then its key, then its value.

    The parameters are query, key and value: kernels ([D, N, H] and [D, K, H]) or biases ([N, H] and
    [K, H]). Multi-head attention has [q, k, v] per head (GPT-NeoX, BLOOM), multi-query attention
    [all queries, k, v] (Falcon 7B).
    """

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        outputs = sum(math.prod(shape[-2:]) for shape in params)
        return (outputs, *params[0][:-2])

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        *inputs, heads, width = params[0]
        groups = params[1][-2]
        by_group = hf_tensor.reshape(groups, heads // groups + 2, width, *inputs)
        parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
        return [np.moveaxis(part.reshape(-1, width, *inputs), (0, 1), (-2, -1)) for part in parts]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        width, groups = params[0].shape[-1], params[1].shape[-2]
        inputs = params[0].shape[:-2]
        front = [np.moveaxis(x, (-2, -1), (0, 1)) for x in params]
        parts = [x.reshape(groups, -1, width, *inputs) for x in front]
        return np.concatenate(parts, axis=1).reshape(self.hf_shape([x.shape for x in params]))


@dataclass(frozen=True, kw_only=True)
class FusedPerGroup:
    """Matrix [outputs, inputs] with the parameters concatenated per group of heads.

    The parameters are kernels [D, N] or [D, N, H], each with its own H, and with its own N if the
    groups are not heads: [k, v] of head 0, ... (DeepSeek), [q, k, values, gates] of key head 0, ...
    (Qwen 3 Next).

    Attributes:
        groups: Number of groups; None is the number of heads of the first parameter.
    """

    groups: int | None = None

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        return sum(math.prod(shape[1:]) for shape in params), params[0][0]

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        groups = self.groups or params[0][1]
        by_group = hf_tensor.T.reshape(params[0][0], groups, -1)
        widths = [math.prod(shape[1:]) // groups for shape in params]
        parts = np.split(by_group, np.cumsum(widths)[:-1], axis=-1)
        return [part.reshape(shape) for part, shape in zip(parts, params, strict=True)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        inputs, heads = params[0].shape[:2]
        parts = [x.reshape(inputs, self.groups or heads, -1) for x in params]
        return np.concatenate(parts, axis=-1).reshape(inputs, -1).T


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """Parameters interleaved along an axis: gate, up, gate, up (Phi-3-small, gpt-oss).

    Attributes:
        part: Transform of each parameter.
        axis: The axis, counted from the first.
    """

    part: Transform = LinearKernel()
    axis: int = 0

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        shape = list(self.part.hf_shape([params[0]]))
        shape[self.axis] *= len(params)
        return tuple(shape)

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        count, first = len(params), np.moveaxis(hf_tensor, self.axis, 0)
        parts = [np.moveaxis(first[i::count], 0, self.axis) for i in range(count)]
        return [self.part.from_hf(x, [shape])[0] for x, shape in zip(parts, params, strict=True)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        parts = [self.part.to_hf([x]) for x in params]
        stacked = np.stack(parts, axis=self.axis + 1)
        return stacked.reshape(self.hf_shape([x.shape for x in params]))


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
class StackedExperts:
    """The matrices of all experts below one another (DBRX).

    Attributes:
        transposed: Whether each is [outputs, inputs].
    """

    transposed: bool = True

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        experts, inputs, outputs = params[0]
        rows, columns = (outputs, inputs) if self.transposed else (inputs, outputs)
        return experts * rows, columns

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        stacked = hf_tensor.reshape(params[0][0], -1, hf_tensor.shape[-1])
        return [stacked.swapaxes(1, 2) if self.transposed else stacked]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        stacked = params[0].swapaxes(1, 2) if self.transposed else params[0]
        return stacked.reshape(-1, stacked.shape[-1])


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """The matrices of all experts, [experts, outputs, inputs] (Granite)."""

    def hf_shape(self, params: Sequence[Shape]) -> Shape:
        experts, inputs, outputs = params[0]
        return experts, outputs, inputs

    def from_hf(self, hf_tensor: np.ndarray, params: Sequence[Shape]) -> list[np.ndarray]:
        return [hf_tensor.swapaxes(1, 2)]

    def to_hf(self, params: Sequence[np.ndarray]) -> np.ndarray:
        return params[0].swapaxes(1, 2)
