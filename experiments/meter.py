"""Speed of a run, and what share of the machine's peak it reaches."""

import time
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
        self.peak = self.machine_peak()
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
        self.since = time.monotonic()

    def machine_peak(self) -> float:
        """FLOP/s of all processes, each with devices like ours."""
        return machine_peak_flops(self.devices) * jax.process_count()

    def utilisation(self, flops: float) -> float:
        """FLOP/s of the model as a share of the machine's, at most 1.

        A model beyond the peak shows that the peak was measured while the machine did other work:
        it is measured again, and what the model reaches is a peak, too.
        """
        if flops > self.peak:
            self.peak = max(flops, self.machine_peak())
            self.restart()
        return flops / self.peak

    def read(self, finished: list[loop.Finished]) -> list[tuple[loop.Finished, dict[str, float]]]:
        """Each finished update with its loss, learning rate, and the speed since the last."""
        if not finished:
            return []
        now = time.monotonic()
        speed = self.tokens * len(finished) / (now - self.since)
        self.since = now
        shared = {"tokens_per_second": speed}
        if self.work is not None:
            shared["utilisation"] = self.utilisation(speed * self.work)
        return [
            (done, {"loss": done.loss, "learning_rate": self.rate(done.step), **shared})
            for done in finished
        ]
