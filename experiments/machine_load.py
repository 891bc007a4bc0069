"""What else a machine does while something is measured: its load."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUIET = 1.0  # a load from which on a machine is not quiet
STAT = Path("/proc/stat")


def load_average() -> float | None:
    """Of the last minute, how many processes ran or waited; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def busy_cores(seconds: float = 1.0, stat: Path = STAT) -> float | None:
    """How many cores are busy while this process sleeps: with the work of others.

    Args:
        seconds: To sleep.
        stat: The counters of Linux, cores together in the first line, then each core.

    Returns:
        The cores; None where there are no such counters.
    """
    before = _counters(stat)
    time.sleep(seconds)
    after = _counters(stat)
    if before is None or after is None or after[1] <= before[1]:
        return None
    return after[2] * (1 - (after[0] - before[0]) / (after[1] - before[1]))


def _counters(stat: Path) -> tuple[int, int, int] | None:
    """Time idle, time of all kinds, and how many cores there are."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return None
    cores = [line for line in lines if line and line[0].startswith("cpu")]
    if len(cores) < 2:
        return None
    times = [int(number) for number in cores[0][1:9]]  # what guests take is in user time, too
    return times[3] + times[4], sum(times), len(cores) - 1


def is_quiet(load: Mapping[str, Any] | None) -> bool:
    """Whether the load before the start, and that before each contest, was recorded and low."""
    if load is None or load["before"] is None:
        return False
    return max(_all_of(load)) < QUIET


def caption(load: Mapping[str, Any] | None) -> str:
    """What figures are to be read with.

    Args:
        load: What benchmark.json has of it: `before`, the load average of the minute before the
            start, and `busy`, the cores busy with other work before each contest.
    """
    if load is None or load["before"] is None:
        return (
            "The load of the machine was not recorded; other programs may have run at the same "
            "time."
        )
    numbers = f"a load average of {load['before']:.2f} in the minute before the start"
    if busy := _all_of(load)[1:]:
        numbers += f", at most {max(busy):.2f} of {load['cores']} cores busy with other work before"
        numbers += " a contest"
    if is_quiet(load):
        return f"Measured on a quiet machine: {numbers}."
    return f"Measured under load {max(_all_of(load)):.1f}, not on a quiet machine: {numbers}."


def _all_of(load: Mapping[str, Any]) -> list[float]:
    return [load["before"], *(cores for cores in load["busy"].values() if cores is not None)]
