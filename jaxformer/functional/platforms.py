"""What kind of machine a program is for."""

from typing import Any

import jax


def platform() -> str:
    """Where programs run unless they are told otherwise: "cpu", "gpu", "tpu".

    Programs for other devices of the same process, as for CPUs beside a GPU, say so by
    `jax.default_device`.
    """
    chosen: Any = jax.config.values["jax_default_device"]
    name = jax.default_backend() if chosen is None else getattr(chosen, "platform", chosen)
    return "gpu" if name in ("cuda", "rocm") else name
