"""The share of the machine's peak that a run reaches."""

import pytest

from experiments import meter
from experiments.pretrain_runs import RUNS
from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.training import loop


@pytest.fixture
def one(monkeypatch):
    """A meter of a machine that does 100 FLOP/s at first, then 400, at a time told to it."""
    peaks = iter([100.0, 400.0])
    monkeypatch.setattr(meter, "machine_peak_flops", lambda devices: next(peaks))
    one = meter.Meter(RUNS["tiny"], make_mesh(MeshConfig()), length=64)
    one.work = 1.0 / one.tokens  # one FLOP an update

    def read(at, count):
        monkeypatch.setattr(meter.time, "monotonic", lambda: at)
        finished = [loop.Finished(1, 1.0, 1.0)] * count
        (_, numbers), *_ = one.read(finished)
        return numbers["tokens_per_second"] / one.tokens, numbers["utilisation"]

    one.at = read
    monkeypatch.setattr(meter.time, "monotonic", lambda: 0.0)
    one.restart()
    return one


def test_no_model_is_faster_than_the_peak(one, monkeypatch):
    """A peak that was measured beside other work is measured again when a model exceeds it."""
    assert one.at(1.0, 50) == (50.0, 0.5)
    assert one.at(2.0, 200) == (200.0, 1.0)  # at most
    one.restart()
    assert one.at(3.0, 200) == (200.0, 0.5)  # of 400, that the machine does now


def test_updates_that_are_read_together_do_not_look_fast(one):
    """The devices had made several while the host did something else."""
    for second in range(1, 9):
        assert one.at(float(second), 1)[0] == 1.0
    assert one.at(8.001, 2)[0] == pytest.approx(8 / 6, rel=1e-3)
    assert one.at(12.0, 2)[0] == pytest.approx(1.0)


def test_speed_is_that_of_the_last_second_or_eight_updates(one):
    assert one.at(1.0, 10)[0] == 10.0
    assert one.at(2.0, 20)[0] == 20.0
    assert one.at(2.5, 5)[0] == pytest.approx(25 / 1.5)
    assert one.at(4.5, 20)[0] == 10.0  # the last two seconds
