import jax
import pytest

from jaxformer.training import hardware


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v6e", 918e12),
    ],
)
def test_published_peaks(kind, peak):
    assert hardware.published_peak_flops(kind) == peak


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "",
        "NVIDIA L40S",
        "NVIDIA GH200 480GB",
        "TPU v4 lite",
        "TPU v3",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_other_kinds_are_not_taken_for_their_neighbours(kind):
    assert hardware.published_peak_flops(kind) is None


def test_measurement_is_plausible():
    peak = hardware.measured_peak_flops(jax.devices()[:1], seconds=0.01)
    assert 1e8 < peak < 1e14


def test_measurement_counts_the_work_of_every_device(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    one = hardware.measured_peak_flops(jax.devices()[:1], seconds=0.5)
    three = hardware.measured_peak_flops(jax.devices()[:3], seconds=0.5)
    assert one == 2 * 1024**3, "each round takes one second of this clock"
    assert three == 3 * one


def test_the_best_round_counts(monkeypatch):
    # Warm-up 0 to 9, end at 9 + 5; rounds of 3, 1 and 2 seconds; the clock is asked after each.
    ticks = iter([0.0, 9.0, 9.0, 9.0, 12.0, 12.0, 12.0, 13.0, 13.0, 13.0, 15.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    assert hardware.measured_peak_flops(jax.devices()[:1], seconds=5.0) == 2 * 1024**3 / 1.0


@pytest.mark.parametrize("count, seconds", [(0, 0.3), (1, 0.0)])
def test_nothing_to_measure(count, seconds):
    with pytest.raises(ValueError, match=f"more than 0 seconds; got {count} and {seconds}"):
        hardware.measured_peak_flops(jax.devices()[:count], seconds=seconds)


class Device:
    def __init__(self, device_kind):
        self.device_kind = device_kind


def test_known_devices_are_added_up_and_unknown_ones_measured(monkeypatch):
    monkeypatch.setattr(hardware, "measured_peak_flops", lambda devices: 7.0 * len(devices))
    for kinds, peak in [
        (["TPU v4"] * 3, 825e12),
        (["cpu"] * 2, 14.0),
        (["cpu", "TPU v4"], 14.0),
    ]:
        monkeypatch.setattr(jax, "local_devices", lambda kinds=kinds: [Device(k) for k in kinds])
        assert hardware.machine_peak_flops() == peak
