"""Selective scan: a state per feature, whose decay depends on the token (Mamba 1)."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.decay import token_steps
from jaxformer.functional.sequence_parts import (
    join_parts,
    scan_in_blocks,
    split_masks,
    split_parts,
    states_between_parts,
)

SELECTIVE_SCAN_CHUNK = 256


class SelectiveScan(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T C"]
    state: Float32[Array, "*batch C M"]


class Tokens(NamedTuple):
    """Inputs of some tokens, tokens first, in float32; `starts` begin a document."""

    value: Float32[Array, "T *batch C"]
    step: Float32[Array, "T *batch C"]
    write: Float32[Array, "T *batch M"]
    read: Float32[Array, "T *batch M"]
    starts: Bool[Array, " T *batch"]


@typechecked
def selective_scan(
    x: Float[Array, "*batch T C"],
    step: Float[Array, "*batch T C"],
    rate: Float[Array, "C M"],
    write: Float[Array, "*batch T M"],
    read: Float[Array, "*batch T M"],
    *,
    initial_state: Float[Array, "*batch C M"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    chunk_size: int = SELECTIVE_SCAN_CHUNK,
    axis_name: str | None = None,
) -> SelectiveScan:
    """Selective state space: each feature has M numbers of state, which decay by its step.

        h[t, c] = exp(-step[t, c] * rate[c]) * h[t-1, c] + step[t, c] * x[t, c] * write[t]
        y[t, c] = h[t, c] . read[t]

    In the letters of the paper, `step` is Delta, `rate` -A, `write` B and `read` C. Mamba 2, with
    one decay per head, is a case of `linear_attention`. To process a sequence in several calls,
    pass the state of one call to the next.

    Args:
        x: Features of each token.
        step: Size of the step of each feature, at least 0.
        rate: Decay of each number of the state per unit of the step, at least 0.
        write: What each token writes to the state of every feature.
        read: What each token reads of it.
        initial_state: State before the first token, in the same document; None is zero.
        segments: Document number of each token; a run of equal numbers is a document, and the state
            is zero before its first token.
        valid: False for padding, which does not change the state.
        chunk_size: Tokens per chunk. About chunk_size ** 0.5 blocks of a chunk run side by side,
            once to find the states between them and once from these; memory for states, and what
            the gradient keeps, is that of one chunk, and a state per chunk.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`. Each device first works out what its parts do to a state.

    Returns:
        The outputs, computed in float32, in the dtype of `x`, and the state in float32, that after
        the whole sequence.

    Raises:
        ValueError: `chunk_size` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> x, one = jnp.array([[1.0], [0.0], [1.0]]), jnp.ones((3, 1))
        >>> F.selective_scan(x, one, jnp.log(jnp.array([[2.0]])), one, one).output.ravel()
        Array([1.  , 0.5 , 1.25], dtype=float32)

    References:
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
        arXiv:2312.00752, section 3.2 (algorithm 2)
    """
    step = step.astype(jnp.float32)
    output, state = scan_states(
        step * x.astype(jnp.float32),
        step,
        rate,
        write,
        read,
        initial_state=initial_state,
        segments=segments,
        valid=valid,
        chunk_size=chunk_size,
        axis_name=axis_name,
    )
    return SelectiveScan(output.astype(x.dtype), state)


def scan_states(
    value: Float32[Array, "*batch T C"],
    step: Float32[Array, "*batch T C"],
    rate: Float[Array, "C M"],
    write: Float[Array, "*batch T M"],
    read: Float[Array, "*batch T M"],
    *,
    initial_state: Float[Array, "*batch C M"] | None,
    segments: Integer[Array, "*#batch T"] | None,
    valid: Bool[Array, "*#batch T"] | None,
    chunk_size: int,
    axis_name: str | None,
) -> tuple[Float32[Array, "*batch T C"], Float32[Array, "*batch C M"]]:
    """`selective_scan` of values that are added as they are, without the factor of the step."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
    shape = value.shape[:-2]
    if initial_state is None:
        initial_state = jnp.zeros((*shape, *rate.shape))
    state = jnp.swapaxes(initial_state.astype(jnp.float32), -1, -2)  # features last
    rate = rate.astype(jnp.float32).T
    if axis_name is None:
        tokens = _tokens(value, step, write, read, segments=segments, valid=valid)
        rate, state = pvary_like((rate, state), tokens)
        output, state = _scan(tokens, rate, state, chunk_size)
        return jnp.moveaxis(output, 0, -2), jnp.swapaxes(state, -1, -2)
    arrays = (split_parts(x, -2) for x in (value, step, write, read))
    masks, documents = split_masks(segments, valid, value.shape[:-1])
    tokens = _tokens(*arrays, **masks)
    rate = pvary_like(rate, tokens)
    run = partial(_scan, tokens, rate, chunk_size=chunk_size)
    zeros = pvary_like(jnp.zeros((2, *state.shape)), tokens)
    summaries = run(zeros)[1], _total_decay(tokens, rate)
    before, after = states_between_parts(_advance, summaries, documents, state, axis_name)
    output = join_parts(jnp.moveaxis(run(before)[0], 0, -2), -2)
    return output, jnp.swapaxes(after, -1, -2)


def _tokens(
    value: Array,
    step: Array,
    write: Array,
    read: Array,
    *,
    segments: Array | None = None,
    valid: Array | None = None,
) -> Tokens:
    """The inputs, tokens first; padding writes nothing and has no step."""
    steps = token_steps(value[..., None], segments, valid)
    is_valid, starts = (
        jnp.broadcast_to(x, value.shape[:-1]) for x in (steps.valid, steps.starts_segment)
    )
    value, step = (jnp.where(is_valid[..., None], x, 0.0) for x in (value, step))
    arrays = (jnp.moveaxis(x.astype(jnp.float32), -2, 0) for x in (value, step, write, read))
    return Tokens._make([*arrays, jnp.moveaxis(starts, -1, 0)])


def _scan(
    tokens: Tokens, rate: Float32[Array, "M C"], state: Array, chunk_size: int
) -> tuple[Float32[Array, "T *batch C"], Float32[Array, "*batch M C"]]:
    """Outputs and the last state; padding at the end writes nothing."""

    def step(h: Array, token: Tokens) -> tuple[Array, Array]:
        h = _total_decay(token, rate, axis=None) * h
        h = h + token.write[..., :, None] * token.value[..., None, :]
        return h, jnp.sum(h * token.read[..., :, None], axis=-2)

    decays = partial(_total_decay, rate=rate)
    return scan_in_blocks(step, _advance, decays, tokens, state, chunk_size)


def _advance(state: Array, part: tuple[Array, Array]) -> Array:
    """The state after some tokens, from the state that they make of zeros and their decay."""
    return part[0] + part[1] * state


def _total_decay(
    tokens: Tokens, rate: Float32[Array, "M C"], axis: int | None = 0
) -> Float32[Array, "*batch M C"]:
    """Factor of the state over all tokens of an axis, or of each token."""
    step, starts = tokens.step, tokens.starts
    if axis is not None:
        step, starts = jnp.sum(step, axis), jnp.any(starts, axis)
    decay = jnp.exp(-step[..., None, :] * jnp.broadcast_to(rate, (*step.shape[:-1], *rate.shape)))
    return jnp.where(starts[..., None, None], 0.0, decay)
