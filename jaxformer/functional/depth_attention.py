"""Attention over depth: a token's mean over what earlier layers left of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxformer.functional.argument_checks import typechecked
from jaxformer.functional.norms import rms_norm

HISTORY_REMAT_NAME = "mean over depth"  # name of results for policies of `jax.checkpoint`


@typechecked
def attend_to_depth(
    total: Float[Array, "*batch T D"],
    blocks: Float[Array, "*batch T n D"],
    query: Float[Array, " D"],
    *,
    num_blocks: int | Int[Array, ""],
    eps: float = 1e-6,
) -> Float[Array, "*batch T D"]:
    """Return the mean of the normalised vectors of a token by attention, in float32.

        K = rms_norm of [blocks[0], ..., blocks[num_blocks - 1], total]
        x = sum over i of softmax(query . K / sqrt(D))[i] K[i]

    Args:
        total: A vector of each token.
        blocks: Further vectors of each token.
        query: The query of all tokens.
        num_blocks: How many of `blocks` count, from the first.
        eps: Epsilon of the norm.

    Returns:
        The means, in the dtype of `total`.

    References:
        Kimi Team, Attention Residuals, 2026. arXiv:2603.15031, section 3 (whose values are not
        normalised); Thinking Machines, Inkling 2, 2026 (released code)
    """
    both = jnp.concatenate([blocks, total[..., None, :]], axis=-2).astype(jnp.float32)
    keys, last = rms_norm(both, eps=eps), blocks.shape[-2]
    scores = keys @ (query.astype(jnp.float32) * query.shape[0] ** -0.5)
    number = jnp.arange(last + 1)
    is_there = jnp.broadcast_to((number < num_blocks) | (number == last), scores.shape)
    weights = jax.nn.softmax(jnp.where(is_there, scores, -jnp.inf))
    return jnp.einsum("...n,...nd->...d", weights, keys).astype(total.dtype)


def attend_to_history(
    total: Array, blocks: Array, later: Array, query: Array, num_blocks: Array, *, eps: float = 1e-6
) -> tuple[Array, Array]:
    """Return `attend_to_depth`, and `later`, whose cotangent is the blocks after the last layer.

    A layer writes a block once and never changes it, so the backward pass needs no copy of the
    blocks for each layer: `history_at_end` gives those of the last as cotangent of `later`, zeros
    that all reads hand on, and each read takes from them the blocks that it has seen. For the same
    reason remat saves the means, by the name `HISTORY_REMAT_NAME`.

    Args:
        total: As in `attend_to_depth`.
        blocks: As in `attend_to_depth`; zeros from `num_blocks` on.
        later: Zeros like the blocks, which only these functions use.
        query: As in `attend_to_depth`.
        num_blocks: As in `attend_to_depth`.
        eps: As in `attend_to_depth`.

    Returns:
        The means and `later`. A gradient of a value that does not pass `history_at_end` is NaN.
    """
    x, later = _attend(eps, total, blocks, later, query, num_blocks)
    return checkpoint_name(x, HISTORY_REMAT_NAME), later


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    eps: float, total: Array, blocks: Array, later: Array, query: Array, num_blocks: Array
) -> tuple[Array, Array]:
    return attend_to_depth(total, blocks, query, num_blocks=num_blocks, eps=eps), later


def _attend_forward(eps: float, total: Array, *args: Array) -> Any:
    *_, query, num_blocks = args
    return _attend(eps, total, *args), (total, query, num_blocks)


def _attend_backward(eps: float, saved: Any, cotangents: Any) -> Any:
    (total, query, num_blocks), (change, blocks) = saved, cotangents
    was_there = (jnp.arange(blocks.shape[-2]) < num_blocks)[:, None]
    known = jnp.where(jnp.any(blocks != 0), blocks, jnp.nan)
    seen = jnp.where(jnp.broadcast_to(was_there, blocks.shape), known, 0)
    attend = partial(attend_to_depth, num_blocks=num_blocks, eps=eps)
    to_total, to_blocks, to_query = jax.vjp(attend, total, seen, query)[1](change)
    return to_total, to_blocks, blocks, to_query, None


_attend.defvjp(_attend_forward, _attend_backward)


@jax.custom_vjp
def history_at_end(blocks: Array, later: Array) -> Array:
    """Return the blocks, which are the cotangent of `later`; see `attend_to_history`.

    Args:
        blocks: Blocks after the last layer.
        later: What the last `attend_to_history` returned.

    Returns:
        The blocks.
    """
    return blocks


history_at_end.defvjp(
    lambda blocks, later: (blocks, blocks), lambda blocks, change: (change, blocks)
)
