"""Cross-entropy losses over a vocabulary: nats per token, float32."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Integer

from jaxformer.checks import require
from jaxformer.functional.argument_checks import typechecked


class LogitStatistics(NamedTuple):
    """Log-sum-exp, target logit and mean logit of each token."""

    log_z: Float32[Array, "*batch"]  # logsumexp(logits)
    target_logit: Float32[Array, "*batch"]  # NaN for a target out of range
    mean_logit: Float32[Array, "*batch"]


@typechecked
def logit_statistics(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    axis_name: str | None = None,
) -> LogitStatistics:
    """Compute log-sum-exp, target logit and mean logit of each token.

        log_z = logsumexp(logits);    target = logits[target];    mean = mean(logits)

    Args:
        logits: Scores over the vocabulary, in any float dtype.
        targets: Ids in [0, V).
        axis_name: Mesh axis over which the vocabulary of `logits` is sharded; `targets` are
            replicated. Devices exchange one number per token for each statistic that is used, and
            the maximum.

    Returns:
        The statistics, in float32.
    """
    wide, local_vocab_size = logits.astype(jnp.float32), logits.shape[-1]
    local_ids = targets - vocab_shard_start(local_vocab_size, axis_name)
    is_local = (local_ids >= 0) & (local_ids < local_vocab_size)
    index = jnp.where(is_local, local_ids, 0)[..., None]
    target_logit = jnp.take_along_axis(wide, index, axis=-1).squeeze(-1)
    log_z, mean = jax.nn.logsumexp(wide, axis=-1), jnp.mean(wide, axis=-1)
    statistics = LogitStatistics(log_z, jnp.where(is_local, target_logit, 0.0), mean)
    return reduce_logit_statistics(statistics, targets, local_vocab_size, axis_name=axis_name)


def vocab_shard_start(local_vocab_size: int, axis_name: str | None) -> int | Int[Array, ""]:
    """First vocabulary id of this device's shard."""
    return 0 if axis_name is None else local_vocab_size * jax.lax.axis_index(axis_name)


def reduce_logit_statistics(
    statistics: LogitStatistics,
    targets: Integer[Array, "*batch"],
    local_vocab_size: int,
    *,
    axis_name: str | None,
) -> LogitStatistics:
    """Reduce statistics of vocabulary shards over devices; NaN for targets out of range."""
    log_z, target, mean = statistics
    devices = 1
    if axis_name is not None:
        devices = jax.lax.axis_size(axis_name)
        max_log_z = jax.lax.pmax(jax.lax.stop_gradient(log_z), axis_name)
        log_z = max_log_z + jnp.log(jax.lax.psum(jnp.exp(log_z - max_log_z), axis_name))
        target, mean = jax.lax.psum(target, axis_name), jax.lax.pmean(mean, axis_name)
    in_vocabulary = (targets >= 0) & (targets < devices * local_vocab_size)
    return LogitStatistics(log_z, jnp.where(in_vocabulary, target, jnp.nan), mean)


@typechecked
def cross_entropy_from_statistics(
    statistics: LogitStatistics, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Float32[Array, "*batch"]:
    """Cross-entropy of each token from its `LogitStatistics`, in nats.

        loss = (1 - label_smoothing) * (log_z - target)
             + label_smoothing * (log_z - mean)
             + z_loss * log_z ** 2

    Args:
        statistics: Result of `logit_statistics` or `linear_logit_statistics`.
        z_loss: See `token_cross_entropy`.
        label_smoothing: See `token_cross_entropy`.

    Returns:
        The loss of each token; NaN where a target is out of range.

    Raises:
        ValueError: If `label_smoothing` is outside [0, 1], or `z_loss` is negative.
    """
    require(0 <= label_smoothing <= 1, f"label_smoothing must be in [0, 1]; got {label_smoothing}.")
    require(z_loss >= 0, f"z_loss must not be negative; got {z_loss}.")
    loss = statistics.log_z - statistics.target_logit
    if label_smoothing:
        uniform_loss = statistics.log_z - statistics.mean_logit
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform_loss
    if z_loss:
        loss = loss + z_loss * jnp.square(statistics.log_z)
    return loss


@typechecked
def token_cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    axis_name: str | None = None,
) -> Float32[Array, "*batch"]:
    """Cross-entropy of each token, in nats.

        log_z = logsumexp(logits)
        loss = (1 - label_smoothing) * (log_z - logits[target])
             + label_smoothing * (log_z - mean(logits))
             + z_loss * log_z ** 2

    Equal to minus the sum of ``one_hot * log_softmax(logits)``, without building either.

    Args:
        logits: Scores over the vocabulary, in any float dtype.
        targets: Ids in [0, V).
        z_loss: Weight of the penalty that keeps ``log_z`` near 0; PaLM uses 1e-4.
        label_smoothing: Probability spread evenly over the whole vocabulary, including the target
            (PyTorch's convention). Logits must be finite then.
        axis_name: See `logit_statistics`.

    Returns:
        The loss of each token; NaN where a target is out of range, including PyTorch's -100. To
        ignore tokens use the mask of `cross_entropy`.

    Raises:
        ValueError: If `label_smoothing` is outside [0, 1], or `z_loss` is negative.

    References:
        Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015.
        arXiv:1512.00567, section 7 (label smoothing).
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311,
        section 5 (z-loss)
    """
    statistics = logit_statistics(logits, targets, axis_name=axis_name)
    return cross_entropy_from_statistics(statistics, z_loss=z_loss, label_smoothing=label_smoothing)


@typechecked
def cross_entropy(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    mask: Bool[Array, "*batch"] | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> Float32[Array, ""]:
    """Mean cross-entropy over the unmasked tokens.

        loss = sum(mask * token_loss) / sum(mask)

    The mean is over tokens, not over sequences or devices. Over several shards, sum
    `token_cross_entropy` and divide once by the number of tokens: the mean of means differs if
    shards have different numbers of tokens.

    Args:
        logits: Scores over the vocabulary, in any float dtype.
        targets: Ids in [0, V); any value where the mask is False.
        mask: True for tokens in the mean; None is all tokens.
        ignore_index: Target of tokens to ignore; -100 as in PyTorch.
        z_loss: See `token_cross_entropy`.
        label_smoothing: See `token_cross_entropy`.

    Returns:
        A scalar: 0, with gradient 0, if all tokens are masked; NaN if an unmasked target is out of
        range.

    Raises:
        ValueError: As in `token_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> logits = jnp.array([[0.0, 0.0], [0.0, jnp.log(3.0)], [5.0, 5.0]])
        >>> targets = jnp.array([0, 1, 0])
        >>> round(float(F.cross_entropy(logits[:1], targets[:1])), 3)  # log(2)
        0.693
        >>> mask = jnp.array([False, True, False])
        >>> round(float(F.cross_entropy(logits, targets, mask=mask)), 3)  # -log(3 / 4)
        0.288

    References:
        Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762, section 5.4
    """
    is_counted = targets.astype(jnp.int32) != ignore_index  # unsigned dtypes do not hold -100
    mask = is_counted if mask is None else mask & is_counted
    losses = token_cross_entropy(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
    total = jnp.sum(losses, where=mask)
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


@typechecked
def dpo_loss(
    chosen: Float[Array, "*batch"], rejected: Float[Array, "*batch"], *, beta: float
) -> Float32[Array, "*batch"]:
    """Loss of each pair of answers in direct preference optimization (DPO).

        loss = -log sigmoid(beta * (chosen - rejected))

    Args:
        chosen: ``log p(answer) - log p_ref(answer)`` of the preferred answers: the log-likelihood
            under the model less that under the reference, in nats.
        rejected: The same of the other answers.
        beta: Strength with which the model is held to the reference, above 0.

    Returns:
        The loss of each pair, ``log 2`` where the model is the reference.

    Raises:
        ValueError: If `beta` is not positive.

    References:
        Rafailov et al., Direct Preference Optimization: Your Language Model is Secretly a Reward
        Model, 2023. arXiv:2305.18290, equation 7
    """
    require(beta > 0, f"beta must be positive; got {beta}.")
    margin = chosen.astype(jnp.float32) - rejected.astype(jnp.float32)
    return jax.nn.softplus(-beta * margin)


@typechecked
def bits_per_byte(nats_total: float | Float[Array, ""], num_bytes: int) -> float | Float[Array, ""]:
    """Convert summed cross-entropy to bits per byte of text.

        bits_per_byte = nats_total / (ln(2) * num_bytes)

    Args:
        nats_total: Cross-entropy summed (not averaged) over the tokens of a text.
        num_bytes: Length of that text in UTF-8.

    Returns:
        Bits per byte; 8 for a uniform distribution over bytes, about 2 for gzip.

    Raises:
        ValueError: If `num_bytes` is not positive.

    References:
        Gao et al., The Pile: An 800GB Dataset of Diverse Text for Language Modeling, 2020.
        arXiv:2101.00027, section 3.1
    """
    require(num_bytes >= 1, f"num_bytes must be positive; got {num_bytes}.")
    return nats_total / (math.log(2) * num_bytes)
