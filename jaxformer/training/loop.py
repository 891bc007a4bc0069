"""The loop around the update: keep the devices busy, read the numbers a little later."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxformer.training.step import AnyBatch, StepMetrics, Tally, TrainState

AHEAD = 2  # updates dispatched before the oldest one's numbers are read


class NonFiniteLossError(RuntimeError):
    """Loss or gradient became NaN or infinite; `step` is the update that found it."""

    def __init__(self, step: int, loss: float, gradient_norm: float):
        super().__init__(f"The loss of step {step} is {loss}, its gradient's norm {gradient_norm}.")
        self.step = step


class Finished(NamedTuple):
    """The numbers of one update, on the host."""

    step: int
    loss: float
    gradient_norm: float


def train(
    state: TrainState,
    update: Callable[[TrainState, AnyBatch], tuple[TrainState, StepMetrics]],
    fetch: Callable[[int], AnyBatch],
    *,
    start: int,
    stop: int,
    settle: Callable[[int], bool],
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
            is saved or evaluated, so that none is whose loss or gradient was not finite.

    Yields:
        Updates made so far; the state, valid until the next item is asked for; what finished.

    Raises:
        NonFiniteLossError: A loss or the norm of a gradient is NaN or infinite.
    """
    pending: deque[tuple[int, StepMetrics]] = deque()
    for step in range(start, stop):
        batch = fetch(step)
        with jax.transfer_guard("disallow"):
            state, metrics = update(state, batch)
        pending.append((step + 1, metrics))
        keep = 0 if settle(step + 1) or step + 1 == stop else AHEAD
        finished = [_read(*pending.popleft()) for _ in range(len(pending) - keep)]
        yield step + 1, state, finished


def evaluate(
    tally: Callable[[Any, AnyBatch], Tally], params: Any, batches: Iterable[AnyBatch]
) -> tuple[float, int]:
    """Sum of negative log-likelihoods in nats over the batches, and the number of tokens."""
    nats, tokens = 0.0, 0
    for batch in batches:
        part = jax.device_get(tally(params, batch))
        nats, tokens = nats + float(part.nats), tokens + int(part.tokens)
    return nats, tokens


def _read(step: int, metrics: StepMetrics) -> Finished:
    loss, norm = (float(value) for value in jax.device_get(metrics))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteLossError(step, loss, norm)
    return Finished(step, loss, norm)
