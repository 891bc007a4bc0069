"""Backward pass of blockwise attention; recomputes scores tile by tile."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxformer.functional.attention_mask import ScoreBias
from jaxformer.functional.blocks import (
    Columns,
    How,
    Rows,
    Unit,
    bias_between,
    columns_of,
    cut,
    meeting,
    rows_of,
    where_told,
)
from jaxformer.functional.collectives import varies_over, varying
from jaxformer.functional.online_softmax import NOTHING
from jaxformer.functional.products import factors
from jaxformer.functional.scores import attention_scores


class Slopes(NamedTuple):
    """Gradients of query, key, value and bias parameters; key and value are transposed.

    Those of keys and values lie on their sides, so that no scores need be turned for a product.
    """

    query: Float32[Array, "G T H"]
    key: Float32[Array, "H S"]
    value: Float32[Array, "Hv S"]
    bias: Any  # parameters


class Given(NamedTuple):
    """Inputs of the backward pass of a query tile: output cotangent, log-sum-exp and delta.

    Attributes:
        slopes: Of its output.
        log_total: What its weights were divided by.
        mean: The sum of slopes times output, which is that of weights times their slopes.
    """

    slopes: Float[Array, "G T Hv"]
    log_total: Float32[Array, "G T"]
    mean: Float32[Array, "G T"]


def gradient_of_unit(
    how: How,
    told: Bool[Array, "rows columns"],
    unit: Unit,
    output: Float[Array, "G T Hv"],
    log_total: Float32[Array, "G T"],
    slopes: Float[Array, "G T Hv"],
) -> Unit:
    """The gradient of a unit, from that of its output; scores are computed again.

        dv = w^T do;    dw = do v^T;    ds = w (dw - sum of do o);    dq = ds k;    dk = ds^T q

    Args:
        how: As forwards.
        told: Which blocks of queries and keys meet.
        unit: As forwards.
        output: What came of it.
        log_total: Logarithm of what weights were divided by.
        slopes: The gradient of the output.

    Returns:
        The gradients of queries, keys, values and what the bias learns, in their places.
    """
    log_total = jnp.where(log_total > NOTHING, log_total, 0.0)  # who met no key has no weights
    mean = jnp.sum(slopes.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    given, size = Given(slopes, log_total, mean), how.block[0]

    def zeros(*shape: int) -> Float32[Array, "..."]:
        """Zeros with the varying axes of the loop carry."""
        return varying(jnp.zeros(shape, jnp.float32), *varies_over(unit.query))

    def block_of_rows(so_far: Any, index: Int[Array, ""]):
        rows = rows_of(how, unit, index)
        own = Given(*(cut(x, index, size, axis=1) for x in given))

        def meet(j: Int[Array, ""], so_far: Slopes) -> Slopes:
            return _meet(how, unit, rows, columns_of(how, unit, j), own, so_far)

        def step(j: Int[Array, ""], so_far: Slopes) -> Slopes:
            return where_told(told[index, j], meet, j, so_far)

        start = Slopes(zeros(*rows.query.shape), *so_far)
        found = jax.lax.fori_loop(0, told.shape[1], step, start)
        return found[1:], found.query

    params = None if unit.bias is None else unit.bias.params
    start = (
        zeros(*unit.key.shape[::-1]),
        zeros(*unit.value.shape[::-1]),
        jax.tree.map(lambda x: zeros(*x.shape), params),
    )
    (key, value, bias), query = jax.lax.scan(block_of_rows, start, jnp.arange(told.shape[0]))
    query = jnp.moveaxis(query, 0, 1).reshape(unit.query.shape)
    if unit.bias is not None:  # positions have no gradient
        bias = ScoreBias(bias, None, None, unit.bias.formula)  # type: ignore[arg-type]
    found = Unit(query, key.T, value.T, None, bias, None)
    return found if how.wide else like(found, unit)


def like(gradient: Unit, unit: Unit) -> Unit:
    """Cast gradients to the dtypes of the primals."""
    of: Any = unit._replace(mask=None, dropout_key=None)
    if unit.bias is not None:
        of = of._replace(bias=ScoreBias(unit.bias.params, None, None, unit.bias.formula))  # type: ignore[arg-type]
    return jax.tree.map(lambda x, y: x.astype(y.dtype), gradient, of)


def _meet(
    how: How, unit: Unit, rows: Rows, columns: Columns, given: Given, so_far: Slopes
) -> Slopes:
    """Add one tile's contribution to the gradients of query, key, value and bias parameters."""
    allowed, multipliers = meeting(how, unit, rows, columns)
    bias, learned = None, so_far.bias
    if unit.bias is not None:
        between = lambda x: bias_between(unit.bias._replace(params=x), rows, columns)  # noqa: E731
        bias, pull = jax.vjp(between, unit.bias.params)
    score = partial(attention_scores, scale=how.scale, logit_softcap=how.logit_softcap)
    capped = jax.vmap(score, in_axes=(0, None))(rows.query, columns.key)
    scores = capped if bias is None else capped + bias
    if how.normalizer == "softmax":
        weights = _only(allowed, jnp.exp(scores - given.log_total[..., None]))
        steepness = weights
    else:
        one = jnp.exp(-given.log_total)[..., None]
        weights = _only(allowed, jax.nn.relu(scores) * one)
        steepness = jnp.where(weights > 0, one, 0.0)
    used = weights if multipliers is None else weights * multipliers
    of_used = _product(given.slopes, columns.value, ((2,), (1,)))
    of_weights = of_used if multipliers is None else of_used * multipliers
    of_scores = steepness * (of_weights - given.mean[..., None])
    if unit.bias is not None:
        learned = jax.tree.map(lambda x, y: x + y.astype(x.dtype), learned, *pull(of_scores))
    if how.logit_softcap is not None:
        of_scores = of_scores * (1.0 - jnp.square(capped / how.logit_softcap))
    of_products = (how.scale * of_scores).astype(rows.query.dtype)
    first = columns.number * how.block[1]
    over_queries = ((0, 1), (0, 1))
    of_key = _product(rows.query, of_products, over_queries)
    of_value = _product(given.slopes, used.astype(given.slopes.dtype), over_queries)
    return Slopes(
        so_far.query + _product(of_products, columns.key, ((2,), (0,))),
        _add(so_far.key, of_key, first),
        _add(so_far.value, of_value, first),
        learned,
    )


def _product(x: Array, y: Array, axes: Any) -> Float32[Array, "..."]:
    x, y = factors(x, y)
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _only(allowed: Bool[Array, "R C"] | None, x: Float32[Array, "G R C"]) -> Array:
    return x if allowed is None else jnp.where(jnp.broadcast_to(allowed, x.shape), x, 0.0)


def _add(whole: Array, part: Array, first: Int[Array, ""]) -> Array:
    """Add a block to the columns of an array from `start` on."""
    here = jax.lax.dynamic_slice_in_dim(whole, first, part.shape[1], axis=1)
    return jax.lax.dynamic_update_slice_in_dim(whole, here + part, first, axis=1)
