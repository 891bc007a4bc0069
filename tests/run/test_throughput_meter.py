"""Throughput and MFU of a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer import costs
from jaxformer.run import throughput as meter
from jaxformer.run.pretraining import RUNS
from jaxformer.training import loop


def mesh_of(kind):
    devices = np.full((2, 4), SimpleNamespace(device_kind=kind))
    return SimpleNamespace(devices=devices, size=devices.size)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.at, at=0.0)
    monkeypatch.setattr(meter, "time", now)
    return now


@pytest.fixture
def speed_at(clock):
    throughput = meter.ThroughputMeter(RUNS["tiny"], mesh_of("cpu"), length=64)

    def read(at, count):
        clock.at = at
        (_, numbers), *_ = throughput.step_metrics([loop.StepResult(1, 1.0, 1.0)] * count)
        assert "mfu" not in numbers  # nobody publishes what this machine does
        return numbers["tokens_per_second"] / throughput.tokens

    return read


def test_utilisation_is_the_models_work_over_the_published_peak_of_all_devices(clock):
    run = RUNS["tiny"]
    throughput = meter.ThroughputMeter(run, mesh_of("NVIDIA H100 80GB HBM3"), length=64)
    clock.at = 2.0
    ((_, numbers),) = throughput.step_metrics([loop.StepResult(1, 1.0, 1.0)])
    speed = run.batch_size * 64 / 2.0
    peak = 8 * 989e12
    assert numbers["tokens_per_second"] == speed
    work = costs.training_flops_per_token(run.model, 64)
    assert numbers["mfu"] == pytest.approx(speed * work / peak)


def test_updates_that_are_read_together_do_not_look_fast(speed_at):
    """The devices had made several while the host did something else."""
    for second in range(1, 9):
        assert speed_at(float(second), 1) == 1.0
    assert speed_at(8.001, 2) == pytest.approx(8 / 6, rel=1e-3)
    assert speed_at(12.0, 2) == pytest.approx(1.0)


def test_speed_is_that_of_the_last_second_or_eight_updates(speed_at):
    assert speed_at(1.0, 10) == 10.0
    assert speed_at(2.0, 20) == 20.0
    assert speed_at(2.5, 5) == pytest.approx(25 / 1.5)
    assert speed_at(4.5, 20) == 10.0  # the last two seconds
