"""Checks the tensors of a Hugging Face folder: names, shapes, dtypes, finite values."""

import math
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxformer.interop import safetensors_files as files
from jaxformer.interop.family import Family
from jaxformer.interop.tables import Link, uncovered
from jaxformer.interop.transforms import Shape

CHUNK = 1 << 24
TOO_MANY = 1000  # times the values in the files: not a matter of missing tensors


def check_size(
    stored: Mapping[str, files.Stored], shapes: Mapping[str, Shape], folder: Path
) -> None:
    """Raise if config.json describes far more parameters than the files hold."""
    described = sum(map(math.prod, shapes.values()))
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    if described > TOO_MANY * max(held, 1):
        raise ValueError(
            f"{folder}: config.json describes {described} parameters, but the tensors beside it "
            f"hold {held} values."
        )


def check_tensors(
    family: Family,
    found: list[Link],
    stored: Mapping[str, files.Stored],
    shapes: Mapping[str, Shape],
    folder: Path,
) -> None:
    """Raise if tensors are missing, unexpected, or of the wrong shape or dtype."""
    expected = {link.theirs: link.shape for link in found}
    complaints = []
    missing = sorted(set(expected) - set(stored))
    if missing:
        complaints.append(f"{len(missing)} tensors are missing: {', '.join(missing)}")
    extra = sorted(set(stored) - set(expected))
    if extra:
        complaints.append(
            f"{len(extra)} tensors have no place in a {family.model_type} with this config.json: "
            f"{', '.join(extra)}"
        )
    unfilled = uncovered(found, shapes)
    if unfilled:
        complaints.append(
            f"{len(unfilled)} parameters get nothing from a {family.model_type}: "
            f"{', '.join(unfilled)}"
        )
    both = [name for name in expected if name in stored]
    wrong = [name for name in both if stored[name].shape != expected[name]]
    if wrong:
        listed = ", ".join(
            f"{name} is {list(stored[name].shape)}, not {list(expected[name])}" for name in wrong
        )
        complaints.append(f"{len(wrong)} tensors have the wrong shape: {listed}")
    kinds = [name for name in both if stored[name].dtype not in files.FLOATS]
    if kinds:
        listed = ", ".join(f"{name} is {stored[name].dtype}" for name in kinds)
        complaints.append(
            f"{len(kinds)} tensors are no floats ({', '.join(files.FLOATS)}): {listed}"
        )
    if complaints:
        raise ValueError(f"{folder}: " + ".\n".join(complaints) + ".")


def check_finite(tensor: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Raise if values are NaN or infinite, or overflow in `dtype`."""
    values, count, lost = tensor.reshape(-1), 0, 0
    narrower = jnp.finfo(dtype).max < jnp.finfo(tensor.dtype).max
    for start in range(0, values.size, CHUNK):
        part = values[start : start + CHUNK]
        count += part.size - int(np.count_nonzero(np.isfinite(part)))
        if narrower:
            with np.errstate(over="ignore", invalid="ignore"):
                part = part.astype(dtype)
            lost += part.size - int(np.count_nonzero(np.isfinite(part)))
    if count:
        raise ValueError(f"{name}: {count} of {values.size} values are not finite (NaN, infinity).")
    if lost:
        raise ValueError(
            f"{name}: {lost} of {values.size} values are too large for {dtype}; pass a wider dtype."
        )
