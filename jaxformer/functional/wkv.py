"""WKV: an average of values under weights that decay with the distance (RWKV-4)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.decay import token_steps
from jaxformer.functional.selective_scan import SELECTIVE_SCAN_CHUNK
from jaxformer.functional.sequence_parts import (
    join_parts,
    scan_in_blocks,
    split_masks,
    split_parts,
    states_between_parts,
)

EMPTY = -1e30  # exponent of sums of nothing


class WeightedKeyValue(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T C"]
    state: Float32[Array, "*batch C 3"]  # numerator, denominator, exponent


class Tokens(NamedTuple):
    """Inputs of some tokens, tokens first, in float32; `starts` begin a document."""

    key: Float32[Array, "T *batch C"]
    value: Float32[Array, "T *batch C"]
    log_decay: Float32[Array, "T *batch C"]
    valid: Bool[Array, "T *batch 1"]
    starts: Bool[Array, "T *batch 1"]


class Sums(NamedTuple):
    """Sums over tokens of weights times values and of weights, both divided by exp(exponent)."""

    numerator: Float32[Array, "*batch C"]
    denominator: Float32[Array, "*batch C"]
    exponent: Float32[Array, "*batch C"]


@typechecked
def wkv(
    key: Float[Array, "*batch T C"],
    value: Float[Array, "*batch T C"],
    rate: Float[Array, " C"],
    bonus: Float[Array, " C"],
    *,
    initial_state: Float[Array, "*batch C 3"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    chunk_size: int = SELECTIVE_SCAN_CHUNK,
    axis_name: str | None = None,
) -> WeightedKeyValue:
    """Average of the values of each channel so far, under weights that decay with the distance.

        w[t, i] = exp(key[i] - (t - 1 - i) * rate) for i < t;    w[t, t] = exp(key[t] + bonus)
        output[t] = sum over i <= t of w[t, i] * value[i] / sum over i <= t of w[t, i]

    Both sums are divided by their largest weight, the exp of the state's exponent, so that no key
    overflows. They are computed as `selective_scan` is, with which states, documents, padding and
    chunks have the same meaning; a state of zeros is empty.

    Args:
        key: Logarithm of each token's weight.
        value: What is averaged.
        rate: Decay of each channel per token, at least 0.
        bonus: Added to the present token's key.
        initial_state: State before the first token, in the same document; None is zeros.
        segments: Document number of each token.
        valid: False for padding, which does not change the state.
        chunk_size: Tokens per chunk.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`.

    Returns:
        The outputs, computed in float32, in the dtype of `value`, and the state in float32, that
        after the whole sequence.

    Raises:
        ValueError: `chunk_size` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> value, zero = jnp.array([[1.0], [4.0]]), jnp.zeros((2, 1))
        >>> F.wkv(zero, value, jnp.ones(1), jnp.log(jnp.array([2.0]))).output.ravel()
        Array([1., 3.], dtype=float32)

    References:
        Peng et al., RWKV: Reinventing RNNs for the Transformer Era, 2023. arXiv:2305.13048,
        section 3.1.2 and appendix D
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
    if initial_state is None:
        initial_state = jnp.zeros((*key.shape[:-2], key.shape[-1], 3))
    state = jnp.swapaxes(initial_state.astype(jnp.float32), -1, -2)  # features last
    rate, bonus, state = pvary_like((rate, bonus, state), key)
    if axis_name is None:
        tokens = _tokens(key, value, rate, segments=segments, valid=valid)
        output, state = _scan(tokens, bonus, state, chunk_size)
        output = jnp.moveaxis(output, 0, -2).astype(value.dtype)
        return WeightedKeyValue(output, jnp.swapaxes(state, -1, -2))
    masks, documents = split_masks(segments, valid, key.shape[:-1])
    tokens = _tokens(split_parts(key, -2), split_parts(value, -2), rate, **masks)
    run = partial(_scan, tokens, bonus, chunk_size=chunk_size)
    ends = run(pvary_like(jnp.zeros((2, *state.shape)), tokens))[1]
    summaries = ends, _total_decay(tokens)
    before, after = states_between_parts(_advance, summaries, documents, state, axis_name)
    output = join_parts(jnp.moveaxis(run(before)[0], 0, -2), -2)
    return WeightedKeyValue(output.astype(value.dtype), jnp.swapaxes(after, -1, -2))


def _tokens(
    key: Array,
    value: Array,
    rate: Array,
    *,
    segments: Array | None = None,
    valid: Array | None = None,
) -> Tokens:
    """The inputs, tokens first; padding leaves the sums as they are."""
    steps = token_steps(key[..., None], segments, valid)
    is_valid, starts = (
        jnp.moveaxis(jnp.broadcast_to(x, key.shape[:-1]), -1, 0)[..., None]
        for x in (steps.valid, steps.starts_segment)
    )
    key, value = (jnp.moveaxis(x.astype(jnp.float32), -2, 0) for x in (key, value))
    decay = -jnp.broadcast_to(rate.astype(jnp.float32), key.shape)
    decay = jnp.where(starts, EMPTY, jnp.where(is_valid, decay, 0.0))
    return Tokens(key, value, decay, is_valid, starts)


def _scan(
    tokens: Tokens, bonus: Float[Array, " C"], state: Array, chunk_size: int
) -> tuple[Float32[Array, "T *batch C"], Float32[Array, "*batch 3 C"]]:
    """Outputs and the last state; padding at the end changes nothing."""

    def step(state: Array, token: Tokens) -> tuple[Array, Array]:
        key, value, sums = token.key, token.value, _as_sums(state)
        own = key + jnp.broadcast_to(bonus.astype(jnp.float32), key.shape)
        exponent = jnp.where(token.starts, EMPTY, sums.exponent)
        largest = jax.lax.stop_gradient(jnp.maximum(exponent, own))
        old, new = jnp.exp(exponent - largest), jnp.exp(own - largest)
        output = (old * sums.numerator + new * value) / (old * sums.denominator + new)
        exponent = jax.lax.stop_gradient(jnp.where(token.valid, key, EMPTY))
        weight = jnp.exp(jnp.where(token.valid, key - exponent, EMPTY))
        return _add(sums, Sums(weight * value, weight, exponent), token.log_decay), output

    return scan_in_blocks(step, _advance, _total_decay, tokens, state, chunk_size)


def _total_decay(tokens: Tokens) -> Float32[Array, "*batch C"]:
    return jnp.sum(tokens.log_decay, axis=0)


def _advance(state: Array, part: tuple[Array, Array]) -> Float32[Array, "*batch 3 C"]:
    """The state after some tokens, from the state that they make of zeros and their decay."""
    return _add(_as_sums(state), _as_sums(part[0]), part[1])


def _add(first: Sums, last: Sums, log_decay: Array) -> Float32[Array, "*batch 3 C"]:
    """The state of both sums, where the first decay over the tokens of the last."""
    decayed = jnp.maximum(first.exponent + log_decay, EMPTY)
    exponent = jax.lax.stop_gradient(jnp.maximum(decayed, last.exponent))
    old, new = jnp.exp(decayed - exponent), jnp.exp(last.exponent - exponent)
    numerator = old * first.numerator + new * last.numerator
    denominator = old * first.denominator + new * last.denominator
    return jnp.stack([numerator, denominator, exponent], axis=-2)


def _as_sums(state: Float32[Array, "*batch 3 C"]) -> Sums:
    """The sums of a state, where zeros are empty."""
    numerator, denominator, exponent = (state[..., i, :] for i in range(3))
    return Sums(numerator, denominator, jnp.where(denominator > 0, exponent, EMPTY))
