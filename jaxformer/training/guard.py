"""Skips updates whose loss or gradient norm is not finite or spikes."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.checks import check_fields

MEMORY = 0.99  # share of the usual norm that an update keeps


@dataclass(frozen=True, kw_only=True)
class Skipping:
    """When to skip an update, and when to stop the run.

    Attributes:
        spike: Gradients with a norm above this many times the usual one; None leaves none out but
            those that are not finite, which never enter.
        after: Updates made before there is a usual norm.
        patience: Updates in a row that may be left out; with one more the run ends.
    """

    spike: float | None = 20.0
    after: int = 100
    patience: int = 10

    def __post_init__(self):
        check_fields(self)
        if self.spike is not None and not 1 < self.spike < math.inf:
            raise ValueError(f"spike must be above 1 and finite, or None; got {self.spike}.")
        for name in ("after", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")


class Guard(NamedTuple):
    """Running gradient-norm mean and skip counters.

    Attributes:
        usual: Mean of the norms of the updates made, the last hundred or so counting most.
        made: How many were made, without those whose gradient was zero.
        skipped: How many were left out.
        in_a_row: How many of them since the last one that was made.
    """

    usual: Float[Array, ""]
    made: Int[Array, ""]
    skipped: Int[Array, ""]
    in_a_row: Int[Array, ""]


def new_guard() -> Guard:
    """Initial skip state."""
    return Guard(jnp.zeros(()), *(jnp.zeros((), jnp.int32) for _ in range(3)))


def judge(
    skipping: Skipping, guard: Guard, loss: Float[Array, ""], norm: Float[Array, ""]
) -> tuple[Bool[Array, ""], Guard]:
    """Decide whether to apply an update; also return the new skip state.

        made = loss and norm are finite, and norm <= spike * usual
        usual <- mean over the updates made; 0.99 usual + 0.01 norm once there are a hundred

    Args:
        skipping: The rule.
        guard: What is known before.
        loss: Of the update.
        norm: Of its gradient, before clipping.

    Returns:
        True where it is made, and the guard.
    """
    apply_update = jnp.isfinite(loss) & jnp.isfinite(norm)
    if skipping.spike is not None:
        apply_update &= (guard.made < skipping.after) | (norm <= skipping.spike * guard.usual)
    # A batch in which nothing counts says nothing of the others
    updates_norm_ema = apply_update & (norm > 0)
    weight = jnp.maximum(1 - MEMORY, 1 / (guard.made.astype(jnp.float32) + 1))
    norm_ema = guard.usual + weight * (jnp.where(updates_norm_ema, norm, guard.usual) - guard.usual)
    return apply_update, Guard(
        usual=norm_ema,
        made=guard.made + updates_norm_ema.astype(jnp.int32),
        skipped=guard.skipped + 1 - apply_update.astype(jnp.int32),
        in_a_row=jnp.where(apply_update, 0, guard.in_a_row + 1),
    )


def where_made(made: Bool[Array, ""], after: Any, before: Any) -> Any:
    """The new tree if the update is applied, else the old one."""
    return jax.tree.map(lambda new, old: jnp.where(made, new, old), after, before)
