"""Which devices a run uses, in this process and in the others."""

import contextlib
import json
import os
import sys

import jax

from experiments.resuming import flatten
from experiments.training_run import Run
from jaxformer import parallel
from jaxformer.config import to_json


def prepare_devices(run: Run) -> None:
    """Simulate as many as asked for, where they are a CPU's; join the other processes.

    The first process speaks for all; the others are silent but for errors.
    """
    simulate(run.devices)
    if run.distributed:
        parallel.join(run.hosts)
        if not parallel.is_first():
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        said = flatten(json.loads(to_json(run)))
        parallel.refuse_differences({k: x for k, x in said.items() if k != "hosts.process"})


def simulate(count: int | None) -> None:
    """On a CPU, so many devices; elsewhere they are what they are."""
    if count is not None:
        with contextlib.suppress(RuntimeError):  # JAX runs already; then it has what it has
            jax.config.update("jax_num_cpu_devices", count)


def chosen_devices(count: int | None) -> list[jax.Device]:
    """The first devices of each process, or all."""
    everyone = jax.devices()
    if count is None:
        return everyone
    by_process: dict[int, list[jax.Device]] = {}
    for device in everyone:
        by_process.setdefault(device.process_index, []).append(device)
    fewest = min(map(len, by_process.values()))
    if not 1 <= count <= fewest:
        raise ValueError(f"Asked for {count} devices; this machine has {fewest}.")
    return [device for devices in by_process.values() for device in devices[:count]]
