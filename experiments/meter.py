"""Speed of a run, and what share of the machine's peak it reaches."""

import time
from collections import deque
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.training_run import Run
from jaxformer import costs
from jaxformer.config import Decoder
from jaxformer.training import loop
from jaxformer.training.hardware import machine_peak_flops
from jaxformer.training.optimizers import learning_rate

RATES = 4096  # learning rates that are computed together
SECONDS, UPDATES = 1.0, 8  # over which speed is a mean, or since the last restart


class Meter:
    """Turns finished updates into the numbers that are shown."""

    def __init__(self, run: Run, mesh: Mesh, *, length: int):
        """Begin to measure.

        Args:
            run: The run.
            mesh: The devices.
            length: Tokens of a row; their work is known where the model is a decoder.
        """
        self.tokens = run.batch_size * length
        decoder = isinstance(run.model.topology, Decoder)
        self.work = costs.training_flops_per_token(run.model, length) if decoder else None
        self.devices = list(mesh.local_devices)
        self.peak, self.exceeded = self.machine_peak(), False
        self._rates_from = jax.jit(jax.vmap(learning_rate(run.optimizer, run.schedule_steps)))
        self._rates: tuple[int, Any] = -1, None
        self.restart()

    def rate(self, step: int) -> float:
        """The learning rate of an update, counted from 1."""
        # Many at once: computed one by one they would wait in line behind the updates.
        block, at = divmod(step - 1, RATES)
        if block != self._rates[0]:
            steps = block * RATES + np.arange(RATES, dtype=np.int32)
            self._rates = block, jax.device_get(self._rates_from(steps))
        return float(self._rates[1][at])

    def restart(self) -> None:
        """Leave out the time until now, which went into something else; no update may be under way.

        If the model has exceeded the peak, that was measured beside other work: it is again.
        """
        if self.exceeded:
            self.peak, self.exceeded = max(self.peak, self.machine_peak()), False
        self.marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def machine_peak(self) -> float:
        """FLOP/s of all processes, each with devices like ours."""
        return machine_peak_flops(self.devices) * jax.process_count()

    def utilisation(self, flops: float) -> float:
        """FLOP/s of the model as a share of the machine's, at most 1."""
        self.exceeded |= flops > self.peak
        return min(flops / self.peak, 1.0)

    def speed(self, updates: int) -> float:
        """Updates a second, of these and those before, over at least some time and updates.

        Several that the devices have made may be read within a moment, and the next after a while.
        """
        now, count = time.monotonic(), self.marks[-1][1] + updates
        self.marks.append((now, count))
        while now - self.marks[1][0] >= SECONDS and count - self.marks[1][1] >= UPDATES:
            self.marks.popleft()
        since, before = self.marks[0]
        return (count - before) / (now - since)

    def read(self, finished: list[loop.Finished]) -> list[tuple[loop.Finished, dict[str, float]]]:
        """Each finished update with its loss, learning rate, and the speed of the last ones."""
        if not finished:
            return []
        speed = self.tokens * self.speed(len(finished))
        shared = {"tokens_per_second": speed}
        if self.work is not None:
            shared["utilisation"] = self.utilisation(speed * self.work)
        return [
            (done, {"loss": done.loss, "learning_rate": self.rate(done.step), **shared})
            for done in finished
        ]
