"""The share of the machine's peak that a run reaches."""

import numpy as np
import pytest

from experiments import meter
from experiments.pretrain_runs import RUNS
from jaxformer.parallel import MeshConfig, make_mesh


def test_no_model_is_faster_than_the_peak(monkeypatch):
    """A peak that was measured beside other work is measured again when a model exceeds it."""
    peaks = iter([100.0, 400.0, 150.0])
    monkeypatch.setattr(meter, "machine_peak_flops", lambda devices: next(peaks))
    one = meter.Meter(RUNS["tiny"], make_mesh(MeshConfig()), length=64)
    assert one.utilisation(50.0) == 0.5
    assert one.utilisation(200.0) == 0.5  # of 400, that the machine does now
    assert one.utilisation(500.0) == 1.0  # whatever is measured, so much was done
    assert one.utilisation(250.0) == pytest.approx(0.5)
    np.testing.assert_equal(list(peaks), [])
