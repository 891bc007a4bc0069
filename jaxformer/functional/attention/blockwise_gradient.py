"""Backward pass of blockwise attention; recomputes scores tile by tile."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer.functional.attention.online_softmax import NEG_INF
from jaxformer.functional.attention.scores import attention_scores
from jaxformer.functional.attention.tiles import (
    BlockwiseOptions,
    HeadGroup,
    KeyTile,
    QueryTile,
    compute_tile_bias,
    compute_tile_mask,
    slice_block,
    slice_key_tile,
    slice_query_tile,
    update_if_visible,
)
from jaxformer.functional.collectives import pvary_like
from jaxformer.functional.matmul_precision import float32_matmul_operands


class Gradients(NamedTuple):
    """Gradients of query, key, value and bias parameters.

    The gradients of keys and values are transposed, so that no tile of scores needs a transpose.
    """

    query: Float32[Array, "G T H"]
    key: Float32[Array, "H S"]
    value: Float32[Array, "Hv S"]
    bias: Any  # parameters


class OutputGradient(NamedTuple):
    """Inputs of the backward pass of a query tile: output cotangent, log-sum-exp and delta.

    Attributes:
        d_output: Cotangent of the output.
        lse: Log of the softmax denominator.
        delta: Sum of cotangent times output; it equals the sum of weights times their cotangents.
    """

    d_output: Float[Array, "G T Hv"]
    lse: Float32[Array, "G T"]
    delta: Float32[Array, "G T"]


def head_group_gradient(
    options: BlockwiseOptions,
    block_mask: Bool[Array, "rows columns"],
    group: HeadGroup,
    output: Float[Array, "G T Hv"],
    lse: Float32[Array, "G T"],
    d_output: Float[Array, "G T Hv"],
) -> HeadGroup:
    """Gradient of `head_group_attention`; scores are recomputed.

        dv = w^T do;    dw = do v^T;    ds = w (dw - sum of do o);    dq = ds k;    dk = ds^T q

    Args:
        options: Options of the forward pass.
        block_mask: False for tiles without visible pairs.
        group: Inputs of the forward pass.
        output: Its output.
        lse: Log of the softmax denominators.
        d_output: Cotangent of the output.

    Returns:
        The gradients of queries, keys, values and bias parameters, as a `HeadGroup`.
    """
    lse = jnp.where(lse > NEG_INF, lse, 0.0)  # queries without keys have no weights
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    output_gradient, size = OutputGradient(d_output, lse, delta), options.block_sizes[0]

    def zeros(*shape: int) -> Float32[Array, "..."]:
        """Zeros with the varying axes of the loop carry."""
        return pvary_like(jnp.zeros(shape, jnp.float32), group.query)

    def query_tile_gradient(carry: Any, index: Int[Array, ""]):
        query_tile = slice_query_tile(options, group, index)
        tile_gradient = slice_block(output_gradient, index, size, axis=1)

        def add_key_tile(j: Int[Array, ""], carry: Gradients) -> Gradients:
            key_tile = slice_key_tile(options, group, j)
            return _add_tile_gradients(options, group, query_tile, key_tile, tile_gradient, carry)

        def step(j: Int[Array, ""], carry: Gradients) -> Gradients:
            return update_if_visible(block_mask[index, j], add_key_tile, j, carry)

        initial = Gradients(zeros(*query_tile.query.shape), *carry)
        gradients = jax.lax.fori_loop(0, block_mask.shape[1], step, initial)
        return gradients[1:], gradients.query

    params = None if group.bias is None else group.bias.params
    key, value = (zeros(*x.shape[::-1]) for x in (group.key, group.value))
    initial = key, value, jax.tree.map(lambda x: zeros(*x.shape), params)
    tile_indices = jnp.arange(block_mask.shape[0])
    (key, value, bias), query = jax.lax.scan(query_tile_gradient, initial, tile_indices)
    query = jnp.moveaxis(query, 0, 1).reshape(group.query.shape)
    like = differentiable(group)
    if group.bias is not None:
        bias = like.bias._replace(params=bias)
    gradients = HeadGroup(query, key.T, value.T, None, bias, None)
    return gradients if options.keep_float32 else cast_gradients(gradients, group)


def differentiable(group: HeadGroup) -> Any:
    """Return what of a group has a gradient: no mask, no positions, no random key."""
    bias: Any = group.bias
    if bias is not None:
        bias = bias._replace(query_positions=None, key_positions=None)
    return group._replace(mask=None, bias=bias, dropout_key=None)


def cast_gradients(gradient: HeadGroup, group: HeadGroup) -> HeadGroup:
    """Cast gradients to the dtypes of the primals."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), gradient, differentiable(group))


def _add_tile_gradients(
    options: BlockwiseOptions,
    group: HeadGroup,
    query_tile: QueryTile,
    key_tile: KeyTile,
    output_gradient: OutputGradient,
    carry: Gradients,
) -> Gradients:
    """Add one tile's contribution to the gradients of query, key, value and bias parameters."""
    mask, dropout_multipliers = compute_tile_mask(options, group, query_tile, key_tile)
    bias, d_bias = None, carry.bias
    if group.bias is not None:
        bias_fn = lambda x: compute_tile_bias(group.bias._replace(params=x), query_tile, key_tile)  # noqa: E731
        bias, bias_vjp = jax.vjp(bias_fn, group.bias.params)
    score = partial(attention_scores, scale=options.scale, logit_softcap=options.logit_softcap)
    capped = jax.vmap(score, in_axes=(0, None))(query_tile.query, key_tile.key)
    scores = capped if bias is None else capped + bias
    if options.normalizer == "softmax":
        weights = _apply_mask(mask, jnp.exp(scores - output_gradient.lse[..., None]))
        score_derivative = weights
    else:
        inverse_denominator = jnp.exp(-output_gradient.lse)[..., None]
        weights = _apply_mask(mask, jax.nn.relu(scores) * inverse_denominator)
        score_derivative = jnp.where(weights > 0, inverse_denominator, 0.0)
    dropped_weights = weights if dropout_multipliers is None else weights * dropout_multipliers
    d_output = output_gradient.d_output
    d_weights = _dot(d_output, key_tile.value, ((2,), (1,)))
    if dropout_multipliers is not None:
        d_weights = d_weights * dropout_multipliers
    d_scores = score_derivative * (d_weights - output_gradient.delta[..., None])
    if group.bias is not None:
        d_bias = jax.tree.map(lambda x, y: x + y.astype(x.dtype), d_bias, *bias_vjp(d_scores))
    if options.logit_softcap is not None:
        d_scores = d_scores * (1.0 - jnp.square(capped / options.logit_softcap))
    d_dot_products = (options.scale * d_scores).astype(query_tile.query.dtype)
    start = key_tile.tile_index * options.block_sizes[1]
    over_queries = ((0, 1), (0, 1))
    d_key = _dot(query_tile.query, d_dot_products, over_queries)
    d_value = _dot(d_output, dropped_weights.astype(d_output.dtype), over_queries)
    return Gradients(
        carry.query + _dot(d_dot_products, key_tile.key, ((2,), (0,))),
        _add_at_block(carry.key, d_key, start),
        _add_at_block(carry.value, d_value, start),
        d_bias,
    )


def _dot(x: Array, y: Array, axes: Any) -> Float32[Array, "..."]:
    x, y = float32_matmul_operands(x, y)
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _apply_mask(mask: Bool[Array, "... R C"] | None, x: Float32[Array, "G R C"]) -> Array:
    return x if mask is None else jnp.where(jnp.broadcast_to(mask, x.shape), x, 0.0)


def _add_at_block(whole: Array, block: Array, start: Int[Array, ""]) -> Array:
    """Add a block to the columns of an array from `start` on."""
    current = jax.lax.dynamic_slice_in_dim(whole, start, block.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(whole, current + block, start, axis=1)
