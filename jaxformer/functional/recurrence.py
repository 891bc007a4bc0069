"""Linear recurrence of decay attention: sequential scan, associative scan, or chunkwise."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Integer

from jaxformer.functional.arguments import checked
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.decay import (
    Steps,
    attend_within,
    by_head,
    by_token,
    check_decay,
    features,
    from_heads,
    pairs,
    passed,
    rates_beside,
    steps_of,
    to_heads,
)
from jaxformer.functional.rope import Pairing

RecurrenceMethod = Literal["scan", "associative", "chunked"]
RECURRENCE_CHUNK = 64


class Recurrence(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T N H"]
    state: Float[Array, "*batch N H"]


@checked
def linear_recurrence(
    value: Float[Array, "*batch T N H"],
    gamma: Float[Array, " N"],
    theta: Float[Array, "N C"] | None = None,
    *,
    initial: Float[Array, "*batch N H"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    method: RecurrenceMethod = "chunked",
    chunk: int = RECURRENCE_CHUNK,
    pairing: Pairing = "halves",
) -> Recurrence:
    """Diagonal linear recurrence: h[i] = gamma * exp(-i theta) * h[i - 1] + value[i].

        h[i] = gamma * exp(-i theta) * h[i - 1] + value[i];    output[i] = h[i]

    with feature pairs read as complex numbers. It equals `decay_attention` and needs memory of one
    state to go on: give the state of one call to the next and a text can be read in parts.

    Args:
        value: In any float dtype.
        gamma: Decay of each head for one token, in [0, 1].
        theta: Angle of each head and feature pair for one token, in radians; None turns nothing.
        initial: The state before the first token, of whose document it is; None is zero.
        segments: Document of each token. A document is a run of equal numbers; the state is zero
            before its first token.
        valid: False for padding, over which the state passes unchanged.
        method: "scan" goes token by token; "associative" combines neighbours in about log2(T)
            rounds; "chunked" is attention inside chunks and a recurrence between them: for T tokens
            work of T * chunk in matrix products, in T / chunk steps. It is the most precise for a
            long memory, since the state is rounded once a chunk.
        chunk: Tokens of a chunk.
        pairing: Which features form a pair, as in `rotate`.

    Returns:
        The outputs, computed in float32, in the dtype of `value`, and the state, in float32, both
        as features.

    Raises:
        ValueError: There is not an angle for each pair, a gamma is outside [0, 1] (where its value
            can be seen), a chunk has no token, or the method or the pairing is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> value, gamma = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(4, 1, 1), jnp.array([0.5])
        >>> first = F.linear_recurrence(value[:2], gamma)
        >>> rest = F.linear_recurrence(value[2:], gamma, initial=first.state)
        >>> jnp.concatenate([first.output, rest.output]).ravel()
        Array([1.   , 0.5  , 0.25 , 1.125], dtype=float32)

    References:
        Su, Transformer Upgrade Path 19: the second kind of rotary position, 2025,
        spaces.ac.cn/archives/10862, related work
        Orvieto et al., Resurrecting Recurrent Neural Networks for Long Sequences, 2023.
        arXiv:2303.06349, section 3 (complex diagonal recurrences)
        Sun et al., Retentive Network: A Successor to Transformer for Large Language Models, 2023.
        arXiv:2307.08621, section 2.1 (recurrent and chunkwise representations)
    """
    check_decay(value, gamma, theta, pairing)
    if method not in get_args(RecurrenceMethod):
        raise ValueError(f"method must be one of {get_args(RecurrenceMethod)}; got {method!r}.")
    if chunk < 1:
        raise ValueError(f"A chunk holds at least 1 token; got {chunk}.")
    gamma, theta = rates_beside(value, gamma, theta)
    steps = steps_of(value, segments, valid)
    z = to_heads(value, theta, pairing)
    z = jnp.where(by_token(steps.valid), z, 0)
    start = jnp.zeros_like(z, shape=(*z.shape[:-2], z.shape[-1]))
    if initial is not None:
        start = pairs(initial.astype(jnp.float32), theta, pairing)
    if value.size == 0:
        return Recurrence(from_heads(z, value, pairing), features(start, pairing))
    match method:
        case "scan":
            h = _token_by_token(z, gamma, theta, steps, start)
        case "associative":
            h = _in_rounds(z, gamma, theta, steps, start)
        case "chunked":
            h = _by_chunks(z, gamma, theta, steps, start, min(chunk, value.shape[-3]))
    return Recurrence(from_heads(h, value, pairing), features(h[..., -1, :], pairing))


def _once(z: Array, gamma: Array, theta: Array | None) -> Inexact[Array, "..."]:
    """One-step transition gamma * exp(-i theta), [*1, N, 1, C]."""
    shrunk = by_head(gamma, z)
    if theta is None:
        return shrunk
    angle = by_head(theta, z)
    return jax.lax.complex(shrunk * jnp.cos(angle), -shrunk * jnp.sin(angle))


def _token_by_token(
    z: Array, gamma: Array, theta: Array | None, steps: Steps, start: Array
) -> Inexact[Array, "*batch N T C"]:
    once = _once(z, gamma, theta)[..., 0, :]

    def step(h: Array, token: tuple[Array, ...]):
        z, valid, fresh = token
        h = jnp.where(valid, once, 1) * jnp.where(fresh, 0, h) + z
        return h, h

    flags = (jnp.moveaxis(by_token(x), -2, 0) for x in (steps.valid, steps.fresh))
    start = _as_varying(start, z, gamma, theta, steps)
    _, h = jax.lax.scan(step, start, (jnp.moveaxis(z, -2, 0), *flags))
    return jnp.moveaxis(h, 0, -2)


def _in_rounds(
    z: Array, gamma: Array, theta: Array | None, steps: Steps, start: Array
) -> Inexact[Array, "*batch N T C"]:
    def both(first: tuple[Array, Array], then: tuple[Array, Array]):
        return then[0] * first[0], then[0] * first[1] + then[1]

    once = jnp.where(by_token(steps.valid), _once(z, gamma, theta), 1)
    once = jnp.where(by_token(steps.fresh), 0, once)
    since, h = jax.lax.associative_scan(both, (once, z), axis=z.ndim - 2)
    return h + since * start[..., None, :]


def _by_chunks(
    z: Array, gamma: Array, theta: Array | None, steps: Steps, start: Array, chunk: int
) -> Inexact[Array, "*batch N T C"]:
    """Chunkwise form: parallel attention inside chunks, a recurrence over chunk states."""
    length, more = z.shape[-2], -z.shape[-2] % chunk
    z = jnp.pad(z, [(0, 0)] * (z.ndim - 2) + [(0, more), (0, 0)])
    z = jnp.moveaxis(z.reshape(*z.shape[:-2], -1, chunk, z.shape[-1]), -3, -4)

    def split(x: Array, mode: str) -> Array:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], mode=mode)
        return x.reshape(*x.shape[:-1], -1, chunk)

    flags = (split(x, "constant") for x in (steps.valid, steps.fresh))
    parts = Steps(*flags, *(split(x, "edge") for x in (steps.clock, steps.run)))
    inside = attend_within(z, gamma, theta, parts)
    count = jnp.cumsum(parts.valid, axis=-1)
    same = jnp.cumsum(parts.fresh, axis=-1) == 0
    left = jnp.where(by_token(same), passed(gamma, theta, by_token(count)), 0)

    def step(h: Array, part: tuple[Array, ...]):
        left, new = part
        return left * h + new, h

    ends = (jnp.moveaxis(x[..., -1, :], -3, 0) for x in (left, inside))
    start = _as_varying(start, z, gamma, theta, steps)
    _, before = jax.lax.scan(step, start, tuple(ends))
    h = inside + left * jnp.moveaxis(before, 0, -3)[..., None, :]
    h = jnp.moveaxis(h, -4, -3)
    return h.reshape(*h.shape[:-3], -1, h.shape[-1])[..., :length, :]


def _as_varying(start: Array, *others: Any) -> Array:
    """`pvary` the initial state over every axis that any input varies over."""
    return varying(start, *(axis for x in jax.tree.leaves(others) for axis in varies_over(x)))
