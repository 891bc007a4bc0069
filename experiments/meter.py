"""Speed of a run, and what share of the devices' published peak it reaches."""

import time
from collections import deque
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.training_run import Run
from jaxformer import costs
from jaxformer.config import Decoder
from jaxformer.parallel.chips import chip_of
from jaxformer.training import loop
from jaxformer.training.optimizers import learning_rate

RATES = 4096  # learning rates that are computed together
SECONDS, UPDATES = 1.0, 8  # over which speed is a mean, or since the last restart


class Meter:
    """Turns finished updates into the numbers that are shown.

    Model FLOP utilisation is known where `parallel.chips` has the devices and the model is a
    decoder (Chowdhery et al., PaLM, 2022. arXiv:2204.02311, section 4.1 and appendix B).
    """

    def __init__(self, run: Run, mesh: Mesh, *, length: int):
        """Begin to measure.

        Args:
            run: The run.
            mesh: The devices.
            length: Tokens of a row.
        """
        self.tokens, self.share = run.batch_size * length, None
        chip = chip_of(mesh.devices.flat[0].device_kind)
        if chip is not None and isinstance(run.model.topology, Decoder):
            work = costs.training_flops_per_token(run.model, length)
            self.share = work / (chip.peak_flops * mesh.size)  # of the peak, for a token a second
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
        """Leave out the time until now, which went into something else."""
        self.marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

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
        if self.share is not None:
            shared["utilisation"] = speed * self.share
        return [
            (done, {"loss": done.loss, "learning_rate": self.rate(done.step), **shared})
            for done in finished
        ]
