"""Decay attention: weights gamma ** (i - j), the parallel form of a linear recurrence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex64, Float, Inexact, Int, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.rope import Pairing, as_complex, as_real

EXACT_BITS = 11  # a float32 of 12 significant bits times a count below 4096 is exact


class DecayRates(NamedTuple):
    """Decay gamma of each head, and the gain that keeps the variance of its output."""

    gamma: Float[Array, " N"]
    gain: Float[Array, " N"]


class TokenSteps(NamedTuple):
    """Step count and segment of each token of a row.

    `step` counts the valid tokens up to and including each token, `segment` the documents that
    ended before it: within a segment, weights are gamma ** (difference of steps).
    """

    valid: Bool[Array, "*batch T"]
    starts_segment: Bool[Array, "*batch T"]  # first token of a document, not of the row
    step: Int[Array, "*batch T"]
    segment: Int[Array, "*batch T"]


@typechecked
def decay_rates(logits: Float[Array, " N"]) -> DecayRates:
    """Compute decay rates gamma = sigmoid(logit) and gains sqrt(1 - gamma ** 2).

        gamma = sigmoid(logit);    gain = sqrt(1 - gamma ** 2)

    A head remembers about 1 / (1 - gamma) = 1 + exp(logit) tokens. Its sum of independent values
    has 1 / (1 - gamma ** 2) times their variance, and the gain restores it. A sum of equal values
    is 1 / (1 - gamma) times the value, so outputs stay below sqrt((1 + gamma) / (1 - gamma)) times
    the largest value: 90 for a memory of 4,096.

    Args:
        logits: One number per head.

    Returns:
        gamma in [0, 1] and gain, float32. Both have finite gradients everywhere.

    References:
        Orvieto et al., Resurrecting Recurrent Neural Networks for Long Sequences, 2023.
        arXiv:2303.06349, section 3.4 (the gain)
    """
    wide = logits.astype(jnp.float32)
    gamma = jax.nn.sigmoid(wide)
    # 1 - gamma from the logit: the difference would cancel for gamma near 1.
    return DecayRates(gamma, jnp.exp((jax.nn.log_sigmoid(-wide) + jnp.log1p(gamma)) / 2))


@typechecked
def decay_attention(
    value: Float[Array, "*batch T N H"],
    gamma: Float[Array, " N"],
    theta: Float[Array, "N C"] | None = None,
    *,
    segments: Integer[Array, "*#batch T"] | None = None,
    pairing: Pairing = "halves",
) -> Float[Array, "*batch T N H"]:
    """Attention with weights gamma ** (i - j), over values rotated by RoPE.

        output[i] = sum over j <= i of gamma ** (i - j) * R[j - i] @ value[j]

    Values are rotated, summed with T x T weights, and rotated back by the conjugate, so the output
    depends on distances only. There are no queries and keys, and weights are not normalised. It
    equals `linear_recurrence`, in time and memory of T ** 2 instead of T.

    Args:
        value: In any float dtype.
        gamma: Decay per token of each head, in [0, 1].
        theta: Angle per token of each head and feature pair, in radians; None is no rotation.
        segments: Document number of each token; a run of equal numbers is a document, which does
            not affect others.
        pairing: Features that form a pair, as in `rotate`.

    Returns:
        The outputs, computed in float32, in the dtype of `value`.

    Raises:
        ValueError: The shape of `theta` is wrong, a gamma that is not traced is outside [0, 1], or
            the pairing is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> value = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(4, 1, 1)  # four tokens, one head
        >>> F.decay_attention(value, jnp.array([0.5])).ravel()
        Array([1.   , 0.5  , 0.25 , 1.125], dtype=float32)

    References:
        Su, Transformer Upgrade Path 19: the second kind of rotary position, 2025,
        spaces.ac.cn/archives/10862, related work
        Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023.
        arXiv:2307.08621, section 2.1 (parallel representation)
    """
    check_decay(value, gamma, theta)
    # Devices then sum the gradients of the rates, not of the complex numbers computed from them.
    gamma, theta = pvary_like((gamma, theta), value)
    z = to_head_major(value, theta, pairing)
    mixed = parallel_decay_attention(z, gamma, theta, token_steps(value, segments, None))
    return from_head_major(mixed, value, pairing)


def check_decay(value: Array, gamma: Array, theta: Array | None) -> None:
    """Check the range of gamma and the shape of theta."""
    *_, heads, width = value.shape
    if theta is not None and (width % 2 or theta.shape != (heads, width // 2)):
        raise ValueError(
            f"theta must have shape [heads, features / 2] = [{heads}, {width} / 2]; "
            f"got {theta.shape}."
        )
    if isinstance(gamma, jax.core.Tracer):
        return
    values = np.asarray(gamma, np.float32)
    out_of_range = values[~((values >= 0) & (values <= 1))]
    if len(out_of_range):
        raise ValueError(f"gamma must be in [0, 1]; got {out_of_range[0]}.")


def token_steps(value: Array, segments: Array | None, valid: Array | None) -> TokenSteps:
    """Compute the `TokenSteps` of each row from segments and valid tokens."""
    axes, count = value.ndim - 2, jnp.arange(value.shape[-3])
    shapes = [x.shape for x in (segments, valid) if x is not None]
    shape = jnp.broadcast_shapes((1,) * (axes - 1) + count.shape, *shapes)

    def widened(x: Array) -> Array:
        return jnp.broadcast_to(x, shape)

    valid = widened(jnp.asarray(True) if valid is None else valid)
    starts_segment = jnp.zeros(shape, bool)
    if segments is not None:
        segments = widened(segments)
        last_valid = jax.lax.cummax(jnp.where(valid, widened(count), -1), axis=axes - 1)
        none = jnp.full_like(last_valid[..., :1], -1)
        previous_valid = jnp.concatenate([none, last_valid[..., :-1]], axis=-1)
        previous = jnp.take_along_axis(segments, jnp.maximum(previous_valid, 0), axis=-1)
        changes_segment = previous != segments
        starts_segment = valid & (previous_valid >= 0) & changes_segment
    step, segment = (jnp.cumsum(x, axis=-1) for x in (valid, starts_segment))
    return TokenSteps(valid, starts_segment, step, segment)


def expand_tokens(x: Array) -> Array:
    """Expand [*batch, T] to broadcast with [*batch, N, T, C]."""
    return x[..., None, :, None]


def expand_heads(x: Array, other: Array) -> Float[Array, "..."]:
    """Expand [N] or [N, C] to broadcast with [*batch, N, T, C]."""
    wide = x.astype(jnp.float32).reshape(x.shape[0], 1, -1)
    return jnp.expand_dims(wide, tuple(range(other.ndim - 3)))


def to_complex(x: Array, theta: Array | None, pairing: Pairing) -> Inexact[Array, "..."]:
    """Read feature pairs as complex numbers; unchanged if theta is None."""
    return x if theta is None else as_complex(x, pairing=pairing)


def to_real(z: Array, pairing: Pairing) -> Float[Array, "..."]:
    """Inverse of `to_complex`: complex numbers back to feature pairs."""
    return as_real(z, pairing=pairing) if jnp.iscomplexobj(z) else z


def to_head_major(value: Array, theta: Array | None, pairing: Pairing) -> Inexact[Array, "..."]:
    """Move heads before time, [*batch, N, T, C], with feature pairs as complex numbers."""
    return jnp.moveaxis(to_complex(value.astype(jnp.float32), theta, pairing), -2, -3)


def from_head_major(z: Array, value: Array, pairing: Pairing) -> Float[Array, "*batch T N H"]:
    """Inverse of `to_head_major`, in the dtype of `value`."""
    return jnp.moveaxis(to_real(z, pairing), -3, -2).astype(value.dtype)


def _decay_power(gamma: Array, count: Array) -> Float[Array, "..."]:
    """Compute gamma ** count, for counts of 0 or more.

    By logarithms a high power of a small decay is zero, but a quotient of powers would overflow.
    """
    base = expand_heads(gamma, count)
    log = jnp.log(jnp.maximum(base, jnp.finfo(jnp.float32).tiny))
    # The gradient of 0 ** 1 is 1, but log(0) has none.
    zero_decay_gradient = jnp.where((count == 1) & (base == 0), base, 0)
    return jnp.exp(count.astype(jnp.float32) * log) + zero_decay_gradient


def _rotation_power(theta: Array, count: Array) -> Complex64[Array, "..."]:
    """Compute exp(i * theta * count), accurate to 1e-6 for counts up to 4,096.

    The phase is the sum of a product that is exact in float32 and a small remainder.
    """
    angle, n = expand_heads(theta, count), count.astype(jnp.float32)
    coarse = jax.lax.stop_gradient(jax.lax.reduce_precision(angle, 8, EXACT_BITS))
    rotations = [jax.lax.complex(jnp.cos(x * n), jnp.sin(x * n)) for x in (coarse, angle - coarse)]
    return rotations[0] * rotations[1]


def transition_power(gamma: Array, theta: Array | None, count: Array) -> Inexact[Array, "..."]:
    """State transition over `count` tokens: (gamma * exp(-i theta)) ** count."""
    decay = _decay_power(gamma, count)
    if theta is None:
        return decay
    rotation = _rotation_power(theta, count)
    return jax.lax.complex(decay * rotation.real, -decay * rotation.imag)


def decay_weights(
    gamma: Float[Array, " N"], steps: TokenSteps, rows: slice = slice(None)
) -> Float[Array, "*batch N T S"]:
    """Decay weights gamma ** (i - j) for j <= i in one segment, else 0; `rows` selects the i."""
    step, segment = steps.step, steps.segment
    count = jnp.arange(step.shape[-1])
    distance = step[..., None, rows, None] - step[..., None, None, :]
    same_segment = segment[..., None, rows, None] == segment[..., None, None, :]
    allowed = same_segment & (count[rows, None] >= count[None])[(None,) * (same_segment.ndim - 2)]
    return jnp.where(allowed, _decay_power(gamma, jnp.maximum(distance, 0)), 0)


def parallel_decay_attention(
    z: Inexact[Array, "*batch N T C"], gamma: Array, theta: Array | None, steps: TokenSteps
) -> Inexact[Array, "*batch N T C"]:
    """Parallel form of decay attention: rotate values, multiply by decay weights, rotate back."""
    weights = decay_weights(gamma, steps)
    if theta is None:
        return weights @ z
    rotation = _rotation_power(theta, expand_tokens(steps.step - steps.step[..., :1]))
    mixed = weights @ as_real(z * rotation, pairing="halves")
    return as_complex(mixed, pairing="halves") * jnp.conj(rotation)
