"""Logits and cross-entropy from features and output kernel, in chunks of the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jaxformer.checks import require
from jaxformer.functional import platforms
from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.chunked_logits import (
    LogitInputs,
    LogitOptions,
    chunked_logit_statistics,
    postprocess_logits,
)
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.linear import linear
from jaxformer.functional.losses import (
    LogitStatistics,
    cross_entropy_from_statistics,
    logit_statistics,
    reduce_logit_statistics,
    vocab_shard_start,
)
from jaxformer.functional.shape_annotations import axis_mismatch_message

MAX_UNCHUNKED_LOGITS = 2**24  # per device; up to this number they are saved for the backward pass
# Logits per chunk: few fit into a CPU's cache, many fill a GPU.
LOGITS_PER_CHUNK = {"cpu": 2**22, "gpu": 2**27, "tpu": 2**25}
MIN_CHUNK_SIZE = 512  # ids; a narrower product does not fill the matrix units


def vocab_chunk_size(tokens: int, vocab_size: int, *, platform: str | None = None) -> int:
    """Number of vocabulary ids per chunk; the whole vocabulary if there are few logits.

    Up to `MAX_UNCHUNKED_LOGITS` logits are one chunk and are saved, which spares the backward pass
    a product. Otherwise the size is a multiple of `MIN_CHUNK_SIZE` for about `LOGITS_PER_CHUNK`
    logits.

    Args:
        tokens: Tokens of this device.
        vocab_size: Vocabulary ids of this device.
        platform: "cpu", "gpu" or "tpu"; None is the platform of the traced program.

    Returns:
        The number of ids.

    Raises:
        ValueError: The platform is unknown.
    """
    names = tuple(LOGITS_PER_CHUNK)
    require(platform in (None, *names), f"platform must be one of {names}; got {platform!r}.")
    if tokens * vocab_size <= MAX_UNCHUNKED_LOGITS:
        return vocab_size
    max_logits = LOGITS_PER_CHUNK[platform or platforms.target_platform()]
    return min(vocab_size, MIN_CHUNK_SIZE * max(1, max_logits // (tokens * MIN_CHUNK_SIZE)))


@typechecked
def linear_logits(
    features: Float[Array, "*batch D"],
    kernel: Float[Array, "..."],
    bias: Float[Array, " V"] | None = None,
    *,
    vocabulary_axis: int = 1,
    multiplier: float = 1.0,
    softcap: float | None = None,
    masked_ids: tuple[int, ...] = (),
    axis_name: str | None = None,
) -> Float32[Array, "*batch V"]:
    """Logits from features and kernel, with multiplier, soft cap and masked ids, float32.

        logits = soft_cap(multiplier * (features @ kernel + bias)), minus infinity at masked_ids

    Args:
        features: In any float dtype, which is also the dtype of the product.
        kernel: ``[D, V]`` in the dtype of `features`, or a token embedding ``[V, D]``.
        bias: In any float dtype.
        vocabulary_axis: The vocabulary axis of `kernel`: 1, or 0 for a token embedding.
        multiplier: Factor of the product.
        softcap: Soft cap of the logits; None is no cap.
        masked_ids: Ids with probability 0, counted over all devices.
        axis_name: Mesh axis over which the vocabulary is sharded.

    Returns:
        The logits.

    Raises:
        ValueError: As in `linear`, `vocabulary_axis` is neither 0 nor 1, or a masked id is no id.
    """
    _check_lm_head_shapes(features, kernel, bias, vocabulary_axis)
    products = linear(features, kernel if vocabulary_axis else kernel.T, bias)
    masked = _id_mask(kernel.shape[vocabulary_axis], masked_ids, axis_name)
    return postprocess_logits(products, masked, multiplier, softcap)


@typechecked
def linear_logit_statistics(
    features: Float[Array, "*batch D"],
    kernel: Float[Array, "..."],
    targets: Integer[Array, "*batch"],
    bias: Float[Array, " V"] | None = None,
    *,
    vocabulary_axis: int = 1,
    multiplier: float = 1.0,
    softcap: float | None = None,
    masked_ids: tuple[int, ...] = (),
    chunk_size: int | None = None,
    axis_name: str | None = None,
) -> LogitStatistics:
    """`logit_statistics` of `linear_logits`, computed in chunks of the vocabulary.

    The forward pass saves the log-normaliser of each token and the backward pass recomputes the
    logits, so both need memory for ``tokens * chunk_size`` logits. Per chunk C, with the cotangents
    z', t' and m' of log_z, target and mean:

        log_z = logsumexp over C of logsumexp(logits_C)
        d logits_C = z' * exp(logits_C - log_z) + t' * one_hot_C + m' / V
        d kernel_C = features^T @ d products_C
        d features = sum over C of d products_C @ kernel_C^T

    Sums over chunks are computed in float32.

    Args:
        features: See `linear_logits`.
        kernel: See `linear_logits`.
        targets: Ids in [0, V), counted over all devices.
        bias: See `linear_logits`.
        vocabulary_axis: See `linear_logits`.
        multiplier: See `linear_logits`.
        softcap: See `linear_logits`.
        masked_ids: See `linear_logits`.
        chunk_size: Ids per chunk; None is `vocab_chunk_size`. If one chunk holds the whole
            vocabulary, the logits are saved for the backward pass.
        axis_name: See `linear_logits`. Devices communicate once, as in `logit_statistics`.

    Returns:
        The statistics, in float32.

    Raises:
        ValueError: As in `linear_logits`, or `chunk_size` is not positive.

    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024. arXiv:2411.09009
        Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. arXiv:1805.02867
    """
    _check_lm_head_shapes(features, kernel, bias, vocabulary_axis)
    local_vocab_size = kernel.shape[vocabulary_axis]
    if chunk_size is None:
        chunk_size = vocab_chunk_size(targets.size, local_vocab_size)
    require(chunk_size >= 1, f"chunk_size must be positive; got {chunk_size}.")
    if chunk_size >= local_vocab_size:
        options: Any = dict(vocabulary_axis=vocabulary_axis, multiplier=multiplier, softcap=softcap)
        options |= dict(masked_ids=masked_ids, axis_name=axis_name)
        logits = linear_logits(features, kernel, bias, **options)
        return logit_statistics(logits, targets, axis_name=axis_name)
    inputs = LogitInputs(
        features.reshape(-1, features.shape[-1]),
        kernel,
        bias,
        _id_mask(local_vocab_size, masked_ids, axis_name),
        targets.reshape(-1) - vocab_shard_start(local_vocab_size, axis_name),
    )
    # Initial carries of the loops need the varying-axes types that the loops give them.
    inputs = pvary_like(inputs, inputs)
    logit_options = LogitOptions(vocabulary_axis, multiplier, softcap, chunk_size)
    of_rows = chunked_logit_statistics(logit_options, inputs)
    statistics = LogitStatistics(*(x.reshape(targets.shape) for x in of_rows))
    return reduce_logit_statistics(statistics, targets, local_vocab_size, axis_name=axis_name)


@typechecked
def linear_cross_entropy(
    features: Float[Array, "*batch D"],
    kernel: Float[Array, "..."],
    targets: Integer[Array, "*batch"],
    bias: Float[Array, " V"] | None = None,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocabulary_axis: int = 1,
    multiplier: float = 1.0,
    softcap: float | None = None,
    masked_ids: tuple[int, ...] = (),
    chunk_size: int | None = None,
    axis_name: str | None = None,
) -> Float32[Array, "*batch"]:
    """Cross-entropy of `linear_logits`, computed in chunks of the vocabulary.

    Args:
        features: See `linear_logits`.
        kernel: See `linear_logits`.
        targets: Ids in [0, V), counted over all devices.
        bias: See `linear_logits`.
        z_loss: See `token_cross_entropy`.
        label_smoothing: See `token_cross_entropy`.
        vocabulary_axis: See `linear_logits`.
        multiplier: See `linear_logits`.
        softcap: See `linear_logits`.
        masked_ids: See `linear_logits`.
        chunk_size: See `linear_logit_statistics`.
        axis_name: See `linear_logits`.

    Returns:
        The loss of each token, in nats; NaN where a target is out of range.

    Raises:
        ValueError: As in `linear_logit_statistics` and `token_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jaxformer import functional as F
        >>> features, kernel = jnp.ones((3, 8)), jnp.zeros((8, 1000))  # [tokens, D], [D, V]
        >>> targets = jnp.array([0, 500, 1000])
        >>> losses = F.linear_cross_entropy(features, kernel, targets, chunk_size=256)
        >>> np.asarray(losses).round(3)  # log(1000), and NaN for an id out of range
        array([6.908, 6.908,   nan], dtype=float32)
    """
    options: Any = dict(vocabulary_axis=vocabulary_axis, multiplier=multiplier, softcap=softcap)
    options |= dict(masked_ids=masked_ids, chunk_size=chunk_size, axis_name=axis_name)
    statistics = linear_logit_statistics(features, kernel, targets, bias, **options)
    return cross_entropy_from_statistics(statistics, z_loss=z_loss, label_smoothing=label_smoothing)


def _check_lm_head_shapes(
    features: Array, kernel: Array, bias: Array | None, vocabulary_axis: int
) -> None:
    """Check shapes and dtypes of features, kernel and bias."""
    require(vocabulary_axis in (0, 1), f"vocabulary_axis must be 0 or 1; got {vocabulary_axis}.")
    require(kernel.ndim == 2, f"kernel must be [D, V] or [V, D]; got shape {kernel.shape}.")
    if kernel.shape[1 - vocabulary_axis] != features.shape[-1]:
        of_kernel, of_features = (kernel.shape, 1 - vocabulary_axis), (features.shape, -1)
        reason = axis_mismatch_message("D", ("kernel", *of_kernel), ("features", *of_features))
        raise ValueError(f"{reason}; vocabulary_axis is {vocabulary_axis}.")
    if bias is not None and bias.shape[0] != kernel.shape[vocabulary_axis]:
        of_kernel, of_bias = (kernel.shape, vocabulary_axis), (bias.shape, 0)
        reason = axis_mismatch_message("V", ("bias", *of_bias), ("kernel", *of_kernel))
        raise ValueError(f"{reason}.")
    dtypes = f"{kernel.dtype} and {features.dtype}"
    require(features.dtype == kernel.dtype, f"Cast kernel to the dtype of features; got {dtypes}.")


def _id_mask(
    local_vocab_size: int, masked_ids: tuple[int, ...], axis_name: str | None
) -> Bool[Array, " V"] | None:
    """Return the mask of ids in this device's shard; None if no ids are masked."""
    if not masked_ids:
        return None
    vocab_size = local_vocab_size * (1 if axis_name is None else jax.lax.axis_size(axis_name))
    invalid = [i for i in masked_ids if not 0 <= i < vocab_size]
    require(not invalid, f"masked_ids must be from 0 to {vocab_size - 1}; got {invalid}.")
    masked = jnp.zeros(vocab_size, bool).at[jnp.asarray(masked_ids)].set(True)
    start = vocab_shard_start(local_vocab_size, axis_name)
    return jax.lax.dynamic_slice_in_dim(masked, start, local_vocab_size)
