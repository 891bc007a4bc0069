"""Linear attention with decay and the delta rule: one recurrence, token by token or by chunks."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.decay import token_steps
from jaxformer.functional.sequence_parts import (
    PartDocuments,
    apply_affine,
    join_parts,
    split_masks,
    split_parts,
    states_between_parts,
    zeros_and_identity,
)

LinearAttentionMethod = Literal["scan", "chunked"]
LINEAR_ATTENTION_CHUNK = 64
MIN_LOG_DECAY = -100.0  # a smaller decay is zero in float32


class LinearAttention(NamedTuple):
    """Output of every token, and the state after the last."""

    output: Float[Array, "*batch T N Hv"]
    state: Float32[Array, "*batch N H Hv"]


class Tokens(NamedTuple):
    """Inputs of some tokens, heads before time, in float32.

    `log_decay` has a last axis of one number per head, or of one per feature of the key.
    `document` counts the documents that ended in the row.
    """

    query: Float32[Array, "*batch N T H"]
    key: Float32[Array, "*batch N T H"]
    value: Float32[Array, "*batch N T Hv"]
    log_decay: Float32[Array, "*batch N T F"]
    beta: Float32[Array, "*batch N T 1"]
    document: Integer[Array, "*batch 1 T"]


@typechecked
def linear_attention(
    query: Float[Array, "*batch T K H"],
    key: Float[Array, "*batch T K H"],
    value: Float[Array, "*batch T N Hv"],
    *,
    log_decay: Float[Array, "*batch T N"] | Float[Array, "*batch T N H"] | None = None,
    beta: Float[Array, "*batch T N"] | None = None,
    delta_rule: bool = False,
    initial_state: Float[Array, "*batch N H Hv"] | None = None,
    segments: Integer[Array, "*#batch T"] | None = None,
    valid: Bool[Array, "*#batch T"] | None = None,
    method: LinearAttentionMethod = "chunked",
    chunk_size: int = LINEAR_ATTENTION_CHUNK,
    axis_name: str | None = None,
) -> LinearAttention:
    """Linear attention: a matrix of keys and values that decays, and that each query reads.

        S[t] = D[t] S[t-1] + beta[t] k[t] (v[t] - r[t])^T;    y[t] = S[t]^T q[t]
        D[t] = diag(exp(log_decay[t]));    r[t] = (D[t] S[t-1])^T k[t] with the delta rule, else 0

    The delta rule replaces what the state holds for a key, instead of adding to it. RetNet,
    lightning attention and Mamba-2 have no delta rule and one decay per head; gated DeltaNet has
    both; Kimi's delta attention has a decay per feature of the key. To process a sequence in
    several calls, pass the state of one call to the next.

    Args:
        query: Queries, scaled as the model does.
        key: Keys, as many heads as queries; each serves N / K heads of the values. With the delta
            rule their length must be at most 1 (if beta is at most 1), or the state may diverge.
        value: Values of N heads.
        log_decay: Logarithm of the decay, at most 0: one per head, or one per feature of the key.
            None is no decay.
        beta: Weight with which each token is written; None is 1.
        delta_rule: Whether what the state holds for the key is subtracted first.
        initial_state: State before the first token, in the same document; None is zero.
        segments: Document number of each token; a run of equal numbers is a document, and the state
            is zero before its first token.
        valid: False for padding, which does not change the state.
        method: "scan" is token by token; "chunked" multiplies matrices inside of chunks, the delta
            rule by one triangular system a chunk, and hands the state from chunk to chunk.
        chunk_size: Tokens per chunk; the number of tokens makes one chunk of all.
        axis_name: Mesh axis over which the sequence is sharded in the order of `zigzag_order`,
            inside `jax.shard_map`. Each device first works out what its parts do to a state.

    Returns:
        The outputs, computed in float32, in the dtype of `value`, and the state in float32, that
        after the whole sequence.

    Raises:
        ValueError: N is not a multiple of K, `log_decay` has another shape, `chunk_size` is below
            1, or the method is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> key = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[:, None]
        >>> value = jnp.array([[1.0], [2.0], [5.0]])[:, None]
        >>> F.linear_attention(key, key, value).output.ravel()  # the sum of a key's values
        Array([1., 2., 6.], dtype=float32)
        >>> F.linear_attention(key, key, value, delta_rule=True).output.ravel()  # the last one
        Array([1., 2., 5.], dtype=float32)

    References:
        Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear
        Attention, 2020. arXiv:2006.16236
        Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length,
        2024. arXiv:2406.06484, section 3 (chunks)
        Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024.
        arXiv:2412.06464, section 3
        Dao and Gu, Transformers are SSMs, 2024. arXiv:2405.21060 (Mamba-2)
        Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025.
        arXiv:2510.26692 (decays by feature)
    """
    K, N = key.shape[-2], value.shape[-2]
    if K == 0 or N % K:
        raise ValueError(f"The {N} heads of the values must be a multiple of the {K} of the keys.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
    shape = value.shape[:-1]  # [*batch, T, N]
    decay = jnp.zeros(shape, jnp.float32) if log_decay is None else log_decay
    if decay.shape not in (shape, (*shape, key.shape[-1])):
        raise ValueError(
            f"log_decay must be one per head, of shape {shape}, or one per feature of the key, "
            f"{(*shape, key.shape[-1])}; got {decay.shape}."
        )
    weight = jnp.ones(shape, jnp.float32) if beta is None else beta
    state_shape = *shape[:-2], N, key.shape[-1], value.shape[-1]
    state = jnp.zeros(state_shape, jnp.float32) if initial_state is None else initial_state
    state = state.astype(jnp.float32)
    if axis_name is not None:
        options: dict[str, Any] = dict(delta_rule=delta_rule, method=method, chunk_size=chunk_size)
        arrays = dict(query=query, key=key, value=value, log_decay=decay, beta=weight)
        masks, documents = split_masks(segments, valid, shape[:-1])
        return _across_devices(axis_name, state, arrays, documents, masks | options)
    decay = decay if decay.ndim == value.ndim else decay[..., None]
    steps = token_steps(value, segments, valid)

    def head_major(x: Array, *, repeat: int = 1) -> Float32[Array, "..."]:
        return jnp.repeat(jnp.moveaxis(x.astype(jnp.float32), -2, -3), repeat, axis=-3)

    is_valid = steps.valid[..., None, :, None]
    tokens = Tokens(
        head_major(query, repeat=N // K),
        jnp.where(is_valid, head_major(key, repeat=N // K), 0.0),
        head_major(value),
        jnp.where(is_valid, jnp.maximum(head_major(decay), MIN_LOG_DECAY), 0.0),
        head_major(weight[..., None]),
        jnp.broadcast_to(steps.segment, shape[:-1])[..., None, :],
    )
    state = pvary_like(state, tokens)
    run = _scan if method == "scan" else partial(_chunked, chunk_size=chunk_size)
    output, state = run(tokens, state, delta_rule)
    return LinearAttention(jnp.moveaxis(output, -3, -2).astype(value.dtype), state)


def _across_devices(
    axis_name: str,
    state: Array,
    arrays: dict[str, Any],
    documents: PartDocuments,
    options: dict[str, Any],
) -> LinearAttention:
    """Linear attention over a sequence sharded over a mesh axis.

    What follows a part is affine in the state before it: columns of values that are zero, begun
    with the identity, become the matrix that multiplies the state.
    """
    axis = state.ndim - 3
    arrays = {name: split_parts(x, axis) for name, x in arrays.items()}
    value = arrays["value"]
    zeros = jnp.zeros((*value.shape[:-1], state.shape[-2]), value.dtype)
    widened = arrays | {"value": jnp.concatenate([value, zeros], axis=-1)}
    start = zeros_and_identity(state)
    parts = linear_attention(**widened, initial_state=start, **options).state
    before, after = states_between_parts(apply_affine, parts, documents, state, axis_name)
    output = linear_attention(**arrays, initial_state=before, **options).output
    return LinearAttention(join_parts(output, axis), after)


def _scan(tokens: Tokens, state: Array, delta_rule: bool) -> tuple[Array, Array]:
    """Token by token."""
    starts = jnp.diff(tokens.document, axis=-1, prepend=0) > 0

    def step(state: Array, token: Any) -> tuple[Array, Array]:
        query, key, value, log_decay, beta, start = token
        state = jnp.where(start[..., None, None], 0.0, state) * jnp.exp(log_decay)[..., None]
        if delta_rule:
            value = value - jnp.einsum("...kv,...k->...v", state, key)
        state = state + key[..., None] * (beta * value)[..., None, :]
        return state, jnp.einsum("...kv,...k->...v", state, query)

    by_token = [jnp.moveaxis(x, -2, 0) for x in tokens[:-1]]
    state, output = jax.lax.scan(step, state, (*by_token, jnp.moveaxis(starts, -1, 0)))
    return jnp.moveaxis(output, 0, -2), state


def _chunked(
    tokens: Tokens, state: Array, delta_rule: bool, *, chunk_size: int
) -> tuple[Array, Array]:
    """Chunk by chunk; padding at the end writes nothing."""
    length = tokens.value.shape[-2]
    chunk_size = max(1, min(chunk_size, length))
    padding = -length % chunk_size

    def split(x: Array, axis: int, mode: str = "constant") -> Array:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, padding)
        x = jnp.pad(x, width, mode=mode)
        axis %= x.ndim
        x = x.reshape(*x.shape[:axis], -1, chunk_size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    document = split(tokens.document, -1, "edge")
    chunks = Tokens._make([*(split(x, -2) for x in tokens[:-1]), document])
    last = document[..., -1:]
    previous = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    body = jax.checkpoint(partial(_chunk, delta_rule=delta_rule))
    state, output = jax.lax.scan(body, state, (chunks, previous))
    output = jnp.moveaxis(output, 0, -3)
    output = output.reshape(*output.shape[:-3], -1, output.shape[-1])
    return output[..., :length, :], state


def _chunk(
    state: Float32[Array, "*batch N H Hv"], inputs: tuple[Tokens, Array], *, delta_rule: bool
) -> tuple[Array, Array]:
    """One chunk: the new state, and the outputs of its tokens.

    `previous` is the document of the token before the chunk.
    """
    tokens, previous = inputs
    query, key, value, log_decay, beta, document = tokens
    continues = (document == previous)[..., None]  # whether the state reaches a token
    from_start = jnp.where(continues, jnp.exp(jnp.cumsum(log_decay, axis=-2)), 0.0)
    is_last = document == document[..., -1:]
    to_end = jnp.where(is_last[..., None], jnp.exp(_sums_after(log_decay)), 0.0)
    visible = jnp.tril(document[..., :, None] == document[..., None, :])
    written = beta * value
    readers = jnp.stack([query, key]) if delta_rule else query[None]
    products = _decayed_products(readers, key[None], log_decay[None])
    products = jnp.where(jnp.broadcast_to(visible, products.shape), products, 0.0)
    if delta_rule:
        right = jnp.concatenate([written, beta * key * from_start], axis=-1)
        solved = _solve_unit_triangular(jnp.tril(beta * products[1], -1), right)
        written, read = jnp.split(solved, [value.shape[-1]], axis=-1)
        written = written - read @ state
    output = (query * from_start) @ state + products[0] @ written
    decay = jnp.swapaxes(from_start[..., -1:, :], -1, -2)
    return decay * state + jnp.swapaxes(key * to_end, -1, -2) @ written, output


def _decayed_products(
    x: Float32[Array, "X *batch T H"], y: Float32[Array, "1 *batch T H"], log_decay: Array
) -> Float32[Array, "X *batch T S"]:
    """Products x[i] . (decay from j to i) y[j] for j <= i; the entries of j > i mean nothing.

    Each sum of logarithms is one of its own terms: none is a difference of two large sums, and no
    exponential is over 1. For decays by feature, blocks double in size: the tokens of the second
    half are multiplied by the decays since its beginning, the tokens of the first half by the
    decays to its end.
    """
    T, H = x.shape[-2:]
    if log_decay.shape[-1] == 1:
        between = jnp.tril(jnp.broadcast_to(log_decay, (*log_decay.shape[:-1], T)), -1)
        sums = jnp.cumsum(between, axis=-2)
        return (x @ jnp.swapaxes(y, -1, -2)) * jnp.exp(sums)
    size = _power_of_two(T)
    padding = [(0, 0)] * (x.ndim - 2) + [(0, size - T), (0, 0)]
    x, y, log_decay = (jnp.pad(a, padding) for a in (x, y, log_decay))
    blocks = jnp.sum(x * y, axis=-1)[..., None, None]
    while (width := blocks.shape[-1]) < size:
        halves = [
            a.reshape(*a.shape[:-2], size // (2 * width), 2, width, H) for a in (x, y, log_decay)
        ]
        (_, later), (earlier, _), (to_end, from_start) = (
            (a[..., 0, :, :], a[..., 1, :, :]) for a in halves
        )
        later = later * jnp.exp(jnp.cumsum(from_start, axis=-2))
        earlier = earlier * jnp.exp(_sums_after(to_end))
        blocks = _join_blocks(blocks, later @ jnp.swapaxes(earlier, -1, -2))
    return blocks[..., 0, :T, :T]


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _join_blocks(
    blocks: Float32[Array, "*batch n w w"], corners: Float32[Array, "*batch m w w"]
) -> Float32[Array, "*batch m v v"]:
    """Blocks of twice the size, [[first, 0], [corner, second]]."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corners, second], axis=-1)], axis=-2)


def _sums_after(x: Float32[Array, "*batch T H"]) -> Float32[Array, "*batch T H"]:
    """Sum over l > i of x[l]."""
    later = jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)
    return jax.lax.cumsum(later, axis=x.ndim - 2, reverse=True)


def _solve_unit_triangular(
    strict: Float32[Array, "*batch T T"], right: Float32[Array, "*batch T H"]
) -> Float32[Array, "*batch T H"]:
    """Solve (I + strict) @ x = right for a strictly lower triangular matrix."""
    strict, right = pvary_like((strict, right), strict, right)
    inverse = _inverse_unit_triangular(jax.lax.stop_gradient(strict))
    return jax.lax.custom_linear_solve(
        lambda x: x + strict @ x,
        right,
        lambda _, b: inverse @ b,
        lambda _, b: jnp.swapaxes(inverse, -1, -2) @ b,
    )


def _inverse_unit_triangular(strict: Float32[Array, "*batch T T"]) -> Float32[Array, "*batch T T"]:
    """(I + strict)^-1, by inverses of diagonal blocks that double in size.

        [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]

    Matrix products only: a triangular solver is slow for many small matrices.
    """
    T = strict.shape[-1]
    size = _power_of_two(T)
    strict = jnp.pad(strict, [(0, 0)] * (strict.ndim - 2) + [(0, size - T)] * 2)
    inverse = pvary_like(jnp.ones((*strict.shape[:-2], size, 1, 1), strict.dtype), strict)
    while (width := inverse.shape[-1]) < size:
        starts = range(0, size, 2 * width)
        blocks = [strict[..., i + width : i + 2 * width, i : i + width] for i in starts]
        corners = inverse[..., 1::2, :, :] @ jnp.stack(blocks, axis=-3) @ inverse[..., 0::2, :, :]
        inverse = _join_blocks(inverse, -corners)
    return inverse[..., 0, :T, :T]
