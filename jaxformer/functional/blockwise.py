"""Blockwise (FlashAttention-style) attention in plain JAX: memory is linear in sequence length."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from jaxformer.functional.arguments import checked
from jaxformer.functional.attention_mask import AttentionMask, ScoreBias, check_mask_and_bias
from jaxformer.functional.blocks import (
    How,
    Unit,
    bias_between,
    columns_of,
    meeting,
    near,
    rows_of,
    where_told,
)
from jaxformer.functional.blockwise_gradient import gradient_of_unit
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.heads import check_heads
from jaxformer.functional.online_softmax import (
    NOTHING,
    PartialAttention,
    attend_partially,
    finish_attention,
    merge_attention,
)
from jaxformer.functional.platforms import platform
from jaxformer.functional.scores import Normalizer, check_choices, scaled

# Queries and keys whose scores are there at a time: on a CPU what its caches hold; on a TPU v5e 512
# take 19 ms where 128 take 82, by XLA's estimate, with 73 and 69 MB (1024: 13 ms, 136 MB).
# On GPUs, likewise fewer and larger products; nothing says yet how many are best.
BLOCK = {"cpu": 128, "gpu": 512, "tpu": 512}
BY_BLOCKS = "attention by blocks"  # what a policy of `jax.checkpoint` knows its results by


@checked
def blockwise_attention(
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None = None,
    bias: ScoreBias | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    logit_softcap: float | None = None,
    normalizer: Normalizer = "softmax",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    block: tuple[int, int] | None = None,
) -> Float[Array, "*batch T N Hv"]:
    """`dot_product_attention` computed tile by tile, without the full score matrix.

        for each block of keys:  peak' = max(peak, max(scores))
                                 sums' = exp(peak - peak') * sums + exp(scores - peak') @ [value, 1]
        output, total = sums;    output / total

    Blocks in which the mask allows nothing are left out. The backward pass computes the scores
    again from queries, keys and the logarithm of each query's total, so memory grows with the
    number of queries and keys, not with their product but for a bit for each pair of blocks. It has
    a gradient but no `jax.jvp`.

    Args:
        query: Queries of N heads.
        key: Keys of K heads.
        value: Values of K heads.
        mask: Who may attend to whom. None allows every pair.
        bias: Added to the scores after scale and cap.
        scale: As in `dot_product_attention`, as are the options below.
        logit_softcap: Bound on the absolute score.
        normalizer: "softmax" or "relu".
        dropout_rate: Share of the weights set to zero.
        dropout_key: Randomness for dropout; other weights are dropped than without blocks.
        block: Queries and keys of a block, at most; None is 128 of each on a CPU, elsewhere 512.

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
        >>> F.blockwise_attention(query, key, value, mask)[:3, 0, 0]  # means of what was said
        Array([0. , 0.5, 1. ], dtype=float32)

    References:
        Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021. arXiv:2112.05682
        Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness,
        2022. arXiv:2205.14135, sections 3.1 and B.2
    """
    check_attention(query, key, mask, bias, normalizer, logit_softcap, dropout_rate, dropout_key)
    block = block or (BLOCK[platform()],) * 2
    if min(block) < 1:
        raise ValueError(f"Blocks have queries and keys; got {block[0]} and {block[1]}.")
    if 0 in (*query.shape[:-2], key.shape[-3]):
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    query, scale = scaled(query, scale)
    how = How(
        scale=scale,
        logit_softcap=logit_softcap,
        normalizer=normalizer,
        dropout_rate=dropout_rate,
        block=(min(block[0], query.shape[-3]), min(block[1], key.shape[-3])),
        num_keys=key.shape[-3],
    )
    units = in_units(how, query, key, value, mask, bias, dropout_key)
    return out_of_units(_attend(how, units), query, key)


def check_attention(
    query: Array,
    key: Array,
    mask: Any,
    bias: Any,
    normalizer: Normalizer,
    logit_softcap: float | None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> None:
    """Check heads, mask, bias and options of attention."""
    check_heads(query, key)
    check_mask_and_bias(query, key, mask, bias)
    check_choices(normalizer, logit_softcap, dropout_rate, dropout_key)


def in_units(
    how: How,
    query: Float[Array, "*batch T N H"],
    key: Float[Array, "*batch S K H"],
    value: Float[Array, "*batch S K Hv"],
    mask: AttentionMask | None,
    bias: ScoreBias | None,
    dropout_key: PRNGKeyArray | None,
    *differs: str,
) -> Unit:
    """A unit for each sequence and head of keys, along the first axis, padded to whole blocks.

    All arrays differ between devices along the same axes, so that loops carry one type: those of
    `differs`, and those along which any of them does.
    """
    *batch, T, N, H = query.shape
    S, K = key.shape[-3:-1]
    count, (rows, columns) = math.prod(batch), how.block
    by_head = padded(query.reshape(count, T, K, N // K, H), rows, axis=1)
    own_key, own_value = (
        jnp.moveaxis(padded(x.reshape(count, S, K, x.shape[-1]), columns, axis=1), 1, 2)
        for x in (key, value)
    )
    per_unit = partial(_per_unit, batch=tuple(batch), num_kv_heads=K, block=how.block)
    keys = None
    if how.dropout_rate != 0.0 and dropout_key is not None:
        keys = jax.random.split(dropout_key, (count, K))
    units = Unit(
        jnp.transpose(by_head, (0, 2, 3, 1, 4)),
        own_key,
        own_value,
        per_unit(mask),
        per_unit(bias),
        keys,
    )
    units = jax.tree.map(lambda x: x.reshape(count * K, *x.shape[2:]), units)
    axes = frozenset(differs).union(*(varies_over(x) for x in jax.tree.leaves(units)))
    return jax.tree.map(lambda x: varying(x, *axes), units)


def out_of_units(
    output: Float[Array, "U G padded Hv"], query: Float[Array, "*batch T N H"], key: Array
) -> Float[Array, "*batch T N Hv"]:
    """The output of all units as that of all heads, without padding, in the queries' dtype."""
    *batch, T, N, _ = query.shape
    K = key.shape[-2]
    by_head = output.reshape(-1, K, N // K, *output.shape[-2:])[..., :T, :]
    whole = jnp.moveaxis(by_head, 3, 1).reshape(*batch, T, N, output.shape[-1])
    return whole.astype(query.dtype)


def padded(x: Array, block: int, axis: int) -> Array:
    """Pad an axis to a multiple by repeating its last entry."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, width, mode="edge") if width[axis][1] else x


def _per_unit(
    given: AttentionMask | ScoreBias | None,
    *,
    batch: tuple[int, ...],
    num_kv_heads: int,
    block: tuple[int, int],
) -> Any:
    """Mask or bias for each sequence and head of keys: positions padded, heads in groups."""
    if given is None:
        return None
    count = math.prod(batch)

    def for_each(x: Array, block: int) -> Int[Array, "B K T"]:
        x = padded(jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(count, -1), block, axis=1)
        return jnp.broadcast_to(x[:, None], (count, num_kv_heads, x.shape[-1]))

    def in_groups(x: Array, axis: int | None) -> Float[Array, "B K ..."]:
        if axis is None:
            return jnp.broadcast_to(x, (count, num_kv_heads, *x.shape))
        by_group = x.reshape(*x.shape[:axis], num_kv_heads, -1, *x.shape[axis + 1 :])
        by_group = jnp.moveaxis(by_group, axis, 0)
        return jnp.broadcast_to(by_group, (count, *by_group.shape))

    if isinstance(given, ScoreBias):
        given = given.map_heads(in_groups)
    sides = {"query_positions": block[0], "key_positions": block[1]}
    if isinstance(given, AttentionMask) and given.query_segments is not None:
        sides |= {"query_segments": block[0], "key_segments": block[1]}
    padded_sides: Any = {name: for_each(getattr(given, name), n) for name, n in sides.items()}
    return given._replace(**padded_sides)


def each_unit(function: Callable[..., Any], how: How, *units: Any) -> Any:
    """For units one after the other on a CPU, else for all side by side.

    Behind a barrier: in a loop over layers, JAX would take all that positions alone decide, the
    masks of all blocks, out of that loop and keep it. Side by side, blocks meet if they do in any
    unit: a condition of each unit's own would be no condition, but a choice between two results.
    """
    units = jax.lax.optimization_barrier(units)
    told = jax.vmap(partial(near, how))(units[0])
    if platform() == "cpu":
        return jax.lax.map(lambda given: function(how, *given), (told, *units))
    return jax.vmap(partial(function, how, jnp.any(told, axis=0)))(*units)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, units: Unit) -> Float[Array, "U G T Hv"]:
    return each_unit(of_unit, how, units)[0]


def _attend_forward(how: How, units: Unit):
    kept = each_unit(of_unit, how, units)
    output, log_total = (checkpoint_name(x, BY_BLOCKS) for x in kept)
    return output, (units, output, log_total)


def _attend_backward(how: How, kept: Any, given: Float[Array, "U G T Hv"]):
    return (each_unit(gradient_of_unit, how, *kept, given),)


_attend.defvjp(_attend_forward, _attend_backward)


def of_unit(
    how: How, told: Bool[Array, "rows columns"], unit: Unit
) -> tuple[Float[Array, "G T Hv"], Float32[Array, "G T"]]:
    """The output of a unit, and the logarithm of what each query's weights were divided by.

    With a softmax that is the log-sum-exp of its scores. A query that meets no key has `NOTHING`.
    """
    G, T, _ = unit.query.shape
    attend = partial(
        attend_partially,
        scale=how.scale,
        logit_softcap=how.logit_softcap,
        normalizer=how.normalizer,
    )

    def start(fill: float, *shape: int) -> Float32[Array, "..."]:
        """A filled array with the varying axes of the loop carry."""
        whole = jnp.full((G, how.block[0], *shape), fill, jnp.float32)
        return varying(whole, *varies_over(unit.query))

    def block_of_rows(index: Int[Array, ""]) -> tuple[Array, Array]:
        rows = rows_of(how, unit, index)

        def meet(j: Int[Array, ""], so_far: PartialAttention) -> PartialAttention:
            columns = columns_of(how, unit, j)
            allowed, multipliers = meeting(how, unit, rows, columns)
            bias = bias_between(unit.bias, rows, columns)

            def one_head(query: Array, bias: Array | None, multipliers: Array | None):
                return attend(query, columns.key, columns.value, allowed, bias, multipliers)

            return merge_attention(so_far, jax.vmap(one_head)(rows.query, bias, multipliers))

        def step(j: Int[Array, ""], so_far: PartialAttention) -> PartialAttention:
            return where_told(told[index, j], meet, j, so_far)

        peak = start(NOTHING if how.normalizer == "softmax" else 0.0)
        nothing = PartialAttention(start(0.0, unit.value.shape[-1]), start(0.0), peak)
        found = jax.lax.fori_loop(0, told.shape[1], step, nothing)
        total = jnp.where(found.total > 0, found.total, 1.0)
        output = finish_attention(found)
        log_total = jnp.where(found.total > 0, found.peak + jnp.log(total), NOTHING)
        return output if how.wide else output.astype(unit.query.dtype), log_total

    output, log_total = jax.lax.map(block_of_rows, jnp.arange(told.shape[0]))
    return (
        jnp.moveaxis(output, 0, 1).reshape(G, T, -1),
        jnp.moveaxis(log_total, 0, 1).reshape(G, T),
    )
