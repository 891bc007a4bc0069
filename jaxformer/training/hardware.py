"""How fast the machine could multiply matrices: the denominator of model FLOP utilisation."""

import re
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Dense FLOP/s of one JAX device with bfloat16 inputs (float16 where the chip has no bfloat16),
# without structured sparsity. The first pattern that is found in the device's kind counts.
PUBLISHED_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bH200 NVL\b", 835e12),  # NVIDIA H200 data sheet, NVL: 1,671 with sparsity
    (r"\bH200\b", 989e12),  # NVIDIA H200 data sheet, SXM: 1,979 with sparsity
    (r"\bH100 PCIe\b", 756e12),  # NVIDIA H100 data sheet, PCIe: 1,513 with sparsity
    (r"\bH100 NVL\b", 835e12),  # NVIDIA H100 NVL data sheet: 1,671 with sparsity
    (r"\bH100\b", 989e12),  # NVIDIA H100 data sheet, SXM: 1,979 with sparsity
    (r"\bA100\b", 312e12),  # NVIDIA A100 data sheet: 624 with sparsity
    (r"\bL4\b", 121e12),  # NVIDIA L4 data sheet: 242 with sparsity
    (r"\bT4\b", 65e12),  # NVIDIA T4 data sheet, float16
    (r"\bV100-PCIE\b", 112e12),  # NVIDIA V100 data sheet, PCIe, float16
    (r"\bV100\b", 125e12),  # NVIDIA V100 data sheet, SXM2, float16
    (r"^TPU v4$", 275e12),  # Google Cloud, TPU v4 system architecture, per chip
    (r"^TPU (v5 lite|v5e)$", 197e12),  # Google Cloud, TPU v5e system architecture, per chip
    (r"^TPU (v5|v5p)$", 459e12),  # Google Cloud, TPU v5p system architecture, per chip
    (r"^TPU (v6 lite|v6e)$", 918e12),  # Google Cloud, TPU v6e system architecture, per chip
)
WIDTH = 1024


def published_peak_flops(device_kind: str) -> float | None:
    """Look up what the maker says one device can do.

    Args:
        device_kind: `jax.Device.device_kind`, as in "NVIDIA H100 80GB HBM3" or "TPU v5 lite".

    Returns:
        Dense bfloat16 FLOP/s of one device, or None for a kind that is not in the table. A part of
        a GPU (MIG) is not in the table, for the figure is that of the whole.
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    for pattern, peak in PUBLISHED_PEAKS:
        if re.search(pattern, device_kind):
            return peak
    return None


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
