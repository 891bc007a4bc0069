"""Table of published accelerator specifications: peak FLOP/s, memory, bandwidth."""

import difflib
import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Published figures of one accelerator, counted as one JAX device; unknown figures are None.

    Attributes:
        name: Name on the command line.
        device_kind_pattern: Regular expression that matches `jax.Device.device_kind`.
        peak_flops: Dense FLOP/s with bfloat16 inputs (float16 if the chip has no bfloat16), without
            structured sparsity.
        memory: Memory in bytes.
        bandwidth: Memory bandwidth in bytes/s.
        link_domain_size: Number of devices that fast links connect.
    """

    name: str
    device_kind_pattern: str
    peak_flops: float
    memory: float
    bandwidth: float
    link_domain_size: int

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "gpu" or "tpu"."""
        return "tpu" if self.name.startswith("tpu") else "gpu"


# The first chip whose pattern matches is used.
CHIPS: tuple[Chip, ...] = (
    # NVIDIA H200 data sheet, NVL: 1,671e12 with sparsity; 2- or 4-way NVLink bridge
    Chip("h200-nvl", r"\bH200 NVL\b", 835e12, 141e9, 4.8e12, 4),
    # NVIDIA H200 data sheet, SXM: 1,979e12 with sparsity; DGX H200 data sheet: 8 devices
    Chip("h200", r"\bH200\b", 989e12, 141e9, 4.8e12, 8),
    # NVIDIA H100 data sheet, PCIe: 1,513e12 with sparsity; NVLink bridge of two
    Chip("h100-pcie", r"\bH100 PCIe\b", 756e12, 80e9, 2.0e12, 2),
    # NVIDIA H100 NVL data sheet: 1,671e12 with sparsity; NVLink bridge of two
    Chip("h100-nvl", r"\bH100 NVL\b", 835e12, 94e9, 3.9e12, 2),
    # NVIDIA H100 data sheet, SXM: 1,979e12 with sparsity; DGX H100 data sheet: 8 devices
    Chip("h100", r"\bH100\b", 989e12, 80e9, 3.35e12, 8),
    # NVIDIA A100 data sheet, PCIe: 624e12 with sparsity; NVLink bridge of two
    Chip("a100-pcie", r"\bA100 80GB PCIe\b", 312e12, 80e9, 1.935e12, 2),
    # NVIDIA A100 data sheet, PCIe with 40 GB
    Chip("a100-pcie-40gb", r"\bA100-PCIE-40GB\b", 312e12, 40e9, 1.555e12, 2),
    # NVIDIA A100 data sheet, SXM with 40 GB; DGX A100 data sheet: 8 devices
    Chip("a100-40gb", r"\bA100-SXM4-40GB\b", 312e12, 40e9, 1.555e12, 8),
    # NVIDIA A100 data sheet, SXM with 80 GB: 624e12 with sparsity; DGX A100 data sheet: 8 devices
    Chip("a100", r"\bA100\b", 312e12, 80e9, 2.039e12, 8),
    # NVIDIA L4 data sheet: 242e12 with sparsity
    Chip("l4", r"\bL4\b", 121e12, 24e9, 300e9, 1),
    # NVIDIA T4 data sheet, float16
    Chip("t4", r"\bT4\b", 65e12, 16e9, 300e9, 1),
    # NVIDIA V100 data sheet, PCIe, float16; there is one with 32 GB too
    Chip("v100-pcie", r"\bV100-PCIE\b", 112e12, 16e9, 900e9, 1),
    # NVIDIA V100 data sheet, SXM2, float16; there is one with 32 GB too; DGX-1: 8 devices
    Chip("v100", r"\bV100\b", 125e12, 16e9, 900e9, 8),
    # Google Cloud, TPU v4, per chip; Jouppi et al., TPU v4, 2023. arXiv:2304.01433, table 4
    Chip("tpu-v4", r"^TPU v4$", 275e12, 32.0 * 2**30, 1.2e12, 4096),
    # Google Cloud, TPU v5e, per chip; pods of 256
    Chip("tpu-v5e", r"^TPU (v5 lite|v5e)$", 197e12, 16e9, 819e9, 256),
    # Google Cloud, TPU v5p, per chip; slices to 6144
    Chip("tpu-v5p", r"^TPU (v5|v5p)$", 459e12, 95.0 * 2**30, 2.765e12, 6144),
    # Google Cloud, TPU v6e, per chip; pods of 256
    Chip("tpu-v6e", r"^TPU (v6 lite|v6e)$", 918e12, 32e9, 1.638e12, 256),
)


def get_chip(name: str) -> Chip:
    """The chip of this name.

    Raises:
        ValueError: There is none; the message has similar names.
    """
    names = [chip.name for chip in CHIPS]
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        hint = f" Similar: {', '.join(close)}." if close else ""
        raise ValueError(f"There is no chip {name!r}.{hint} Chips: {', '.join(names)}.")
    return CHIPS[names.index(name)]


def chip_from_device_kind(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`, or None if it is not in the table.

    Args:
        device_kind: `jax.Device.device_kind`, as in "NVIDIA H100 80GB HBM3" or "TPU v5 lite".

    Returns:
        The chip, or None; also None for a part of a GPU (MIG), as the figures are of whole GPUs.
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    return next((chip for chip in CHIPS if re.search(chip.device_kind_pattern, device_kind)), None)
