"""Blockwise (FlashAttention-style) attention in plain JAX: memory is linear in sequence length."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray, Shaped

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.attention.blockwise_gradient import head_group_gradient
from jaxformer.functional.attention.lazy_masks import AttentionBias, AttentionMask, check_arrays
from jaxformer.functional.attention.online_softmax import (
    NEG_INF,
    PartialAttention,
    combine_partial_attention,
    finish_partial_attention,
    finite_sinks,
    log_denominator,
    partial_attention,
    sinks_gradient,
)
from jaxformer.functional.attention.scores import Normalizer, check_score_options, resolve_scale
from jaxformer.functional.attention.tiles import (
    KEY_FIELDS,
    QUERY_FIELDS,
    BlockwiseOptions,
    HeadGroup,
    compute_block_mask,
    compute_tile_bias,
    compute_tile_mask,
    slice_key_tile,
    slice_query_tile,
    update_if_visible,
)
from jaxformer.functional.collectives import pvary, pvary_like, varying_axes
from jaxformer.functional.platforms import target_platform

# Queries and keys whose scores are there at a time: on a CPU what its caches hold; on a TPU v5e 512
# take 19 ms where 128 take 82, by XLA's estimate, with 73 and 69 MB (1024: 13 ms, 136 MB).
# On GPUs, likewise fewer and larger products; nothing says yet how many are best.
DEFAULT_BLOCK_SIZE = {"cpu": 128, "gpu": 512, "tpu": 512}
BLOCKWISE_REMAT_NAME = "attention by blocks"  # name of its results for policies of `jax.checkpoint`


@typechecked
def blockwise_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None = None,
    bias: AttentionBias | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    sinks: Float[Array, " N"] | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """`dot_product_attention` computed tile by tile, without the full score matrix.

        for each block of keys:  peak' = max(peak, max(scores))
                                 sums' = exp(peak - peak') * sums + exp(scores - peak') @ [value, 1]
        output, total = sums;    output / total

    Fully masked tiles are skipped. The backward pass recomputes scores from queries, keys and the
    log-sum-exp of each query, so memory is linear in the number of queries and keys, but for one
    bit per pair of tiles. There is a gradient but no `jax.jvp`.

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads.
        mask: As in `dot_product_attention`, but lazy. None allows every pair.
        bias: Added to the scores after scale and cap.
        scale: As in `dot_product_attention`, as are the options below.
        logit_softcap: Bound on the absolute score.
        normalizer: "softmax" or "relu".
        dropout_rate: Probability of a weight being set to zero.
        dropout_key: Random key of dropout; it drops other weights than "xla" does.
        sinks: A score per query head, of a key whose value is zero.
        block_sizes: Maximum queries and keys of a tile; None is 128 of each on CPUs, else 512.

    Returns:
        The mean values of each head, in the dtype of ``query``.

    Raises:
        ValueError: Shapes do not fit, mask or bias are of other tokens than these, an option is out
            of its range, or dropout has no key.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxformer import functional as F
        >>> positions = jnp.arange(1000)
        >>> mask = F.AttentionMask(positions, positions, rule=F.MaskRule(causal=True))
        >>> query = key = jnp.ones((1000, 2, 8))
        >>> value = jnp.broadcast_to(positions[:, None, None].astype(float), key.shape)
        >>> F.blockwise_attention(query, key, value, mask)[:3, 0, 0]  # means of the values so far
        Array([0. , 0.5, 1. ], dtype=float32)

    References:
        Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021. arXiv:2112.05682
        Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness,
        2022. arXiv:2205.14135, sections 3.1 and B.2
    """
    check_arrays(query, key, mask, bias)
    check_score_options(normalizer, logit_softcap, dropout_rate, dropout_key, sinks)
    block_q, block_k = block_sizes or (DEFAULT_BLOCK_SIZE[target_platform()],) * 2
    if min(block_q, block_k) < 1:
        raise ValueError(f"Blocks have queries and keys; got {block_q} and {block_k}.")
    T, S = query.shape[-3], key.shape[-3]
    if 0 in (*query.shape[:-2], S):
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    query, scale = resolve_scale(query, scale)
    sizes = min(block_q, T), min(block_k, S)
    options = BlockwiseOptions(scale, logit_softcap, normalizer, dropout_rate, sizes, S)
    groups = to_head_groups(options, query, key, value, mask, bias, dropout_key)
    grouped_sinks = split_sinks(sinks, groups, key.shape[-2])
    return from_head_groups(_blockwise(options, groups, grouped_sinks), query, key)


def to_head_groups(
    options: BlockwiseOptions,
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None,
    bias: AttentionBias | None,
    dropout_key: PRNGKeyArray | None,
    *extra_axes: str,
) -> HeadGroup:
    """Split arrays into one `HeadGroup` per sequence and KV head, padded to whole blocks.

    All arrays vary over the same mesh axes, so that loops carry one type: over `extra_axes`, and
    over each axis over which any of the arrays varies.
    """
    *batch, T, N, H = query.shape
    S, K = key.shape[-3:-1]
    count, (block_q, block_k) = math.prod(batch), options.block_sizes
    grouped_query = pad_to_multiple(query.reshape(count, T, K, N // K, H), block_q, axis=1)
    padded_key, padded_value = (
        jnp.moveaxis(pad_to_multiple(x.reshape(count, S, K, x.shape[-1]), block_k, axis=1), 1, 2)
        for x in (key, value)
    )
    sizes = batch, K, options.block_sizes
    dropout_keys = None
    if options.dropout_rate != 0.0 and dropout_key is not None:
        dropout_keys = jax.random.split(dropout_key, (count, K))
    groups = HeadGroup(
        jnp.transpose(grouped_query, (0, 2, 3, 1, 4)),
        padded_key,
        padded_value,
        _per_head_group(mask, *sizes),
        _per_head_group(bias, *sizes),
        dropout_keys,
    )
    groups = jax.tree.map(lambda x: x.reshape(count * K, *x.shape[2:]), groups)
    # By one `pvary`, whose gradient is one sum over devices.
    axes = frozenset(extra_axes).union(*map(varying_axes, jax.tree.leaves(groups)))
    return jax.tree.map(lambda x: pvary(x, *axes), groups)


def split_sinks(
    sinks: Float[Array, " N"] | None, groups: HeadGroup, num_kv_heads: int
) -> Float[Array, "U G"] | None:
    """Split sinks by `HeadGroup`, varying over the same mesh axes."""
    if sinks is None:
        return None
    by_group = finite_sinks(sinks).reshape(num_kv_heads, -1)
    count = len(groups.query) // num_kv_heads
    return pvary_like(jnp.tile(by_group, (count, 1)), groups.query)


def from_head_groups(
    output: Float[Array, "U G padded Hv"], query: Float[Array, "*batch T N H"], key: Array
) -> Float[Array, "*batch T N Hv"]:
    """Merge the outputs of all `HeadGroup`s: heads side by side, padding removed, query dtype."""
    *batch, T, N, _ = query.shape
    K = key.shape[-2]
    grouped_output = output.reshape(-1, K, N // K, *output.shape[-2:])[..., :T, :]
    merged = jnp.moveaxis(grouped_output, 3, 1).reshape(*batch, T, N, output.shape[-1])
    return merged.astype(query.dtype)


def pad_to_multiple(x: Array, multiple: int, axis: int) -> Array:
    """Pad an axis to a multiple by repeating its last entry."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, width, mode="edge") if width[axis][1] else x


def _per_head_group(
    mask_or_bias: Any, batch: list[int], num_kv_heads: int, block_sizes: tuple[int, int]
) -> Any:
    """Split a mask or bias into one per `HeadGroup`: pad positions, group head axes."""
    if mask_or_bias is None:
        return None
    count = math.prod(batch)

    def expand_positions(x: Array, multiple: int) -> Int[Array, "B K T"]:
        x = jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(count, -1)
        x = pad_to_multiple(x, multiple, axis=1)
        return jnp.broadcast_to(x[:, None], (count, num_kv_heads, x.shape[-1]))

    def split_head_axis(x: Array, axis: int | None) -> Shaped[Array, "B K ..."]:
        if axis is None:
            return jnp.broadcast_to(x, (count, num_kv_heads, *x.shape))
        by_group = x.reshape(*x.shape[:axis], num_kv_heads, -1, *x.shape[axis + 1 :])
        by_group = jnp.moveaxis(by_group, axis, 0)
        return jnp.broadcast_to(by_group, (count, *by_group.shape))

    if isinstance(mask_or_bias, AttentionBias):
        mask_or_bias = mask_or_bias.map_heads(split_head_axis)
    elif mask_or_bias.head_shifts is not None:
        shifts = split_head_axis(mask_or_bias.head_shifts, 0)
        mask_or_bias = mask_or_bias._replace(head_shifts=shifts)
    padded_fields = {
        name: expand_positions(x, size)
        for fields in zip(QUERY_FIELDS, KEY_FIELDS, strict=True)
        for name, size in zip(fields, block_sizes, strict=True)
        if (x := getattr(mask_or_bias, name, None)) is not None
    }
    return mask_or_bias._replace(**padded_fields)


def map_head_groups(function: Callable[..., Any], options: BlockwiseOptions, *groups: Any) -> Any:
    """Map a function over `HeadGroup`s: `lax.map` on CPU, `vmap` elsewhere.

    Behind a barrier: in a loop over layers, JAX would take all that positions alone decide, the
    masks of all blocks, out of that loop and keep it. Side by side, blocks meet if they do in any
    unit: a condition of each unit's own would be no condition, but a choice between two results.
    """
    groups = jax.lax.optimization_barrier(groups)
    block_masks = jax.vmap(partial(compute_block_mask, options))(groups[0])
    if target_platform() == "cpu":
        return jax.lax.map(lambda tile: function(options, *tile), (block_masks, *groups))
    return jax.vmap(partial(function, options, jnp.any(block_masks, axis=0)))(*groups)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    options: BlockwiseOptions, groups: HeadGroup, sinks: Float[Array, "U G"] | None
) -> Float[Array, "U G T Hv"]:
    return map_head_groups(head_group_attention, options, groups, sinks)[0]


def _blockwise_forward(options: BlockwiseOptions, groups: HeadGroup, sinks: Array | None):
    results = map_head_groups(head_group_attention, options, groups, sinks)
    output, lse = (checkpoint_name(x, BLOCKWISE_REMAT_NAME) for x in results)
    return output, (groups, sinks, output, lse)


def _blockwise_backward(
    options: BlockwiseOptions, residuals: Any, d_output: Float[Array, "U G T Hv"]
):
    groups, sinks, output, lse = residuals
    gradients = map_head_groups(head_group_gradient, options, groups, output, lse, d_output)
    d_sinks = None if sinks is None else sinks_gradient(sinks, output, lse, d_output)
    return gradients, d_sinks


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def head_group_attention(
    options: BlockwiseOptions,
    block_mask: Bool[Array, "rows columns"],
    group: HeadGroup,
    sinks: Float[Array, " G"] | None = None,
) -> tuple[Float[Array, "G T Hv"], Float32[Array, "G T"]]:
    """Attention of one `HeadGroup`: output and the log of each query's softmax denominator.

    With a softmax that is the log-sum-exp of its scores and sink. A query that meets neither has
    `NEG_INF`.
    """
    G, T, _ = group.query.shape
    attend = partial(
        partial_attention,
        scale=options.scale,
        logit_softcap=options.logit_softcap,
        normalizer=options.normalizer,
    )

    def full(fill: float, *shape: int) -> Float32[Array, "..."]:
        """A filled array with the varying axes of the loop carry."""
        whole = jnp.full((G, options.block_sizes[0], *shape), fill, jnp.float32)
        return pvary_like(whole, group.query)

    def attend_query_tile(index: Int[Array, ""]) -> tuple[Array, Array]:
        query_tile = slice_query_tile(options, group, index)

        def add_key_tile(j: Int[Array, ""], carry: PartialAttention) -> PartialAttention:
            key_tile = slice_key_tile(options, group, j)
            mask, dropout_multipliers = compute_tile_mask(options, group, query_tile, key_tile)
            bias = compute_tile_bias(group.bias, query_tile, key_tile)

            def one_head(query: Array, mask: Array | None, *bias_and_dropout: Array | None):
                return attend(query, key_tile.key, key_tile.value, mask, *bias_and_dropout)

            mask_axis = 0 if mask is not None and mask.ndim == 3 else None
            heads = jax.vmap(one_head, in_axes=(0, mask_axis, 0, 0))(
                query_tile.query, mask, bias, dropout_multipliers
            )
            return combine_partial_attention(carry, heads)

        def step(j: Int[Array, ""], carry: PartialAttention) -> PartialAttention:
            return update_if_visible(block_mask[index, j], add_key_tile, j, carry)

        max_score = full(NEG_INF if options.normalizer == "softmax" else 0.0)
        initial = PartialAttention(full(0.0, group.value.shape[-1]), full(0.0), max_score)
        if sinks is not None:  # a key that every query meets, with the value zero
            max_score = jnp.zeros_like(max_score) + sinks.astype(jnp.float32)[:, None]
            initial = initial._replace(denominator=full(1.0), max_score=max_score)
        state = jax.lax.fori_loop(0, block_mask.shape[1], step, initial)
        output = finish_partial_attention(state)
        dtype = jnp.float32 if options.keep_float32 else group.query.dtype
        return output.astype(dtype), log_denominator(state)

    output, lse = jax.lax.map(attend_query_tile, jnp.arange(block_mask.shape[0]))
    return (jnp.moveaxis(output, 0, 1).reshape(G, T, -1), jnp.moveaxis(lse, 0, 1).reshape(G, T))
