"""What makers publish of their chips: the one table of it."""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device. What is not published, or of which we are not sure, is None.

    Attributes:
        name: As on a command line.
        kind: A pattern found in `jax.Device.device_kind`.
        peak_flops: Dense FLOP/s with bfloat16 inputs (float16 where the chip has no bfloat16),
            without structured sparsity.
        memory: Bytes.
        bandwidth: Of the memory, bytes/s.
        domain: How many devices fast links join.
    """

    name: str
    kind: str
    peak_flops: float
    memory: float
    bandwidth: float
    domain: int


# The first whose pattern is found counts.
CHIPS: tuple[Chip, ...] = (
    # NVIDIA H200 data sheet, NVL: 1,671e12 with sparsity; 2- or 4-way NVLink bridge
    Chip(
        name="h200-nvl",
        kind=r"\bH200 NVL\b",
        peak_flops=835e12,
        memory=141e9,
        bandwidth=4.8e12,
        domain=4,
    ),
    # NVIDIA H200 data sheet, SXM: 1,979e12 with sparsity; DGX H200 data sheet: 8 devices
    Chip(
        name="h200",
        kind=r"\bH200\b",
        peak_flops=989e12,
        memory=141e9,
        bandwidth=4.8e12,
        domain=8,
    ),
    # NVIDIA H100 data sheet, PCIe: 1,513e12 with sparsity; NVLink bridge of two
    Chip(
        name="h100-pcie",
        kind=r"\bH100 PCIe\b",
        peak_flops=756e12,
        memory=80e9,
        bandwidth=2.0e12,
        domain=2,
    ),
    # NVIDIA H100 NVL data sheet: 1,671e12 with sparsity; NVLink bridge of two
    Chip(
        name="h100-nvl",
        kind=r"\bH100 NVL\b",
        peak_flops=835e12,
        memory=94e9,
        bandwidth=3.9e12,
        domain=2,
    ),
    # NVIDIA H100 data sheet, SXM: 1,979e12 with sparsity; DGX H100 data sheet: 8 devices
    Chip(
        name="h100",
        kind=r"\bH100\b",
        peak_flops=989e12,
        memory=80e9,
        bandwidth=3.35e12,
        domain=8,
    ),
    # NVIDIA A100 data sheet, PCIe: 624e12 with sparsity; NVLink bridge of two
    Chip(
        name="a100-pcie",
        kind=r"\bA100 80GB PCIe\b",
        peak_flops=312e12,
        memory=80e9,
        bandwidth=1.935e12,
        domain=2,
    ),
    # NVIDIA A100 data sheet, PCIe with 40 GB
    Chip(
        name="a100-pcie-40gb",
        kind=r"\bA100-PCIE-40GB\b",
        peak_flops=312e12,
        memory=40e9,
        bandwidth=1.555e12,
        domain=2,
    ),
    # NVIDIA A100 data sheet, SXM with 40 GB; DGX A100 data sheet: 8 devices
    Chip(
        name="a100-40gb",
        kind=r"\bA100-SXM4-40GB\b",
        peak_flops=312e12,
        memory=40e9,
        bandwidth=1.555e12,
        domain=8,
    ),
    # NVIDIA A100 data sheet, SXM with 80 GB: 624e12 with sparsity; DGX A100 data sheet: 8 devices
    Chip(
        name="a100",
        kind=r"\bA100\b",
        peak_flops=312e12,
        memory=80e9,
        bandwidth=2.039e12,
        domain=8,
    ),
    # NVIDIA L4 data sheet: 242e12 with sparsity
    Chip(name="l4", kind=r"\bL4\b", peak_flops=121e12, memory=24e9, bandwidth=300e9, domain=1),
    # NVIDIA T4 data sheet, float16
    Chip(name="t4", kind=r"\bT4\b", peak_flops=65e12, memory=16e9, bandwidth=300e9, domain=1),
    # NVIDIA V100 data sheet, PCIe, float16; there is one with 32 GB too
    Chip(
        name="v100-pcie",
        kind=r"\bV100-PCIE\b",
        peak_flops=112e12,
        memory=16e9,
        bandwidth=900e9,
        domain=1,
    ),
    # NVIDIA V100 data sheet, SXM2, float16; there is one with 32 GB too; DGX-1: 8 devices
    Chip(
        name="v100",
        kind=r"\bV100\b",
        peak_flops=125e12,
        memory=16e9,
        bandwidth=900e9,
        domain=8,
    ),
    # Google Cloud, TPU v4, per chip; Jouppi et al., TPU v4, 2023. arXiv:2304.01433, table 4
    Chip(
        name="tpu-v4",
        kind=r"^TPU v4$",
        peak_flops=275e12,
        memory=32.0 * 2**30,
        bandwidth=1.2e12,
        domain=4096,
    ),
    # Google Cloud, TPU v5e, per chip; pods of 256
    Chip(
        name="tpu-v5e",
        kind=r"^TPU (v5 lite|v5e)$",
        peak_flops=197e12,
        memory=16e9,
        bandwidth=819e9,
        domain=256,
    ),
    # Google Cloud, TPU v5p, per chip; slices to 6144
    Chip(
        name="tpu-v5p",
        kind=r"^TPU (v5|v5p)$",
        peak_flops=459e12,
        memory=95.0 * 2**30,
        bandwidth=2.765e12,
        domain=6144,
    ),
    # Google Cloud, TPU v6e, per chip; pods of 256
    Chip(
        name="tpu-v6e",
        kind=r"^TPU (v6 lite|v6e)$",
        peak_flops=918e12,
        memory=32e9,
        bandwidth=1.638e12,
        domain=256,
    ),
)


def get_chip(name: str) -> Chip:
    """The chip of this name.

    Raises:
        ValueError: There is none; similar names are given.
    """
    names = [chip.name for chip in CHIPS]
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        hint = f" Similar: {', '.join(close)}." if close else ""
        raise ValueError(f"There is no chip {name!r}.{hint} There are {', '.join(names)}.")
    return CHIPS[names.index(name)]


def chip_of(device_kind: str) -> Chip | None:
    """What a device is.

    Args:
        device_kind: `jax.Device.device_kind`, as in "NVIDIA H100 80GB HBM3" or "TPU v5 lite".

    Returns:
        None for a kind that is not in the table. A part of a GPU (MIG) is not in the table, for
        the figures are those of the whole.
    """
    if re.search(r"\bMIG\b", device_kind):
        return None
    return next((chip for chip in CHIPS if re.search(chip.kind, device_kind)), None)
