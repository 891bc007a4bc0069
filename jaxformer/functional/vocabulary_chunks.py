"""Log-sum-exp, target logit and mean logit per token, in chunks of the vocabulary."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer.functional.activations import soft_cap
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.losses import TokenScores
from jaxformer.functional.products import factors


def finish_logits(
    products: Float[Array, "*batch V"],
    masked: Bool[Array, " V"] | None,
    multiplier: float,
    softcap: float | None,
) -> Float32[Array, "*batch V"]:
    """Turn products into logits: multiplier, soft cap, -inf at masked ids."""
    logits = products.astype(jnp.float32) * multiplier
    if softcap is not None:
        logits = soft_cap(logits, softcap)
    if masked is not None:
        logits = jnp.where(jnp.broadcast_to(masked, logits.shape), -jnp.inf, logits)
    return logits


class Rule(NamedTuple):
    """What is chosen; see `linear_scores`."""

    vocabulary_axis: int
    multiplier: float
    softcap: float | None
    chunk: int


class Head(NamedTuple):
    """Arrays the logits are made from; V and targets are those of this device's shard."""

    features: Float[Array, "T D"]
    kernel: Float[Array, "..."]
    bias: Float[Array, " V"] | None
    masked: Bool[Array, " V"] | None
    targets: Int[Array, " T"]


class _Chunk(NamedTuple):
    """A chunk of the vocabulary from id `first` on, and its products with the features."""

    first: int | Int[Array, ""]
    kernel: Float[Array, "..."]
    masked: Bool[Array, " C"] | None
    products: Float[Array, "T C"]


def _chunk(rule: Rule, head: Head, first: int | Array, size: int) -> _Chunk:
    def cut(x: Array | None, axis: int = 0) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, size, axis=axis)

    kernel = cut(head.kernel, rule.vocabulary_axis)
    products = _product(head.features, kernel, (1, 1 - rule.vocabulary_axis))
    if head.bias is not None:
        bias = cut(head.bias).astype(products.dtype)
        products = products + jnp.broadcast_to(bias, products.shape)
    return _Chunk(first, kernel, cut(head.masked), products)


def _product(a: Array, b: Array, over: tuple[int, int], dtype: Any = None) -> Array:
    """Product of two matrices, contracted over one axis of each."""
    axes = (((over[0],), (over[1],)), ((), ()))
    if dtype == jnp.float32:
        a, b = factors(a, b)
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _each_chunk(rule: Rule, head: Head, step: Any, start: Any) -> Any:
    """Fold over the chunks of the vocabulary: whole chunks in a loop, then the remainder."""
    local_vocab_size = head.kernel.shape[rule.vocabulary_axis]
    num_chunks, rest = divmod(local_vocab_size, rule.chunk)
    slice_at = partial(_chunk, rule, head)
    carry = jax.lax.fori_loop(
        0, num_chunks, lambda i, carry: step(slice_at(i * rule.chunk, rule.chunk), carry), start
    )
    return step(slice_at(local_vocab_size - rest, rest), carry) if rest else carry


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return varying(jnp.zeros(shape, dtype), *varies_over(like))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_scores(rule: Rule, head: Head) -> TokenScores:
    """Logit statistics over this device's shard; 0 for targets of other shards."""
    local_vocab_size, tokens = head.kernel.shape[rule.vocabulary_axis], head.targets.shape

    def step(chunk: _Chunk, so_far: TokenScores) -> TokenScores:
        logits = finish_logits(chunk.products, chunk.masked, rule.multiplier, rule.softcap)
        local_ids = head.targets - chunk.first
        in_chunk = (local_ids >= 0) & (local_ids < logits.shape[-1])
        target_logit = jnp.take_along_axis(
            logits, jnp.where(in_chunk, local_ids, 0)[:, None], axis=1
        )[:, 0]
        return TokenScores(
            jnp.logaddexp(so_far.log_z, jax.nn.logsumexp(logits, axis=-1)),
            jnp.where(in_chunk, target_logit, so_far.target),
            so_far.mean + jnp.sum(logits, axis=-1) / local_vocab_size,
        )

    zeros = _zeros(tokens, jnp.float32, head.features)
    return _each_chunk(rule, head, step, TokenScores(zeros - jnp.inf, zeros, zeros))


def _forward(rule: Rule, head: Head) -> tuple[TokenScores, tuple[Head, Array]]:
    statistics = chunked_scores(rule, head)
    return statistics, (head, statistics.log_z)


def _backward(rule: Rule, kept: tuple[Head, Array], wanted: TokenScores) -> tuple[Head]:
    inputs, log_z = kept
    axis, local_vocab_size = rule.vocabulary_axis, inputs.kernel.shape[rule.vocabulary_axis]
    log_z, d_log_z, d_target, d_mean = (x[:, None] for x in (log_z, *wanted))

    def step(chunk: _Chunk, so_far: Any) -> Any:
        logits, postprocess_vjp = jax.vjp(
            lambda x: finish_logits(x, chunk.masked, rule.multiplier, rule.softcap), chunk.products
        )
        ids = jnp.arange(logits.shape[-1]) + chunk.first
        is_target = inputs.targets[:, None] == ids[None]
        d_logits = (
            d_log_z * jnp.exp(logits - log_z)
            + jnp.where(is_target, d_target, 0.0)
            + d_mean / local_vocab_size
        )
        (d_logits,) = postprocess_vjp(d_logits)
        d_features, d_kernel, d_bias = so_far
        rows, columns = (d_logits, inputs.features) if axis == 0 else (inputs.features, d_logits)
        chunk_gradient = _product(rows, columns, (0, 0))
        d_kernel = jax.lax.dynamic_update_slice_in_dim(
            d_kernel, chunk_gradient, chunk.first, axis=axis
        )
        d_features = d_features + _product(d_logits, chunk.kernel, (1, axis), jnp.float32)
        if d_bias is not None:
            chunk_gradient = jnp.sum(d_logits.astype(jnp.float32), axis=0).astype(d_bias.dtype)
            d_bias = jax.lax.dynamic_update_slice_in_dim(
                d_bias, chunk_gradient, chunk.first, axis=0
            )
        return d_features, d_kernel, d_bias

    x, kernel, bias, *_ = inputs
    initial = (
        _zeros(x.shape, jnp.float32, x),
        _zeros(kernel.shape, kernel.dtype, x),
        None if bias is None else _zeros(bias.shape, bias.dtype, x),
    )
    d_features, d_kernel, d_bias = _each_chunk(rule, inputs, step, initial)
    gradients: Any = (d_features.astype(x.dtype), d_kernel, d_bias, None, None)
    return (Head(*gradients),)


chunked_scores.defvjp(_forward, _backward)
