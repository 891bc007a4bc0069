"""The inner training loop: dispatches steps ahead and reads their metrics later."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.training.gradient import AnyBatch
from jaxformer.training.step import StepMetrics, Tally, TrainState

AHEAD = 2  # updates dispatched before the oldest one's numbers are read


class TooManySkipsError(RuntimeError):
    """More updates in a row were left out than a run has patience for; `step` is the last."""

    def __init__(self, finished: "Finished"):
        super().__init__(
            f"{finished.in_a_row} updates in a row were left out up to step {finished.step}, whose "
            f"loss is {finished.loss} and its gradient's norm {finished.gradient_norm}."
        )
        self.step = finished.step


class Finished(NamedTuple):
    """Metrics of one finished step, on the host."""

    step: int
    loss: float
    gradient_norm: float
    skipped: int = 0
    in_a_row: int = 0


def train(
    state: TrainState,
    update: Callable[[TrainState, AnyBatch], tuple[TrainState, StepMetrics]],
    fetch: Callable[[int], AnyBatch],
    *,
    start: int,
    stop: int,
    settle: Callable[[int], bool],
    patience: int,
) -> Iterator[tuple[int, TrainState, list[Finished]]]:
    """Make the updates start + 1 to stop, one per item.

    Updates are dispatched ahead of the devices; each item brings the numbers of earlier updates
    that are done. Implicit transfers between host and devices are errors, since each would stall
    the devices.

    Args:
        state: After `start` updates; consumed.
        update: From `make_update`, compiled.
        fetch: The batch, on the devices, from which update k + 1 is made, given k.
        start: Updates made before.
        stop: Updates made in the end.
        settle: Whether to wait, after a given update, until all numbers are read: before a state
            is saved or evaluated.
        patience: Updates in a row that may be left out.

    Yields:
        Updates made so far; the state, valid until the next item is asked for; what finished.

    Raises:
        TooManySkipsError: One more was.
    """
    pending: deque[tuple[int, StepMetrics]] = deque()
    for step in range(start, stop):
        batch = fetch(step)
        with jax.transfer_guard("disallow"):
            state, metrics = update(state, batch)
        pending.append((step + 1, metrics))
        max_pending = 0 if settle(step + 1) or step + 1 == stop else AHEAD
        results = [_read(*pending.popleft()) for _ in range(len(pending) - max_pending)]
        for result in results:
            if result.in_a_row > patience:
                raise TooManySkipsError(result)
        yield step + 1, state, results


def evaluate(
    tally: Callable[[Any, AnyBatch], Tally], params: Any, batches: Iterable[AnyBatch]
) -> tuple[float, int]:
    """Summed negative log-likelihood (nats) and token count over the batches."""
    nll_sum, num_tokens = 0.0, 0
    for batch in batches:
        sums = jax.device_get(tally(params, batch))
        nll_sum, num_tokens = nll_sum + float(sums.nats), num_tokens + int(sums.tokens)
    return nll_sum, num_tokens


def _read(step: int, metrics: StepMetrics) -> Finished:
    loss, norm, skipped, in_a_row = jax.device_get(metrics)
    return Finished(step, float(loss), float(norm), int(skipped), int(in_a_row))
