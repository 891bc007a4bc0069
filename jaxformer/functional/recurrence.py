"""Linear recurrence of decay attention: sequential scan, associative scan, or chunkwise."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.decay import (
    TokenSteps,
    check_decay,
    expand_heads,
    expand_tokens,
    from_head_major,
    parallel_decay_attention,
    to_complex,
    to_head_major,
    to_real,
    token_steps,
    transition_power,
)
from jaxformer.functional.rope import Pairing
from jaxformer.functional.sequence_parts import (
    join_parts,
    split_masks,
    split_parts,
    states_between_parts,
)

RecurrenceMethod = Literal["scan", "associative", "chunked"]
RECURRENCE_CHUNK = 64


class Recurrence(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T N H"]
    state: Float[Array, "*batch N H"]


@typechecked
def linear_recurrence(
    value: Float[Array, "*batch T N H"],
    gamma: Float[Array, " N"],
    theta: Float[Array, "N C"] | None = None,
    *,
    initial_state: Float[Array, "*batch N H"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    method: RecurrenceMethod = "chunked",
    chunk_size: int = RECURRENCE_CHUNK,
    pairing: Pairing = "halves",
    axis_name: str | None = None,
) -> Recurrence:
    """Diagonal linear recurrence: h[i] = gamma * exp(-i theta) * h[i - 1] + value[i].

        h[i] = gamma * exp(-i theta) * h[i - 1] + value[i];    output[i] = h[i]

    with feature pairs as complex numbers. It equals `decay_attention`. To process a sequence in
    several calls, pass the state of one call to the next.

    Args:
        value: In any float dtype.
        gamma: Decay per token of each head, in [0, 1].
        theta: Angle per token of each head and feature pair, in radians; None is no rotation.
        initial_state: State before the first token, in the same document; None is zero.
        segments: Document number of each token; a run of equal numbers is a document, and the state
            is zero before its first token.
        valid: False for padding, which does not change the state.
        method: "scan" is sequential; "associative" is a parallel scan of about log2(T) rounds;
            "chunked" is attention inside chunks and a recurrence between them, T * chunk_size work
            in matrix products and T / chunk_size steps. The last is the most precise for a long
            memory, since the state is rounded once per chunk.
        chunk_size: Tokens per chunk.
        pairing: Features that form a pair, as in `rotate`.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`.

    Returns:
        The outputs, computed in float32, in the dtype of `value`, and the state in float32, that
        after the whole sequence.

    Raises:
        ValueError: The shape of `theta` is wrong, a gamma that is not traced is outside [0, 1],
            `chunk_size` is below 1, or the method or the pairing is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> value, gamma = jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(4, 1, 1), jnp.array([0.5])
        >>> first = F.linear_recurrence(value[:2], gamma)
        >>> rest = F.linear_recurrence(value[2:], gamma, initial_state=first.state)
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
    check_decay(value, gamma, theta)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
    # Devices then sum the gradients of the rates, not of the complex numbers computed from them.
    gamma, theta = pvary_like((gamma, theta), value)
    if axis_name is not None:
        options: dict[str, Any] = dict(method=method, chunk_size=chunk_size, pairing=pairing)
        masks, documents = split_masks(segments, valid, value.shape[:-2])
        parts = split_parts(value, -3)
        zeros = jnp.zeros(parts[..., 0, :, :].shape)
        ones = to_real(jnp.ones_like(to_complex(zeros, theta, pairing)), pairing)

        def advance(state: Array, part: tuple[Array, Array]) -> Array:
            offset, factor = (to_complex(x, theta, pairing) for x in part)
            return to_real(offset + factor * to_complex(state, theta, pairing), pairing)

        def run(parts: Array, state: Array) -> Recurrence:
            return linear_recurrence(parts, gamma, theta, initial_state=state, **masks, **options)

        ends = run(parts, zeros).state, run(jnp.zeros_like(parts), ones).state
        state = zeros[0] if initial_state is None else initial_state.astype(jnp.float32)
        before, after = states_between_parts(advance, ends, documents, state, axis_name)
        return Recurrence(join_parts(run(parts, before).output, -3), after)
    steps = token_steps(value, segments, valid)
    z = to_head_major(value, theta, pairing)
    z = jnp.where(expand_tokens(steps.valid), z, 0)
    state = jnp.zeros_like(z, shape=(*z.shape[:-2], z.shape[-1]))
    if initial_state is not None:
        state = to_complex(initial_state.astype(jnp.float32), theta, pairing)
    if value.size == 0:
        return Recurrence(from_head_major(z, value, pairing), to_real(state, pairing))
    match method:
        case "scan":
            h = _sequential_scan(z, gamma, theta, steps, state)
        case "associative":
            h = _associative_scan(z, gamma, theta, steps, state)
        case "chunked":
            h = _chunkwise(z, gamma, theta, steps, state, min(chunk_size, value.shape[-3]))
    return Recurrence(from_head_major(h, value, pairing), to_real(h[..., -1, :], pairing))


def _one_step_transition(z: Array, gamma: Array, theta: Array | None) -> Inexact[Array, "..."]:
    """One-step transition gamma * exp(-i theta), [*1, N, 1, C]."""
    decay = expand_heads(gamma, z)
    if theta is None:
        return decay
    angle = expand_heads(theta, z)
    return jax.lax.complex(decay * jnp.cos(angle), -decay * jnp.sin(angle))


def _sequential_scan(
    z: Array, gamma: Array, theta: Array | None, steps: TokenSteps, state: Array
) -> Inexact[Array, "*batch N T C"]:
    transition = _one_step_transition(z, gamma, theta)[..., 0, :]

    def step(h: Array, token: tuple[Array, ...]):
        z, valid, starts_segment = token
        h = jnp.where(valid, transition, 1) * jnp.where(starts_segment, 0, h) + z
        return h, h

    flags = (jnp.moveaxis(expand_tokens(x), -2, 0) for x in (steps.valid, steps.starts_segment))
    state = pvary_like(state, z, gamma, theta, steps)
    _, h = jax.lax.scan(step, state, (jnp.moveaxis(z, -2, 0), *flags))
    return jnp.moveaxis(h, 0, -2)


def _associative_scan(
    z: Array, gamma: Array, theta: Array | None, steps: TokenSteps, state: Array
) -> Inexact[Array, "*batch N T C"]:
    def combine(left: tuple[Array, Array], right: tuple[Array, Array]):
        return right[0] * left[0], right[0] * left[1] + right[1]

    transition = jnp.where(expand_tokens(steps.valid), _one_step_transition(z, gamma, theta), 1)
    transition = jnp.where(expand_tokens(steps.starts_segment), 0, transition)
    decay_from_start, h = jax.lax.associative_scan(combine, (transition, z), axis=z.ndim - 2)
    return h + decay_from_start * state[..., None, :]


def _chunkwise(
    z: Array, gamma: Array, theta: Array | None, steps: TokenSteps, state: Array, chunk_size: int
) -> Inexact[Array, "*batch N T C"]:
    """Chunkwise form: parallel attention inside chunks, a recurrence over chunk states."""
    length, padding = z.shape[-2], -z.shape[-2] % chunk_size
    z = jnp.pad(z, [(0, 0)] * (z.ndim - 2) + [(0, padding), (0, 0)])
    z = jnp.moveaxis(z.reshape(*z.shape[:-2], -1, chunk_size, z.shape[-1]), -3, -4)

    def split(x: Array, mode: str) -> Array:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)], mode=mode)
        return x.reshape(*x.shape[:-1], -1, chunk_size)

    flags = (split(x, "constant") for x in (steps.valid, steps.starts_segment))
    chunk_steps = TokenSteps(*flags, *(split(x, "edge") for x in (steps.step, steps.segment)))
    within_chunk = parallel_decay_attention(z, gamma, theta, chunk_steps)
    count = jnp.cumsum(chunk_steps.valid, axis=-1)
    same_segment = jnp.cumsum(chunk_steps.starts_segment, axis=-1) == 0
    decay_from_start = jnp.where(
        expand_tokens(same_segment), transition_power(gamma, theta, expand_tokens(count)), 0
    )

    def step(h: Array, chunk: tuple[Array, ...]):
        decay, output = chunk
        return decay * h + output, h

    chunk_ends = (jnp.moveaxis(x[..., -1, :], -3, 0) for x in (decay_from_start, within_chunk))
    state = pvary_like(state, z, gamma, theta, steps)
    _, states = jax.lax.scan(step, state, tuple(chunk_ends))
    h = within_chunk + decay_from_start * jnp.moveaxis(states, 0, -3)[..., None, :]
    h = jnp.moveaxis(h, -4, -3)
    return h.reshape(*h.shape[:-3], -1, h.shape[-1])[..., :length, :]
