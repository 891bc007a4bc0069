"""Real-gated linear recurrent unit: a number of state per feature, with gated decay and input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.selective_scan import SELECTIVE_SCAN_CHUNK, scan_states

TINY = 1e-12  # below it the root of 1 - a ** 2 is a line, whose gradient is finite


class GatedRecurrence(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T C"]
    state: Float32[Array, "*batch C"]


@typechecked
def rg_lru(
    x: Float[Array, "*batch T C"],
    input_gate: Float[Array, "*batch T C"],
    decay_gate: Float[Array, "*batch T C"],
    rate: Float[Array, " C"],
    *,
    first: Bool[Array, "*#batch T"] | None = None,
    initial_state: Float[Array, "*batch C"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    chunk_size: int = SELECTIVE_SCAN_CHUNK,
    axis_name: str | None = None,
) -> GatedRecurrence:
    """Real-gated linear recurrent unit: a decaying sum of gated inputs, each feature separately.

        a[t] = exp(-rate * decay_gate[t])
        h[t] = a[t] * h[t-1] + sqrt(1 - a[t] ** 2) * input_gate[t] * x[t];    output[t] = h[t]

    The root keeps the variance of the state where inputs are independent. It is computed as
    `selective_scan` is, with which states, documents, padding and chunks have the same meaning.

    Args:
        x: Features of each token.
        input_gate: Factor of the input, from 0 to 1.
        decay_gate: Factor of the rate, from 0 to 1.
        rate: Decay of each feature if its gate is 1, at least 0.
        first: True for the first token of a document, whose root is 1; None is no token.
        initial_state: State before the first token, in the same document; None is zero.
        segments: Document number of each token.
        valid: False for padding, which does not change the state.
        chunk_size: Tokens per chunk.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`.

    Returns:
        The outputs, computed in float32, in the dtype of `x`, and the state in float32, that after
        the whole sequence.

    Raises:
        ValueError: `chunk_size` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> x, one = jnp.array([[1.0], [0.0]]), jnp.ones((2, 1))
        >>> rate, first = jnp.log(jnp.array([2.0])), jnp.array([True, False])
        >>> F.rg_lru(x, one, one, rate, first=first).output.ravel()
        Array([1. , 0.5], dtype=float32)

    References:
        De et al., Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
        Language Models, 2024. arXiv:2402.19427, section 2.4
    """
    gate, rate = decay_gate.astype(jnp.float32), pvary_like(rate.astype(jnp.float32), x)
    square = -jnp.expm1(-2 * jnp.broadcast_to(rate, gate.shape) * gate)  # 1 - a ** 2
    root = square * jax.lax.rsqrt(jnp.maximum(square, TINY))
    if first is not None:
        root = jnp.where(jnp.broadcast_to(first, gate.shape[:-1])[..., None], 1.0, root)
    one = jnp.ones((*gate.shape[:-1], 1))
    output, state = scan_states(
        root * input_gate.astype(jnp.float32) * x.astype(jnp.float32),
        gate,
        rate[:, None],
        one,
        one,
        initial_state=None if initial_state is None else initial_state[..., None],
        segments=segments,
        valid=valid,
        chunk_size=chunk_size,
        axis_name=axis_name,
    )
    return GatedRecurrence(output.astype(x.dtype), state[..., 0])
