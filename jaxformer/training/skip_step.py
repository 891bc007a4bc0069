"""Skips updates whose loss or gradient norm is not finite or spikes."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.checks import AboveOne, Checked, Size

NORM_EMA_DECAY = 0.99  # of the mean gradient norm


@dataclass(frozen=True, kw_only=True)
class SkipStepConfig(Checked):
    """When to skip an update, and when to stop the run.

    Attributes:
        max_norm_ratio: Skip updates whose gradient norm is above this multiple of the running mean;
            None skips only updates with a non-finite loss or norm, which are always skipped.
        warmup_updates: Number of updates before `max_norm_ratio` applies.
        max_consecutive_skips: Maximum number of consecutive skipped updates; one more ends the run.
    """

    max_norm_ratio: AboveOne | None = 20.0
    warmup_updates: Size = 100
    max_consecutive_skips: Size = 10


class SkipState(NamedTuple):
    """Running gradient-norm mean and skip counters.

    Attributes:
        norm_ema: Moving average of the gradient norms of applied updates.
        num_updates: Number of applied updates with a nonzero gradient.
        num_skipped: Number of skipped updates.
        num_consecutive_skips: Number of skipped updates since the last applied one.
    """

    norm_ema: Float[Array, ""]
    num_updates: Int[Array, ""]
    num_skipped: Int[Array, ""]
    num_consecutive_skips: Int[Array, ""]


def init_skip_state() -> SkipState:
    """Initial skip state."""
    return SkipState(jnp.zeros(()), *(jnp.zeros((), jnp.int32) for _ in range(3)))


def should_apply_update(
    config: SkipStepConfig, state: SkipState, loss: Float[Array, ""], norm: Float[Array, ""]
) -> tuple[Bool[Array, ""], SkipState]:
    """Decide whether to apply an update; also return the new skip state.

        apply = loss and norm are finite, and norm <= max_norm_ratio * norm_ema
        norm_ema <- 0.99 norm_ema + 0.01 norm, or the mean over the first hundred applied updates

    Args:
        config: Options.
        state: Skip state before this step.
        loss: Loss of the step.
        norm: Gradient norm before clipping.

    Returns:
        Whether to apply the update, and the new skip state.
    """
    apply_update = jnp.isfinite(loss) & jnp.isfinite(norm)
    if config.max_norm_ratio is not None:
        apply_update &= (state.num_updates < config.warmup_updates) | (
            norm <= config.max_norm_ratio * state.norm_ema
        )
    # A batch without any token in its loss mask has norm 0, which is not averaged
    updates_norm_ema = apply_update & (norm > 0)
    weight = jnp.maximum(1 - NORM_EMA_DECAY, 1 / (state.num_updates.astype(jnp.float32) + 1))
    norm_ema = state.norm_ema + weight * (
        jnp.where(updates_norm_ema, norm, state.norm_ema) - state.norm_ema
    )
    return apply_update, SkipState(
        norm_ema=norm_ema,
        num_updates=state.num_updates + updates_norm_ema.astype(jnp.int32),
        num_skipped=state.num_skipped + 1 - apply_update.astype(jnp.int32),
        num_consecutive_skips=jnp.where(apply_update, 0, state.num_consecutive_skips + 1),
    )
