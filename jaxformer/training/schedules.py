"""Learning rate as a function of the step.

Steps count from 0, as in `optax`. Every schedule has a linear warm-up,

    rate(step) = peak (step + 1) / warmup_steps    for step < warmup_steps

whose first step has a positive rate and whose last step has the peak. Decaying schedules reach
their final value at step `total_steps`, one after the last step, and stay there, so no step of the
run has a rate of zero.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxformer.checks import Checked, Count, Positive, Share, Size


@dataclass(frozen=True, kw_only=True)
class WarmUp(Checked):
    """Linear warm-up to the peak, which all schedules have.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear warm-up to the peak.
    """

    peak: Positive
    warmup_steps: Count = 0


@dataclass(frozen=True, kw_only=True)
class Constant(WarmUp):
    """Constant learning rate after warm-up.

    Attributes:
        peak: Learning rate after warm-up.
        warmup_steps: Steps of linear warm-up from zero.
    """


@dataclass(frozen=True, kw_only=True)
class Linear(WarmUp):
    """Linear decay from the peak to `final_fraction * peak`.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear warm-up to the peak.
        final_fraction: Final learning rate, as a fraction of the peak.
    """

    final_fraction: Share = 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine(WarmUp):
    """Cosine decay from the peak to `final_fraction * peak`.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear warm-up to the peak.
        final_fraction: Final learning rate, as a fraction of the peak.

    References:
        Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, section 3
            (one period, no restart). arXiv:1608.03983
    """

    final_fraction: Share = 0.1


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(WarmUp):
    """Linear warm-up, then decay by the inverse square root of the step (Vaswani et al.).

        rate = peak min(n / warmup_steps, sqrt(warmup_steps / n))    n = step + 1

    The paper's `model_dim ** -0.5 * min(n ** -0.5, n * warmup_steps ** -1.5)` is this schedule with
    `peak = (model_dim * warmup_steps) ** -0.5`.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear warm-up to the peak.

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 5.3. arXiv:1706.03762
    """

    warmup_steps: Size = 4000


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(WarmUp):
    """Warmup-stable-decay (WSD): constant, then decay over the last `decay_fraction`.

        rate / peak = 1 - (1 - final_fraction) p          shape "linear"
        rate / peak = 1 - (1 - final_fraction) sqrt(p)    shape "sqrt"

    where p rises from 0 to 1 over the decay. A run can be extended from any checkpoint before the
    decay, because the rates until then do not depend on the length of the run.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear warm-up to the peak.
        decay_fraction: Length of the decay, as a fraction of the run.
        final_fraction: Final learning rate, as a fraction of the peak.
        shape: Shape of the decay.

    References:
        Hu et al., MiniCPM: Unveiling the Potential of Small Language Models with Scalable Training
            Strategies, 2024, section 4. arXiv:2404.06395
        Hagele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations,
            2024, section 3 (shapes of the decay). arXiv:2405.18392
    """

    decay_fraction: Share = 0.2
    final_fraction: Share = 0.0
    shape: Literal["linear", "sqrt"] = "sqrt"

    def decay_steps(self, total_steps: int) -> int:
        """Number of decay steps."""
        return round(self.decay_fraction * total_steps)


Schedule = Constant | Linear | Cosine | InverseSquareRoot | WarmupStableDecay


def make_schedule(schedule: Schedule, total_steps: int) -> optax.Schedule:
    """The learning rate of each step.

    Args:
        schedule: Schedule configuration.
        total_steps: Number of steps of the run.

    Returns:
        A function of the step (int or int32 array, traced or not) that returns a float32 scalar.

    Raises:
        ValueError: The run has no steps, or fewer than warm-up and decay together.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1; got {total_steps}.")
    warmup, decay = schedule.warmup_steps, 0
    if isinstance(schedule, WarmupStableDecay):
        decay = schedule.decay_steps(total_steps)
    if warmup + decay > total_steps:
        raise ValueError(
            f"warmup_steps={warmup} and {decay} steps of decay do not fit into "
            f"total_steps={total_steps}."
        )

    def rate(step: int | Int[Array, ""]) -> Float[Array, ""]:
        elapsed = jnp.asarray(step).astype(jnp.float32)
        ramp = jnp.minimum((elapsed + 1) / max(warmup, 1), 1)
        return schedule.peak * ramp * fraction_of_peak(schedule, elapsed, total_steps)

    return rate


def fraction_of_peak(
    schedule: Schedule, elapsed: Float[Array, ""], total_steps: int
) -> Float[Array, ""]:
    """Decay factor after `elapsed` steps; 1 during warm-up."""
    warmup = schedule.warmup_steps
    match schedule:
        case Constant():
            return jnp.ones_like(elapsed)
        case InverseSquareRoot():
            return jnp.sqrt(warmup / jnp.maximum(elapsed + 1, warmup))
        case Linear(final_fraction=final):
            decayed = linear_ramp(elapsed, warmup, total_steps)
        case Cosine(final_fraction=final):
            decayed = (1 - jnp.cos(jnp.pi * linear_ramp(elapsed, warmup, total_steps))) / 2
        case WarmupStableDecay(final_fraction=final):
            start = total_steps - schedule.decay_steps(total_steps)
            decayed = linear_ramp(elapsed, start, total_steps)
            decayed = jnp.sqrt(decayed) if schedule.shape == "sqrt" else decayed
    return 1 - (1 - final) * decayed


def linear_ramp(elapsed: Float[Array, ""], start: int, stop: int) -> Float[Array, ""]:
    """Linear ramp from 0 at `start` to 1 at `stop`, clipped."""
    return jnp.clip((elapsed - start) / max(stop - start, 1), 0, 1)
