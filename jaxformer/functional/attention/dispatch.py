"""Choose the attention implementation: xla, blockwise, cudnn or splash."""

import logging
from typing import Any, Literal

from jaxformer.functional.attention.cudnn import describe_segments
from jaxformer.functional.attention.kernels import (
    ArrayOrShape,
    AttentionRequest,
    chunks_as_segments,
    cudnn_unsupported_reason,
    splash_unsupported_reason,
)
from jaxformer.functional.attention.lazy_masks import AttentionBias, AttentionMask, materialize
from jaxformer.functional.platforms import target_device

LOG = logging.getLogger("jaxformer")
Implementation = Literal["auto", "xla", "blockwise", "cudnn", "splash"]


def choose_implementation(
    query: ArrayOrShape,
    key: ArrayOrShape,
    value: ArrayOrShape,
    implementation: Implementation,
    request: AttentionRequest,
) -> Implementation:
    """Resolve "auto" and log why; refuse an implementation that lacks what is requested.

    Args:
        query: Queries, or their shape and dtype.
        key: Keys, likewise.
        value: Values, likewise.
        implementation: As in `dot_product_attention`.
        request: Mask, bias and options of the call.

    Returns:
        The chosen implementation, never "auto".

    Raises:
        ValueError: The named implementation does not support the request; the message says why.
    """

    def unsupported_reason(implementation: Implementation) -> str | None:
        match implementation:
            case "blockwise":
                return _blockwise_unsupported_reason(request)
            case "cudnn":
                return cudnn_unsupported_reason(query, key, value, request)
            case "splash":
                return splash_unsupported_reason(query, key, value, request)
        return None

    if implementation != "auto":
        if (reason := unsupported_reason(implementation)) is not None:
            raise ValueError(
                f'implementation="{implementation}" cannot be used: {reason}. Use "auto".'
            )
        return implementation
    T, S = query.shape[-3], value.shape[-3]
    kernels: dict[str, Implementation] = {"gpu": "cudnn", "tpu": "splash"}
    choice = kernels.get(platform := target_device().platform)
    fallback_reason = (
        f"there is no kernel for a {platform}" if choice is None else unsupported_reason(choice)
    )
    if choice is None or fallback_reason is not None:
        blocks = prefer_blockwise(T, S) and unsupported_reason("blockwise") is None
        choice = "blockwise" if blocks else "xla"
    explanation = "" if fallback_reason is None else f", since {fallback_reason}"
    if choice == "cudnn":
        explanation = describe_segments(chunks_as_segments(request.mask))
    LOG.info("Attention of %d queries to %d keys: %s%s", T, S, choice, explanation)
    return choice


def materialize_for_xla(mask_or_bias: Any, implementation: Implementation, num_axes: int) -> Any:
    """Materialize a lazy mask or bias if attention of its size multiplies whole matrices.

    Layers that share a mask call it once, outside of their loop.

    Args:
        mask_or_bias: An `AttentionMask`, an `AttentionBias` or None.
        implementation: As in `dot_product_attention`.
        num_axes: Axes of the queries, ``[*batch, T, N, H]``.

    Returns:
        The array, or the same object where blocks or a kernel take it as it is.
    """
    if mask_or_bias is None or implementation not in ("auto", "xla"):
        return mask_or_bias
    T, S = mask_or_bias.query_positions.shape[-1], mask_or_bias.key_positions.shape[-1]
    if implementation == "auto" and prefer_blockwise(T, S):
        return mask_or_bias
    return materialize(mask_or_bias, num_axes=num_axes)


def _blockwise_unsupported_reason(request: AttentionRequest) -> str | None:
    """Why blockwise attention does not support the request; None if it does."""
    lazy_types = AttentionMask | AttentionBias | None
    mask_and_bias = {"mask": request.mask, "bias": request.bias}
    names = " and ".join(name for name, x in mask_and_bias.items() if not isinstance(x, lazy_types))
    if not names:
        return None
    return f"it takes an AttentionMask and an attention_bias, not arrays; got an array as {names}"


def prefer_blockwise(num_queries: int, num_keys: int) -> bool:
    """Whether "auto" prefers blockwise attention: from 64 queries and 65,536 scores per head on.

    Args:
        num_queries: Number of queries.
        num_keys: Number of keys.

    Returns:
        True from 64 queries and 65,536 scores per head on.
    """
    return num_queries >= 64 and num_queries * num_keys >= 256 * 256
