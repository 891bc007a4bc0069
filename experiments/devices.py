"""Which devices a run uses, in this process and in the others."""

import contextlib
import json
import os
import sys
from typing import Protocol

import jax

from experiments.compiled_programs import keep_programs
from experiments.resuming import flatten
from jaxformer import parallel
from jaxformer.config import to_json
from jaxformer.parallel import Hosts


class Spread(Protocol):
    """What says on which devices it works, and whether it is one of many processes."""

    @property
    def devices(self) -> int | None: ...  # noqa: D102
    @property
    def distributed(self) -> bool: ...  # noqa: D102
    @property
    def hosts(self) -> Hosts: ...  # noqa: D102


def prepare_devices(run: Spread) -> None:
    """Simulate a CPU's devices as asked for; join the other processes; keep compiled programs.

    The first process speaks for all; the others are silent but for errors.

    Raises:
        ValueError: The processes were told different things, or not that they are many.
    """
    if run.hosts.coordinator is not None and not run.distributed:
        raise ValueError(f"{run.hosts} is for many processes; pass --distributed too.")
    simulate(run.devices)
    if run.distributed:
        parallel.join(run.hosts)
    keep_programs()  # before the first is compiled
    if run.distributed:
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
