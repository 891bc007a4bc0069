"""The inner training loop: dispatches steps ahead and reads their metrics later."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.training.gradient import AnyBatch
from jaxformer.training.train_step import EvalSums, StepMetrics, TrainState

MAX_IN_FLIGHT = 2  # updates dispatched before the oldest one's numbers are read


class TooManySkipsError(RuntimeError):
    """More consecutive updates were skipped than `max_consecutive_skips` allows."""

    def __init__(self, result: "StepResult"):
        super().__init__(
            f"{result.num_consecutive_skips} updates in a row were left out up to step "
            f"{result.step}, whose "
            f"loss is {result.loss} and its gradient's norm {result.gradient_norm}."
        )
        self.step = result.step


class StepResult(NamedTuple):
    """Metrics of one finished step, on the host."""

    step: int
    loss: float
    gradient_norm: float
    num_skipped: int = 0
    num_consecutive_skips: int = 0


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

    Updates are dispatched ahead of the devices; each item brings the numbers of earlier updates
    that are done. Implicit transfers between host and devices are errors, since each would stall
    the devices.

    Args:
        state: After `start_step` updates; consumed.
        train_step: From `make_train_step`, compiled.
        get_batch: The batch, on the devices, from which update k + 1 is made, given k.
        start_step: Updates made before.
        stop_step: Updates made in the end.
        should_sync: Whether to wait, after a given update, until all numbers are read: before a
            state is saved or evaluated.
        max_consecutive_skips: Updates in a row that may be left out.

    Yields:
        Updates made so far; the state, valid until the next item is asked for; what finished.

    Raises:
        TooManySkipsError: One more was.
    """
    pending: deque[tuple[int, StepMetrics]] = deque()
    for step in range(start_step, stop_step):
        batch = get_batch(step)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, batch)
        pending.append((step + 1, metrics))
        max_pending = 0 if should_sync(step + 1) or step + 1 == stop_step else MAX_IN_FLIGHT
        results = [_to_host(*pending.popleft()) for _ in range(len(pending) - max_pending)]
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
    loss, norm, skipped, in_a_row = jax.device_get(metrics)
    return StepResult(step, float(loss), float(norm), int(skipped), int(in_a_row))
