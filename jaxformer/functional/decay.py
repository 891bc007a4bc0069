"""Decay attention: weights gamma ** (i - j), the parallel form of a linear recurrence."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex64, Float, Inexact, Int, Integer

from jaxformer.functional.arguments import checked
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.rope import Pairing, as_complex, as_real

EXACT_BITS = 11  # a float32 of 12 significant bits times a count below 4096 is exact


class DecayRates(NamedTuple):
    """Decay gamma of each head, and the gain that keeps the variance of its output."""

    gamma: Float[Array, " N"]
    gain: Float[Array, " N"]


class Steps(NamedTuple):
    """Step count and segment of each token of a row.

    `clock` counts the valid tokens up to each, itself included, and `run` the documents that ended
    before it, so that weights are gamma ** (difference of clocks) between tokens of one run.
    """

    valid: Bool[Array, "*batch T"]
    fresh: Bool[Array, "*batch T"]  # first token of a document, not of the row
    clock: Int[Array, "*batch T"]
    run: Int[Array, "*batch T"]


@checked
def decay_rates(logits: Float[Array, " N"]) -> DecayRates:
    """Compute decay rates gamma = sigmoid(logit) and gains sqrt(1 - gamma ** 2).

        gamma = sigmoid(logit);    gain = sqrt(1 - gamma ** 2)

    A head remembers about 1 / (1 - gamma) = 1 + exp(logit) tokens. Of values that are independent
    of each other it adds up 1 / (1 - gamma ** 2) times the variance; times the gain they have
    their own again, however long the memory. What all tokens have in common it adds up 1 /
    (1 - gamma) times, so outputs stay below sqrt((1 + gamma) / (1 - gamma)) times the largest
    value: 90 for a memory of 4,096.

    Args:
        logits: One per head.

    Returns:
        gamma in [0, 1] and gain, float32. Both have finite gradients everywhere.

    References:
        Orvieto et al., Resurrecting Recurrent Neural Networks for Long Sequences, 2023.
        arXiv:2303.06349, section 3.4 (the gain)
    """
    wide = logits.astype(jnp.float32)
    gamma = jax.nn.sigmoid(wide)
    # 1 - gamma from the logit, since near 1 the difference would lose its digits.
    return DecayRates(gamma, jnp.exp((jax.nn.log_sigmoid(-wide) + jnp.log1p(gamma)) / 2))


@checked
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

    Values are turned, added up with T x T weights, and turned back by the conjugate, so the output
    depends on distances only. Weights are not normalised and there are no queries and keys. With
    feature pairs as complex numbers this is the recurrence of `linear_recurrence`, in time and
    memory of T ** 2 instead of T.

    Args:
        value: In any float dtype.
        gamma: Decay of each head for one token, in [0, 1].
        theta: Angle of each head and feature pair for one token, in radians; None turns nothing.
        segments: Document of each token. A document is a run of equal numbers; nothing passes from
            one to the next.
        pairing: Which features form a pair, as in `rotate`.

    Returns:
        The outputs, computed in float32, in the dtype of `value`.

    Raises:
        ValueError: There is not an angle for each pair, a gamma is outside [0, 1] (where its value
            can be seen), or the pairing is unknown.

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
    check_decay(value, gamma, theta, pairing)
    gamma, theta = rates_beside(value, gamma, theta)
    z = to_heads(value, theta, pairing)
    mixed = attend_within(z, gamma, theta, steps_of(value, segments, None))
    return from_heads(mixed, value, pairing)


def check_decay(value: Array, gamma: Array, theta: Array | None, pairing: Pairing) -> None:
    """Check the range of gamma, the shape of theta, and the pairing."""
    *_, heads, width = value.shape
    if pairing not in get_args(Pairing):
        raise ValueError(f"pairing must be one of {get_args(Pairing)}; got {pairing!r}.")
    if theta is not None and (width % 2 or theta.shape != (heads, width // 2)):
        raise ValueError(
            f"theta {theta.shape} must have an angle for each of {heads} heads and each pair of "
            f"{width} features."
        )
    if isinstance(gamma, jax.core.Tracer):
        return
    values = np.asarray(gamma, np.float32)
    out_of_range = values[~((values >= 0) & (values <= 1))]
    if len(out_of_range):
        raise ValueError(f"A decay is in [0, 1]; got gamma {out_of_range[0]}.")


def rates_beside(value: Array, gamma: Array, theta: Array | None) -> tuple[Array, Array | None]:
    """`pvary` gamma and theta over the axes of `value`, so that their own gradients are summed.

    So devices add up the gradients of the rates, and not of the complex numbers made from them.
    """
    axes = varies_over(value)
    return varying(gamma, *axes), None if theta is None else varying(theta, *axes)


def steps_of(value: Array, segments: Array | None, valid: Array | None) -> Steps:
    """Clocks and runs, with an axis for each axis of the batch, of size one where rows agree."""
    axes, count = value.ndim - 2, jnp.arange(value.shape[-3])
    optional_arrays = [x for x in (segments, valid) if x is not None]
    shape = jnp.broadcast_shapes(
        (1,) * (axes - 1) + count.shape, *(x.shape for x in optional_arrays)
    )

    def widened(x: Array) -> Array:
        return jnp.broadcast_to(x, shape)

    valid = widened(jnp.asarray(True) if valid is None else valid)
    starts_segment = jnp.zeros(shape, bool)
    if segments is not None:
        segments = widened(segments)
        last_valid = jax.lax.cummax(jnp.where(valid, widened(count), -1), axis=axes - 1)
        previous_valid = jnp.concatenate(
            [jnp.full_like(last_valid[..., :1], -1), last_valid[..., :-1]], axis=-1
        )
        changes_segment = (
            jnp.take_along_axis(segments, jnp.maximum(previous_valid, 0), axis=-1) != segments
        )
        starts_segment = valid & (previous_valid >= 0) & changes_segment
    return Steps(
        valid, starts_segment, jnp.cumsum(valid, axis=-1), jnp.cumsum(starts_segment, axis=-1)
    )


def by_token(x: Array) -> Array:
    """Expand [*batch, T] to broadcast with [*batch, N, T, C]."""
    return x[..., None, :, None]


def by_head(x: Array, other: Array) -> Float[Array, "..."]:
    """Expand [N] or [N, C] to broadcast with [*batch, N, T, C]."""
    wide = x.astype(jnp.float32).reshape(x.shape[0], 1, -1)
    return jnp.expand_dims(wide, tuple(range(other.ndim - 3)))


def pairs(x: Array, theta: Array | None, pairing: Pairing) -> Inexact[Array, "..."]:
    """Read feature pairs as complex numbers; unchanged if theta is None."""
    return x if theta is None else as_complex(x, pairing=pairing)


def features(z: Array, pairing: Pairing) -> Float[Array, "..."]:
    """The inverse of `pairs`."""
    return as_real(z, pairing=pairing) if jnp.iscomplexobj(z) else z


def to_heads(value: Array, theta: Array | None, pairing: Pairing) -> Inexact[Array, "..."]:
    """Move heads before time, [*batch, N, T, C], with feature pairs as complex numbers."""
    return jnp.moveaxis(pairs(value.astype(jnp.float32), theta, pairing), -2, -3)


def from_heads(z: Array, value: Array, pairing: Pairing) -> Float[Array, "*batch T N H"]:
    """The inverse of `to_heads`, in the dtype of `value`."""
    return jnp.moveaxis(features(z, pairing), -3, -2).astype(value.dtype)


def _shrunk(gamma: Array, count: Array) -> Float[Array, "..."]:
    """Compute gamma ** count, for counts of 0 or more.

    By logarithms a high power of a small decay is zero, where a quotient of powers would overflow.
    """
    base = by_head(gamma, count)
    log = jnp.log(jnp.maximum(base, jnp.finfo(jnp.float32).tiny))
    # Of 0 ** 1, which no logarithm has
    zero_decay_gradient = jnp.where((count == 1) & (base == 0), base, 0)
    return jnp.exp(count.astype(jnp.float32) * log) + zero_decay_gradient


def _turned(theta: Array, count: Array) -> Complex64[Array, "..."]:
    """Compute exp(i * theta * count), accurate to 1e-6 for counts up to 4,096.

    The phase is a sum of two: a product that float32 holds exactly, and a small rest.
    """
    angle, n = by_head(theta, count), count.astype(jnp.float32)
    coarse = jax.lax.stop_gradient(jax.lax.reduce_precision(angle, 8, EXACT_BITS))
    rotations = [jax.lax.complex(jnp.cos(x * n), jnp.sin(x * n)) for x in (coarse, angle - coarse)]
    return rotations[0] * rotations[1]


def passed(gamma: Array, theta: Array | None, count: Array) -> Inexact[Array, "..."]:
    """State transition over `count` tokens: (gamma * exp(-i theta)) ** count."""
    decay = _shrunk(gamma, count)
    if theta is None:
        return decay
    rotation = _turned(theta, count)
    return jax.lax.complex(decay * rotation.real, -decay * rotation.imag)


def weights_within(
    gamma: Float[Array, " N"], steps: Steps, rows: slice = slice(None)
) -> Float[Array, "*batch N T S"]:
    """Decay weights gamma ** (i - j) for j <= i in one segment, else 0; `rows` selects the i."""
    step, segment = steps.clock, steps.run
    count = jnp.arange(step.shape[-1])
    distance = step[..., None, rows, None] - step[..., None, None, :]
    same_segment = segment[..., None, rows, None] == segment[..., None, None, :]
    allowed = same_segment & (count[rows, None] >= count[None])[(None,) * (same_segment.ndim - 2)]
    return jnp.where(allowed, _shrunk(gamma, jnp.maximum(distance, 0)), 0)


def attend_within(
    z: Inexact[Array, "*batch N T C"], gamma: Array, theta: Array | None, steps: Steps
) -> Inexact[Array, "*batch N T C"]:
    """Parallel form of decay attention: rotate values, multiply by decay weights, rotate back."""
    weights = weights_within(gamma, steps)
    if theta is None:
        return weights @ z
    rotation = _turned(theta, by_token(steps.clock - steps.clock[..., :1]))
    mixed = weights @ as_real(z * rotation, pairing="halves")
    return as_complex(mixed, pairing="halves") * jnp.conj(rotation)
