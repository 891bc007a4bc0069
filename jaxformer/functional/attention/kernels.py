"""Fused attention kernels: cuDNN on NVIDIA GPUs, splash on TPUs; what each supports."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.cudnn import SegmentedCudnnKernel, takes_offsets
from jaxformer.functional.attention.lazy_masks import AttentionMask, MaskRule
from jaxformer.functional.attention.online_softmax import finite_sinks
from jaxformer.functional.attention.scores import resolve_scale
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.external_kernels import (
    AttentionKernel,
    SegmentIds,
    kernel_attention,
    run_outside_traces,
)
from jaxformer.functional.platforms import LANES, compute_capability_major, target_device

ArrayOrShape = Array | jax.ShapeDtypeStruct  # only shape and dtype are used


@typechecked
def cudnn_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    mask: AttentionMask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "*batch T N H"]:
    """`dot_product_attention` by cuDNN's fused kernel; see `cudnn_unsupported_reason`.

    On Hopper GPUs and later, the segments of packed rows are passed as offsets, and tiles between
    segments are skipped; rows of one segment need none. If a row has more than 16 segments, and on
    older GPUs, each sequence has a mask [T, S], shared by all heads.

    Args:
        query: Queries of N heads, in bfloat16 or float16.
        key: Keys of K heads.
        value: Values of K heads.
        mask: A mask of contiguous tokens, or None.
        scale: Multiplies the dot products.
        sinks: As in `dot_product_attention`.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    References:
        Dao et al., FlashAttention, 2022. arXiv:2205.14135
    """
    mask = chunks_as_segments(mask)
    rule = MaskRule() if mask is None else mask.rule
    # A window that ends with the query's own token is causal.
    causal = rule.causal or (rule.window is not None and rule.lookahead == 0)
    query, scale = resolve_scale(query, scale)
    options: Any = dict(max_segments=rule.max_segments, has_offsets=takes_offsets())
    kernel = SegmentedCudnnKernel(scale, causal, rule.window, **options)
    return _attend_flat_batch(kernel, [query, key, value], mask, sinks)


def _attend_flat_batch(
    kernel: AttentionKernel, heads: list[Array], mask: AttentionMask | None, sinks: Array | None
) -> Any:
    """Flatten the batch axes, make all arrays vary over common mesh axes, and run the kernel."""
    flat_arrays = [x.reshape(-1, *x.shape[-3:]) for x in heads]
    sinks = None if sinks is None else finite_sinks(sinks)
    kernel_args = *flat_arrays, flat_segment_ids(mask, heads[0].shape[:-3]), sinks
    output = kernel_attention(kernel, *pvary_like(kernel_args, kernel_args))
    return output.reshape(heads[0].shape)


def chunks_as_segments(mask: AttentionMask | None) -> AttentionMask | None:
    """Return the mask of contiguous tokens with each chunk as a segment of its own.

    If it is causal, a window as long as a chunk excludes no further key, and lets kernels skip
    tiles.
    """
    if mask is None or mask.rule.chunk is None:
        return mask
    rule, chunk, T = mask.rule, mask.rule.chunk, mask.query_positions.shape[-1]
    segments = (
        positions // chunk if ids is None else ids * (-(-T // chunk)) + positions // chunk
        for positions, ids in (
            (mask.query_positions, mask.query_segments),
            (mask.key_positions, mask.key_segments),
        )
    )
    # Of each document the chunks before its last are whole; padding may be one segment more.
    documents = 0 if mask.query_segments is None else rule.max_segments
    rule = replace(
        rule,
        chunk=None,
        window=min(chunk, rule.window or chunk) if rule.causal else rule.window,
        max_segments=None if documents is None else documents + 1 + (T - 1) // chunk,
    )
    query_segments, key_segments = segments
    return mask._replace(query_segments=query_segments, key_segments=key_segments, rule=rule)


def flat_segment_ids(mask: AttentionMask | None, batch: tuple[int, ...]) -> SegmentIds:
    """Flatten segment ids of queries and keys over the batch; None if the mask has none."""
    if mask is None or mask.query_segments is None or mask.key_segments is None:
        return None
    query_ids, key_ids = (
        jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])
        for x in (mask.query_segments, mask.key_segments)
    )
    return query_ids, key_ids


@typechecked
def splash_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K H"],
    mask: AttentionMask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "*batch T N H"]:
    """`dot_product_attention` by JAX's splash kernel; see `splash_unsupported_reason`.

    Fully masked tiles are skipped.

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads.
        mask: A mask of contiguous tokens, or None.
        scale: Multiplies the dot products.
        logit_softcap: Bound on the absolute score.
        sinks: As in `dot_product_attention`.
        interpret: Whether to interpret the kernel, slowly, on any platform; for tests.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    References:
        Dao et al., FlashAttention, 2022. arXiv:2205.14135
        Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite
        Context, 2023. arXiv:2310.01889
    """
    (T, N, width), S = query.shape[-3:], key.shape[-3]
    mask = chunks_as_segments(mask)
    rule = MaskRule() if mask is None else mask.rule
    query, scale = resolve_scale(query, scale)
    heads = [query * scale, key, value]
    if pad := -width % (LANES // 2):  # zeros add nothing to scores
        heads = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) for x in heads]
    kernel = SplashKernel(N, T, S, rule, logit_softcap, interpret)
    return _attend_flat_batch(kernel, heads, mask, sinks)[..., :width]


@dataclass(frozen=True)
class SplashKernel(AttentionKernel):
    """Splash attention with its static options."""

    head_axis = 1
    num_heads: int
    num_queries: int
    num_keys: int
    rule: MaskRule
    logit_softcap: float | None
    interpret: bool

    def static_arrays(self) -> Any:
        """JAX's splash kernel object, whose mask info is NumPy arrays."""
        return _make_splash_kernel(self)

    def __call__(
        self, static_arrays: Any, query: Array, key: Array, value: Array, segments: SegmentIds
    ) -> Float[Array, "B N T H"]:
        """Run splash attention."""
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        ids = None if segments is None else splash.SegmentIds(*segments)
        return jax.vmap(static_arrays)(query, key, value, ids)


@lru_cache(maxsize=64)
def _make_splash_kernel(options: SplashKernel) -> Any:
    # Here, since few programs need it and it takes long to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (T, S), rule = (options.num_queries, options.num_keys), options.rule
    lookahead = 0 if rule.causal else rule.lookahead
    mask: Any = splash.CausalMask((T, S)) if rule.causal else splash.FullMask((T, S))
    if rule.window is not None:
        mask = splash.LocalMask((T, S), window_size=(rule.window - 1, lookahead), offset=0)
    of_queries = "block_q", "block_q_dkv", "block_q_dq"
    of_keys = "block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq"
    sizes: Any = dict.fromkeys(of_queries, math.gcd(512, T))
    sizes |= dict.fromkeys(of_keys, math.gcd(512, S))
    kernel = run_outside_traces(
        splash.make_splash_mha_single_device,
        splash.MultiHeadMask([mask] * options.num_heads),
        block_sizes=splash.BlockSizes(**sizes),
        attn_logits_soft_cap=options.logit_softcap,
        interpret=options.interpret,
    )
    return jax.tree.map(np.asarray, kernel)


class AttentionRequest(NamedTuple):
    """Mask, bias and options of a `dot_product_attention` call.

    Attributes:
        mask: An array, an `AttentionMask`, or None.
        bias: An array, an `AttentionBias`, or None.
        logit_softcap: Bound on the scores.
        normalizer: How scores become weights.
        dropout_rate: Dropout rate of the weights.
    """

    mask: Any = None
    bias: Any = None
    logit_softcap: float | None = None
    normalizer: str = "softmax"
    dropout_rate: float = 0.0


def cudnn_unsupported_reason(
    query: ArrayOrShape, key: ArrayOrShape, value: ArrayOrShape, request: AttentionRequest
) -> str | None:
    """Return why cuDNN attention does not support the request, or None."""
    platform, kind = target_device()
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, and this is a {platform}"
    if (generation := compute_capability_major(kind)) < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or more; got {kind}"
    if (dtypes := dtype_names(query, key, value)) not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16; got {dtypes}"
    max_head_dim = 256 if generation >= 9 else 128
    if query.shape[-1] % 8 or query.shape[-1] > max_head_dim:
        return (
            f"heads have a multiple of 8 and on an {kind} at most {max_head_dim} features; "
            f"got {query.shape[-1]}"
        )
    if request.logit_softcap is not None:
        return f"it has no soft cap; got logit_softcap {request.logit_softcap}"
    T, S = query.shape[-3], value.shape[-3]
    if T % 2 or S % 2:
        return f"its gradient is of even lengths; got {T} and {S}"
    reason = _common_unsupported_reason(query, value, request)
    rule = getattr(request.mask, "rule", MaskRule())
    if reason is None and rule.lookahead > 0 and not rule.causal:
        return f"its windows end with the query's token; got a lookahead of {rule.lookahead}"
    return reason


def dtype_names(*arrays: ArrayOrShape) -> str:
    """Return the distinct dtypes of the arrays, as text."""
    return ", ".join(sorted({str(x.dtype) for x in arrays}))


def splash_unsupported_reason(
    query: ArrayOrShape, key: ArrayOrShape, value: ArrayOrShape, request: AttentionRequest
) -> str | None:
    """Return why splash attention does not support the request, or None."""
    if (platform := target_device().platform) != "tpu":
        return f"it runs on TPUs, and this is a {platform}"
    if (dtypes := dtype_names(query, key, value)) not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 or float32; got {dtypes}"
    T, S = query.shape[-3], value.shape[-3]
    if T % LANES or S % LANES:
        return f"lengths are multiples of {LANES}; got {T} queries and {S} keys"
    if query.shape[-1] > 2 * LANES:
        return f"heads have at most {2 * LANES} features; got {query.shape[-1]}"
    return _common_unsupported_reason(query, value, request)


def _common_unsupported_reason(
    query: ArrayOrShape, value: ArrayOrShape, request: AttentionRequest
) -> str | None:
    """Return why neither kernel supports the request, or None."""
    if jax.config.values["jax_enable_checks"]:
        return "in its program no type says how devices differ, which JAX_ENABLE_CHECKS asks for"
    if value.shape[-1] != query.shape[-1]:
        return f"values are as wide as keys; got {value.shape[-1]} and {query.shape[-1]}"
    T, S, mask = query.shape[-3], value.shape[-3], request.mask
    rule = getattr(mask, "rule", None)
    is_simple = rule is not None and rule.contiguous_positions and rule.block_sparse is None
    if mask is not None and not is_simple:
        return (
            "it counts tokens itself; the mask must be an AttentionMask whose rule is contiguous; "
            f"got {type(mask).__name__ if rule is None else rule}"
        )
    if mask is not None and T != S:
        return f"queries in order are the keys' tokens; got {T} queries and {S} keys"
    if request.bias is not None:
        return "it adds nothing to the scores; got a bias"
    if request.normalizer != "softmax":
        return f"its weights are a softmax; got normalizer {request.normalizer!r}"
    if request.dropout_rate != 0.0:
        return f"it drops no weights; got dropout_rate {request.dropout_rate}"
    return None
