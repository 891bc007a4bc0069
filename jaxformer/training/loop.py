"""The inner training loop: dispatches steps ahead and reads their metrics later."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.training.gradient import AnyBatch
from jaxformer.training.train_step import EvalSums, StepMetrics, TrainState

MAX_IN_FLIGHT = 2  # steps dispatched before the metrics of the oldest are read
LONG_STEP_SECONDS = 0.5  # from here on at most one step is dispatched ahead, to stop soon


class TooManySkipsError(ValueError):
    """More consecutive updates were skipped than `max_consecutive_skips` allows."""

    def __init__(self, result: "StepResult"):
        super().__init__(
            f"{result.num_consecutive_skips} consecutive updates were skipped, the last at step "
            f"{result.step} (loss {result.loss}, gradient norm {result.gradient_norm})."
        )
        self.step = result.step


class StepResult(NamedTuple):
    """Metrics of one finished step, on the host."""

    step: int
    loss: float
    gradient_norm: float
    num_skipped: int = 0
    num_consecutive_skips: int = 0
    max_expert_load: float | None = None


def train_steps(
    state: TrainState,
    train_step: Callable[[TrainState, AnyBatch], tuple[TrainState, StepMetrics]],
    get_batch: Callable[[int], AnyBatch],
    *,
    start_step: int,
    stop_step: int,
    should_sync: Callable[[int], bool],
    max_consecutive_skips: int,
) -> Iterator[tuple[int, TrainState, list[StepResult]]]:
    """Run train steps `start_step` + 1 to `stop_step`, yielding after each.

    Steps are dispatched before earlier ones have finished; each item has the results of finished
    steps. Where steps are long, one is dispatched ahead, so that a signal waits for two at most.
    Implicit transfers between host and devices raise, since they would stall the devices.

    Args:
        state: State after `start_step` steps; donated.
        train_step: From `make_train_step`, compiled.
        get_batch: Function of k that returns the sharded batch of step k + 1.
        start_step: Number of steps of the state.
        stop_step: Last step.
        should_sync: Function of a step: whether to wait for all results after it, as before saving
            or evaluating the state.
        max_consecutive_skips: Maximum number of consecutive skipped updates.

    Yields:
        The step; the state, valid until the next item; the results of steps that have finished.

    Raises:
        TooManySkipsError: More consecutive updates were skipped.
    """
    pending: deque[tuple[int, StepMetrics]] = deque()
    max_pending, read_at = 1, time.monotonic()  # the first step may be long
    for step in range(start_step, stop_step):
        batch = get_batch(step)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, batch)
        pending.append((step + 1, metrics))
        results = [_to_host(*pending.popleft()) for _ in range(len(pending) - max_pending)]
        if results:
            seconds, read_at = time.monotonic() - read_at, time.monotonic()
            max_pending = 1 if seconds > LONG_STEP_SECONDS * len(results) else MAX_IN_FLIGHT
        if should_sync(step + 1) or step + 1 == stop_step:  # also for a signal during the reading
            results += [_to_host(*pending.popleft()) for _ in range(len(pending))]
        for result in results:
            if result.num_consecutive_skips > max_consecutive_skips:
                raise TooManySkipsError(result)
        yield step + 1, state, results


def evaluate(
    eval_step: Callable[[Any, AnyBatch], EvalSums], params: Any, batches: Iterable[AnyBatch]
) -> tuple[float, int]:
    """Summed negative log-likelihood (nats) and token count over the batches."""
    nll_sum, num_tokens = 0.0, 0
    for batch in batches:
        sums = jax.device_get(eval_step(params, batch))
        nll_sum, num_tokens = nll_sum + float(sums.nll_sum), num_tokens + int(sums.num_tokens)
    return nll_sum, num_tokens


def _to_host(step: int, metrics: StepMetrics) -> StepResult:
    loss, norm, skipped, in_a_row, load = jax.device_get(metrics)
    load = None if load is None else float(load)
    return StepResult(step, float(loss), float(norm), int(skipped), int(in_a_row), load)
