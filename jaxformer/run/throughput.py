"""Throughput, model FLOPs utilization and learning rate of finished steps."""

import functools
import time
from collections import deque

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import costs
from jaxformer.config import Decoder
from jaxformer.parallel.chips import chip_from_device_kind
from jaxformer.run.run_config import RunConfig
from jaxformer.training import loop
from jaxformer.training.schedules import make_schedule

RATES_PER_BLOCK = 4096  # learning rates computed in one call
MIN_WINDOW_SECONDS, MIN_WINDOW_STEPS = (1.0, 8)  # shortest window of the mean throughput


class ThroughputMeter:
    """Computes throughput, MFU and learning rate of finished steps.

    Model FLOPs utilization (MFU) needs a chip in `parallel.chips` and a decoder (Chowdhery et al.,
    PaLM, 2022. arXiv:2204.02311, section 4.1 and appendix B).
    """

    def __init__(self, run: RunConfig, mesh: Mesh, *, length: int):
        """Start the clock; `length` is the row length in tokens."""
        self.tokens, self.mfu_per_token = run.batch_size * length, None
        chip = chip_from_device_kind(mesh.devices.flat[0].device_kind)
        if chip is not None and isinstance(run.model.topology, Decoder):
            flops_per_token = costs.training_flops_per_token(run.model, length)
            self.mfu_per_token = flops_per_token / (chip.peak_flops * mesh.size)  # per second
        rates_from = jax.jit(jax.vmap(make_schedule(run.optimizer.schedule, run.planned_steps)))
        in_block = np.arange(RATES_PER_BLOCK, dtype=np.int32)
        # In blocks: single calls would queue behind the train steps on the device.
        self._rates = functools.cache(
            lambda block: jax.device_get(rates_from(block * RATES_PER_BLOCK + in_block))
        )
        self.reset()

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, counted from 1."""
        block, index_in_block = divmod(step - 1, RATES_PER_BLOCK)
        return float(self._rates(block)[index_in_block])

    def reset(self) -> None:
        """Exclude the time since the last step (evaluation, checkpoints) from the throughput."""
        self.window: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def steps_per_second(self, num_steps: int) -> float:
        """Steps per second over a window of at least a few seconds and steps.

        The results of several finished steps may be read at once, the next only after a pause.
        """
        now, count = time.monotonic(), self.window[-1][1] + num_steps
        self.window.append((now, count))
        while (
            now - self.window[1][0] >= MIN_WINDOW_SECONDS
            and count - self.window[1][1] >= MIN_WINDOW_STEPS
        ):
            self.window.popleft()
        since, before = self.window[0]
        return (count - before) / (now - since)

    def step_metrics(
        self, results: list[loop.StepResult]
    ) -> list[tuple[loop.StepResult, dict[str, float]]]:
        """Metrics of each finished step: loss, learning rate, throughput, MFU."""
        if not results:
            return []
        speed = self.tokens * self.steps_per_second(len(results))
        shared = {"tokens_per_second": speed}
        if self.mfu_per_token is not None:
            shared["mfu"] = speed * self.mfu_per_token
        return [
            (x, {"loss": x.loss, "learning_rate": self.learning_rate(x.step), **shared})
            for x in results
        ]
