"""How fast the machine could multiply matrices: the denominator of model FLOP utilisation."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxformer.parallel.chips import chip_of

WIDTH = 1024


def published_peak_flops(device_kind: str) -> float | None:
    """Look up what the maker says one device can do.

    Args:
        device_kind: `jax.Device.device_kind`, as in "NVIDIA H100 80GB HBM3" or "TPU v5 lite".

    Returns:
        Dense bfloat16 FLOP/s of one device, or None for a kind that `parallel.chips` does not have.
    """
    chip = chip_of(device_kind)
    return None if chip is None else chip.peak_flops


def measured_peak_flops(devices: Sequence[jax.Device], *, seconds: float = 0.3) -> float:
    """Time square float32 matrix products that run on all `devices` at once.

    The best round counts, since other programs can only slow a round down. Simulated devices that
    share cores share their speed too, so the sum does not grow with their number.

    Args:
        devices: Devices of this process.
        seconds: For how long to measure, after one round that compiles. At least one round runs.

    Returns:
        FLOP/s of all the devices together.

    Raises:
        ValueError: There are no devices, or no time to measure.
    """
    if not devices or seconds <= 0:
        raise ValueError(
            f"Need at least one device and more than 0 seconds; got {len(devices)} and {seconds}."
        )
    square = jnp.full((WIDTH, WIDTH), 1 / WIDTH, jnp.float32)
    operands = [jax.device_put(square, device) for device in devices]
    multiply = jax.jit(jnp.matmul)

    def time_round() -> float:
        start = time.perf_counter()
        jax.block_until_ready([multiply(operand, operand) for operand in operands])
        return time.perf_counter() - start

    time_round()
    end = time.perf_counter() + seconds
    best = time_round()
    while time.perf_counter() < end:
        best = min(best, time_round())
    return len(devices) * 2 * WIDTH**3 / best


def machine_peak_flops(devices: Sequence[jax.Device] | None = None) -> float:
    """Peak matrix product speed of devices together.

    Published bfloat16 figures where the devices are in the table, else a measurement in float32
    that takes about 0.3 s. Model FLOP utilisation is the model's FLOP/s divided by this.

    Args:
        devices: Devices of this process; None is all.

    Returns:
        FLOP/s.

    References:
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. arXiv:2204.02311,
        section 4.1 and appendix B (model FLOP utilisation)
    """
    devices = jax.local_devices() if devices is None else devices
    peaks = [published_peak_flops(device.device_kind) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(devices) else measured_peak_flops(devices)
