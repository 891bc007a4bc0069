"""Platform and GPU generation that the traced program is compiled for."""

import re
from typing import Any, NamedTuple

import jax

# Device kinds of NVIDIA GPUs before Ampere, of Ampere and Ada, and of Hopper; others are newer.
PRE_AMPERE_GPUS = r"Tesla|Quadro|TITAN|GTX|RTX 20|\b[KMPVT]\d"
AMPERE_ADA_GPUS = r"\b[AL]\d|RTX 30|RTX 40|RTX A\d|\bAda\b|Orin"
HOPPER_GPUS = r"\bG?H\d"

LANES = 128  # width of a TPU's vector registers


class TargetDevice(NamedTuple):
    """Platform ("cpu", "gpu" or "tpu") and device kind of a device."""

    platform: str
    kind: str


def target_device() -> TargetDevice:
    """Return the device kind that the traced program is compiled for.

    Inside `jax.shard_map` it is the mesh's kind; elsewhere the kind of the default device, which
    `jax.default_device` sets.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if (device := getattr(mesh, "abstract_device", None)) is None:
        device = jax.config.values["jax_default_device"] or jax.local_devices()[0]
        device = jax.local_devices(backend=device)[0] if isinstance(device, str) else device
    kind = device.device_kind
    # Devices of an abstract mesh have a platform from JAX 0.9 on.
    inferred_platform = (
        "tpu" if kind.startswith("TPU") else "cpu" if kind.lower() == "cpu" else "gpu"
    )
    name = getattr(device, "platform", inferred_platform)
    return TargetDevice(name if name in ("cpu", "tpu") else inferred_platform, kind)


def target_platform() -> str:
    """Return the target's platform: "cpu", "gpu" or "tpu"."""
    return target_device().platform


def compute_capability_major(kind: str) -> int:
    """Major CUDA compute capability of a GPU, inferred from its name.

    Args:
        kind: `jax.Device.device_kind`.

    Returns:
        7 before Ampere, 8 for Ampere and Ada, 9 for Hopper, 10 for newer GPUs; 0 for GPUs of other
        vendors.

    References:
        NVIDIA, CUDA GPU Compute Capability, developer.nvidia.com/cuda-gpus
    """
    if re.search(PRE_AMPERE_GPUS, kind):
        return 7
    if "NVIDIA" not in kind:
        return 0
    if re.search(AMPERE_ADA_GPUS, kind):
        return 8
    return 9 if re.search(HOPPER_GPUS, kind) else 10
