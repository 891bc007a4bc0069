"""cuDNN's fused attention of NVIDIA GPUs, with segments as a mask or as offsets.

Only a private function of JAX takes offsets; no other file imports it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.masks import segment_mask
from jaxformer.functional.external_kernels import KERNEL_REMAT_NAME, AttentionKernel, SegmentIds
from jaxformer.functional.platforms import compute_capability_major, target_device

MAX_SEGMENTS = 16  # per row; the gradient's memory and time grow with it
T = TypeVar("T")


@typechecked
def segment_offsets(
    segments: Integer[Array, "B T"], max_segments: int
) -> tuple[Int[Array, "B offsets"], Int[Array, "B M"]]:
    """Return the offset and the length of each segment of a row.

    A segment is a run of equal numbers. If a row has more than M segments, the last are left out.

    Args:
        segments: Document number of each token.
        max_segments: M, the maximum number of segments per row.

    Returns:
        Offsets [B, M + 1] and lengths [B, M] in tokens, -1 after the row's last segment. The last
        offset is -1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> offsets, lengths = F.segment_offsets(jnp.array([[1, 1, 1, 2, 2, 0]]), 4)
        >>> print(offsets, lengths)
        [[ 0  3  5 -1 -1]] [[ 3  2  1 -1]]
    """
    T, number = segments.shape[1], jnp.arange(max_segments + 1)[None, :, None]
    # Written out, since the compiler would take the sum again for each number that reads it.
    begun = jax.lax.optimization_barrier(jnp.cumsum(_starts(segments), axis=1, dtype=jnp.int32))
    offsets = jnp.sum(begun[:, None] <= number, axis=2, dtype=jnp.int32)
    lengths = jnp.where(offsets[:, :-1] < T, jnp.diff(offsets, axis=1), -1)
    return jnp.where(offsets < T, offsets, -1).at[:, -1].set(-1), lengths


def takes_offsets() -> bool:
    """Whether cuDNN takes segments as offsets: on Hopper GPUs and later."""
    return compute_capability_major(target_device().kind) >= 9


def describe_segments(mask: Any) -> str:
    """Describe the form in which cuDNN gets the segments of a mask; empty if there are none."""
    if mask is None or mask.query_segments is None:
        return ""
    if mask.rule.max_segments == 1:
        return ", one segment a row"
    if not takes_offsets():
        return f", segments as a T x T mask, since an {target_device().kind} takes no offsets"
    return f", segments as offsets, or as a T x T mask if a row has more than {MAX_SEGMENTS}"


def _starts(segments: Array) -> Array:
    """Whether a segment begins at each token."""
    return jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0


def _segment_bounds(has_offsets: bool) -> tuple[int, ...]:
    """Up to how many segments per row each form but the mask takes: none and offsets."""
    return (1, MAX_SEGMENTS) if has_offsets else (1,)


def switch_on_segments(
    function: Callable[[int | None], T],
    segments: Array | None,
    axis_names: tuple[str, ...],
    *,
    causal: bool,
) -> T:
    """Call a function of `MaskRule.max_segments`, in one conditional for all layers.

    On a GPU each conditional waits until the host has read its condition. Padding (segment 0) at
    the end of a row with one document is not masked if attention is causal: no token sees it.

    Args:
        function: From the maximum number of segments of a row, None if it is unknown, to arrays;
            differentiated inside, so that both passes are in the same branch.
        segments: Document number of each token, [B, T]; None calls the function with None, as do
            devices or functions without cuDNN's attention.
        axis_names: Mesh axes that shard the rows; all devices take the same branch.
        causal: Whether all attention is causal.

    Returns:
        The result of the function.
    """
    if segments is None or target_device().platform != "gpu":
        return function(None)
    if KERNEL_REMAT_NAME not in str(jax.make_jaxpr(function, static_argnums=0)(1)):
        return function(None)
    bounds = _segment_bounds(takes_offsets())
    counts = jnp.sum(_starts(segments), axis=1)
    documents = jnp.where(causal & (segments[:, -1] == 0), counts - 1, counts)
    maxima = jax.lax.pmax(jnp.stack([jnp.max(documents), jnp.max(counts)]), axis_names)
    index = jnp.where(maxima[0] <= 1, 0, jnp.searchsorted(jnp.array(bounds), maxima[1]))
    branches = [partial(function, bound) for bound in (*bounds, bounds[-1] + 1)]
    return jax.lax.switch(index, branches)


@dataclass(frozen=True)
class CudnnKernel(AttentionKernel):
    """cuDNN's fused attention with its static options; segments are a mask of all pairs."""

    head_axis = 2
    scale: float
    causal: bool
    window: int | None
    reads_segments: bool = True

    def __call__(
        self, static_arrays: Any, query: Array, key: Array, value: Array, segments: SegmentIds
    ) -> Float[Array, "B T N H"]:
        """Run cuDNN attention."""
        ids = segments if self.reads_segments else None
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=None if ids is None else segment_mask(*ids)[:, None],
            scale=self.scale,
            is_causal=self.causal,
            local_window_size=None if self.window is None else (self.window - 1, 0),
            implementation="cudnn",
        )


@dataclass(frozen=True)
class SegmentedCudnnKernel(CudnnKernel):
    """The cheapest form of segments for a batch: none, offsets, or a mask where there are many."""

    max_segments: int | None = None
    has_offsets: bool = True  # a field, since JAX reuses the trace of an equal kernel

    def alternatives(self, segments: SegmentIds) -> tuple[Any, tuple[AttentionKernel, ...]]:
        """One segment a row, up to `MAX_SEGMENTS`, or more; one of them if the rule says which.

        Without the rule, GPUs before Hopper have a mask: the host would wait in each layer.
        """
        options = self.scale, self.causal, self.window
        masked = CudnnKernel(*options)
        if segments is None:
            return 0, (masked,)
        bounds = _segment_bounds(self.has_offsets)
        packed = (PackedCudnnKernel(*options),) * self.has_offsets
        kernels = replace(masked, reads_segments=False), *packed, masked
        if self.max_segments is not None:
            return 0, (kernels[bisect_left(bounds, self.max_segments)],)
        if not packed:
            return 0, (masked,)
        count = jnp.max(jnp.sum(_starts(segments[0]), axis=1))
        return jnp.searchsorted(jnp.array(bounds), count), kernels


class PackedCudnnKernel(CudnnKernel):
    """Rows of up to `MAX_SEGMENTS` segments as offsets, on Hopper GPUs and later ones.

    The residuals of the forward pass have a row [N, T] per segment of the batch.

    References:
        NVIDIA, cuDNN Frontend, Attention: ragged offsets. docs.nvidia.com/deeplearning/cudnn
    """

    def __call__(
        self, static_arrays: Any, query: Array, key: Array, value: Array, segments: SegmentIds
    ) -> Float[Array, "B T N H"]:
        """Run cuDNN attention on packed rows."""
        from jax._src.cudnn import fused_attention_stablehlo as fused

        assert segments is not None
        if jax.__version_info__ <= (0, 10, 2):  # there keys' offsets count the queries' heads
            copies = query.shape[2] // key.shape[2]
            key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        offsets, lengths = segment_offsets(segments[0], MAX_SEGMENTS)
        masks = fused.MaskType
        mask_type = masks.PADDING_CAUSAL if self.causal else masks.PADDING
        options: Any = dict(scale=self.scale, sliding_window_length=self.window)
        options |= dict(q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets)
        return fused.dot_product_attention(query, key, value, mask_type=mask_type, **options)

    def compact(self, sums: Array, segments: SegmentIds) -> Float[Array, "B N T"]:
        """From rows of segments to rows of the batch."""
        begins, first = _segments_of_batch(segments)
        _, N, T = sums.shape
        token, begin = jnp.arange(T)[None, :], begins[:, :, None]
        begun = begin <= token[None]
        row = first[:, None] + jnp.sum(begun, axis=1) - 1
        in_segment = token - jnp.max(jnp.where(begun, begin, 0), axis=1)
        return sums[row[:, None], jnp.arange(N)[None, :, None], in_segment[:, None]]

    def expand(self, sums: Float[Array, "B N T"], segments: SegmentIds) -> Array:
        """From rows of the batch to rows of segments; what is behind a segment is not read."""
        begins, first = _segments_of_batch(segments)
        B, N, T = sums.shape
        segment = jnp.arange(B * MAX_SEGMENTS)
        row = jnp.sum(first[:, None] <= segment[None], axis=0) - 1
        begin = begins[row, jnp.minimum(segment - first[row], MAX_SEGMENTS - 1)]
        token = jnp.minimum(begin[:, None] + jnp.arange(T)[None], T - 1)
        return sums[row[:, None, None], jnp.arange(N)[None, :, None], token[:, None]]


def _segments_of_batch(segments: SegmentIds) -> tuple[Int[Array, "B M"], Int[Array, " B"]]:
    """Where each segment of a row begins, T for none, and the batch's segments before each row."""
    assert segments is not None
    offsets = segment_offsets(segments[0], MAX_SEGMENTS)[0][:, :-1]
    counts = jnp.sum(offsets >= 0, axis=1)
    begins = jnp.where(offsets >= 0, offsets, segments[0].shape[1])
    return jax.lax.optimization_barrier((begins, jnp.cumsum(counts) - counts))
