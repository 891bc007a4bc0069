"""Short causal convolution over time, each channel separately, with a state of a few tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.sequence_parts import (
    apply_affine,
    join_parts,
    split_masks,
    split_parts,
    states_between_parts,
    zeros_and_identity,
)


class CausalConvolution(NamedTuple):
    """Output of every token, and the last K - 1 inputs."""

    output: Float[Array, "*batch T C"]
    state: Float[Array, "*batch taps C"]


@typechecked
def causal_convolution(
    x: Float[Array, "*batch T C"],
    kernel: Float[Array, "K C"],
    bias: Float[Array, " C"] | None = None,
    *,
    dilation: int = 1,
    initial_state: Float[Array, "*batch taps C"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    axis_name: str | None = None,
) -> CausalConvolution:
    """Depthwise causal convolution of K taps over time.

        output[t, c] = bias[c] + sum over j < K of kernel[j, c] * x[t - (K - 1 - j) * dilation, c]

    The last tap is the present token's. To process a sequence in several calls, pass the state of
    one call to the next.

    Args:
        x: Channels of each token.
        kernel: Taps of each channel, oldest first.
        bias: Added to the output.
        dilation: Tokens from one tap to the next.
        initial_state: The (K - 1) * dilation inputs before the first token, in the same document;
            None is zeros.
        segments: Document number of each token; a run of equal numbers is a document, and inputs
            before its first token are zeros.
        valid: False for padding, which is skipped: its outputs mean nothing, and the next token
            reads the inputs before the padding.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`.

    Returns:
        The outputs, computed in float32, in the dtype of `x`, and the state in the dtype of `x`,
        that after the whole sequence.

    Raises:
        ValueError: If `initial_state` does not have (K - 1) * dilation tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> x, kernel = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[10.0], [1.0]])
        >>> F.causal_convolution(x, kernel).output.ravel()
        Array([ 1., 12., 23.], dtype=float32)

    References:
        Fu et al., Hungry Hungry Hippos: Towards Language Modeling with State Space Models, 2022.
        arXiv:2212.14052, section 3.1 (the shift)
        Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
        arXiv:2312.00752, section 3.4
    """
    *batch, T, C = x.shape
    span = (len(kernel) - 1) * dilation
    shape = *batch, span, C
    state = jnp.zeros(shape, x.dtype) if initial_state is None else initial_state
    if state.shape != shape:
        raise ValueError(
            f"initial_state must have (K - 1) * dilation tokens, {shape}; got {state.shape}."
        )
    state = state.astype(x.dtype)
    if axis_name is None:
        return _convolve(x, kernel, bias, dilation, state, segments, valid)
    masks, documents = split_masks(segments, valid, (*batch, T))
    parts = split_parts(x, -2)
    widened = jnp.concatenate([parts, jnp.zeros((*parts.shape[:-1], span), x.dtype)], axis=-1)
    start, no_taps = zeros_and_identity(state), jnp.zeros((len(kernel), C + span))
    ends = _convolve(widened, no_taps, None, dilation, start, **masks).state
    before, after = states_between_parts(apply_affine, ends, documents, state, axis_name)
    output = _convolve(parts, kernel, bias, dilation, before, **masks).output
    return CausalConvolution(join_parts(output, -2), after)


def _convolve(
    x: Array,
    kernel: Array,
    bias: Array | None,
    dilation: int,
    initial_state: Array,
    segments: Array | None = None,
    valid: Array | None = None,
) -> CausalConvolution:
    """`causal_convolution` of one device."""
    *batch, T, C = x.shape
    span = (len(kernel) - 1) * dilation
    order, count = None, None
    if valid is not None:  # valid tokens first, in order
        valid = jnp.broadcast_to(valid, (*batch, T))
        order, count = jnp.argsort(~valid, axis=-1, stable=True), jnp.sum(valid, axis=-1)
        x = jnp.take_along_axis(x, order[..., None], axis=-2)
    inputs = jnp.concatenate([initial_state, x], axis=-2)
    document = None
    if segments is not None:
        segments = jnp.broadcast_to(segments, (*batch, T))
        segments = segments if order is None else jnp.take_along_axis(segments, order, axis=-1)
        begins = segments[..., 1:] != segments[..., :-1]
        document = jnp.cumsum(jnp.pad(begins, [(0, 0)] * len(batch) + [(1, 0)]), axis=-1)
        document = jnp.pad(document, [(0, 0)] * len(batch) + [(span, 0)])
    output = jnp.zeros((*batch, T, C), jnp.float32)
    for j in range(len(kernel)):
        place = slice(j * dilation, j * dilation + T)
        term = inputs[..., place, :].astype(jnp.float32) * _broadcast(kernel[j], output)
        if document is not None:
            same = document[..., place] == document[..., span:]
            term = jnp.where(same[..., None], term, 0.0)
        output = output + term
    if bias is not None:
        output = output + _broadcast(bias, output)
    if document is not None:  # inputs of the last document alone
        end = T if count is None else count[..., None]
        index = jnp.full((*batch, 1), end + span - 1)
        same = document == jnp.take_along_axis(document, index, axis=-1)
        inputs = jnp.where(same[..., None], inputs, 0)
    if order is None or count is None:
        return CausalConvolution(output.astype(x.dtype), inputs[..., T:, :])
    output = jnp.take_along_axis(output, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    last = count[..., None] + jnp.arange(span).reshape(*(1,) * len(batch), -1)
    state = jnp.take_along_axis(inputs, last[..., None], axis=-2)
    return CausalConvolution(output.astype(x.dtype), state)


def _broadcast(x: Float[Array, " C"], like: Array) -> Float[Array, "..."]:
    """A vector in float32, for all tokens."""
    return jnp.broadcast_to(x.astype(jnp.float32), like.shape)
