"""What kind of machine a program is for."""

from typing import Any

import jax


def platform() -> str:
    """What the program that is traced is for: "cpu", "gpu", "tpu".

    Inside `jax.shard_map` its mesh says so, whatever this process has. Elsewhere programs are for
    the default backend, or for `jax.default_device`.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        kind = device.device_kind
        return "tpu" if kind.startswith("TPU") else "cpu" if kind.lower() == "cpu" else "gpu"
    chosen: Any = jax.config.values["jax_default_device"]
    name = jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)
    return "gpu" if name in ("cuda", "rocm") else name
