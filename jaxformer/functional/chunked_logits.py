"""Log-sum-exp, target logit and mean logit per token, in chunks of the vocabulary."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer.functional.activations import soft_cap
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.losses import LogitStatistics
from jaxformer.functional.matmul_precision import float32_matmul_operands


def postprocess_logits(
    products: Float[Array, "*batch V"],
    id_mask: Bool[Array, " V"] | None,
    multiplier: float,
    softcap: float | None,
) -> Float32[Array, "*batch V"]:
    """Compute logits from products: multiplier, soft cap, -inf at masked ids."""
    logits = products.astype(jnp.float32) * multiplier
    if softcap is not None:
        logits = soft_cap(logits, softcap)
    if id_mask is not None:
        logits = jnp.where(jnp.broadcast_to(id_mask, logits.shape), -jnp.inf, logits)
    return logits


class LogitOptions(NamedTuple):
    """Static options; see `linear_logit_statistics`."""

    vocabulary_axis: int
    multiplier: float
    softcap: float | None
    chunk_size: int


class LogitInputs(NamedTuple):
    """Inputs of the logits; V and targets belong to this device's shard."""

    features: Float[Array, "T D"]
    kernel: Float[Array, "..."]
    bias: Float[Array, " V"] | None
    id_mask: Bool[Array, " V"] | None
    targets: Int[Array, " T"]


class _VocabChunk(NamedTuple):
    """A chunk of the vocabulary from id `first` on, and its products with the features."""

    first: int | Int[Array, ""]
    kernel: Float[Array, "..."]
    id_mask: Bool[Array, " C"] | None
    products: Float[Array, "T C"]


def _slice_chunk(
    options: LogitOptions, inputs: LogitInputs, first: int | Array, size: int
) -> _VocabChunk:
    def cut(x: Array | None, axis: int = 0) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, size, axis=axis)

    kernel = cut(inputs.kernel, options.vocabulary_axis)
    products = _dot(inputs.features, kernel, (1, 1 - options.vocabulary_axis))
    if inputs.bias is not None:
        bias = cut(inputs.bias).astype(products.dtype)
        products = products + jnp.broadcast_to(bias, products.shape)
    return _VocabChunk(first, kernel, cut(inputs.id_mask), products)


def _dot(a: Array, b: Array, contracted_axes: tuple[int, int], dtype: Any = None) -> Array:
    """Product of two matrices, contracted over one axis of each."""
    axes = (((contracted_axes[0],), (contracted_axes[1],)), ((), ()))
    if dtype == jnp.float32:
        a, b = float32_matmul_operands(a, b)
    return jax.lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _fold_chunks(options: LogitOptions, inputs: LogitInputs, step: Any, initial: Any) -> Any:
    """Fold over the chunks of the vocabulary: whole chunks in a loop, then the remainder."""
    local_vocab_size = inputs.kernel.shape[options.vocabulary_axis]
    num_chunks, rest = divmod(local_vocab_size, options.chunk_size)
    slice_at, size = partial(_slice_chunk, options, inputs), options.chunk_size

    def whole_chunk(i: Array, carry: Any) -> Any:
        return step(slice_at(i * size, size), carry)

    carry = jax.lax.fori_loop(0, num_chunks, whole_chunk, initial)
    return step(slice_at(local_vocab_size - rest, rest), carry) if rest else carry


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_logit_statistics(options: LogitOptions, inputs: LogitInputs) -> LogitStatistics:
    """Logit statistics over this device's shard; 0 for targets of other shards."""
    local_vocab_size, tokens = inputs.kernel.shape[options.vocabulary_axis], inputs.targets.shape

    def step(chunk: _VocabChunk, carry: LogitStatistics) -> LogitStatistics:
        logits = postprocess_logits(
            chunk.products, chunk.id_mask, options.multiplier, options.softcap
        )
        local_ids = inputs.targets - chunk.first
        in_chunk = (local_ids >= 0) & (local_ids < logits.shape[-1])
        index = jnp.where(in_chunk, local_ids, 0)[:, None]
        target_logit = jnp.take_along_axis(logits, index, axis=1)[:, 0]
        return LogitStatistics(
            jnp.logaddexp(carry.log_z, jax.nn.logsumexp(logits, axis=-1)),
            jnp.where(in_chunk, target_logit, carry.target_logit),
            carry.mean_logit + jnp.sum(logits, axis=-1) / local_vocab_size,
        )

    zeros = pvary_like(jnp.zeros(tokens, jnp.float32), inputs.features)
    return _fold_chunks(options, inputs, step, LogitStatistics(zeros - jnp.inf, zeros, zeros))


def _forward(options: LogitOptions, inputs: LogitInputs):
    statistics = chunked_logit_statistics(options, inputs)
    return statistics, (inputs, statistics.log_z)


def _backward(
    options: LogitOptions, residuals: tuple[LogitInputs, Array], cotangents: LogitStatistics
) -> tuple[LogitInputs]:
    inputs, log_z = residuals
    axis, local_vocab_size = options.vocabulary_axis, inputs.kernel.shape[options.vocabulary_axis]
    log_z, d_log_z, d_target, d_mean = (x[:, None] for x in (log_z, *cotangents))

    def step(chunk: _VocabChunk, carry: Any) -> Any:
        logits, postprocess_vjp = jax.vjp(
            lambda x: postprocess_logits(x, chunk.id_mask, options.multiplier, options.softcap),
            chunk.products,
        )
        ids = jnp.arange(logits.shape[-1]) + chunk.first
        is_target = inputs.targets[:, None] == ids[None]
        d_logits = (
            d_log_z * jnp.exp(logits - log_z)
            + jnp.where(is_target, d_target, 0.0)
            + d_mean / local_vocab_size
        )
        (d_logits,) = postprocess_vjp(d_logits)
        d_features, d_kernel, d_bias = carry
        rows, columns = (d_logits, inputs.features) if axis == 0 else (inputs.features, d_logits)
        update = jax.lax.dynamic_update_slice_in_dim
        d_kernel = update(d_kernel, _dot(rows, columns, (0, 0)), chunk.first, axis)
        d_features = d_features + _dot(d_logits, chunk.kernel, (1, axis), jnp.float32)
        if d_bias is not None:
            chunk_gradient = jnp.sum(d_logits.astype(jnp.float32), axis=0).astype(d_bias.dtype)
            d_bias = update(d_bias, chunk_gradient, chunk.first, 0)
        return d_features, d_kernel, d_bias

    x, kernel, bias, *_ = inputs
    d_bias = None if bias is None else jnp.zeros_like(bias)
    initial = jnp.zeros_like(x, jnp.float32), jnp.zeros_like(kernel), d_bias
    d_features, d_kernel, d_bias = _fold_chunks(options, inputs, step, pvary_like(initial, x))
    gradients: Any = (d_features.astype(x.dtype), d_kernel, d_bias, None, None)
    return (LogitInputs(*gradients),)


chunked_logit_statistics.defvjp(_forward, _backward)
