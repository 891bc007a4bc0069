"""Dtype, shape and checksum of each saved array, and their comparison at restore."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from jaxformer.json_files import get_field

SCHEMA = 3  # 1: before Orbax's CheckpointManager; 2: trained and frozen parameters in one tree
MAX_LISTED = 10  # lines of a message before the rest is only counted
MAX_CONCURRENT = (
    16  # JAX deadlocks on several CPU devices with 33 concurrent programs with collectives
)


class ArrayRecord(NamedTuple):
    """Dtype, shape and checksum of one saved array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def record_arrays(arrays: Mapping[str, Array]) -> dict[str, ArrayRecord]:
    """ArrayRecord of each array."""
    sums = checksums(arrays)
    return {path: ArrayRecord(x.dtype.name, x.shape, sums[path]) for path, x in arrays.items()}


def check_contents(contents: dict[str, Any]) -> None:
    """Raise if a description of this schema lacks a field, or has one of another type."""
    if get_field(contents, "schema", int, location="its description") != SCHEMA:
        return
    get_field(contents, "description", dict, location="its description")
    if contents.get("loss", math.nan) is not None:
        get_field(contents, "loss", float, location="its description")
    get_field(contents, "arrays", dict, location="its description")
    stored_in(contents)


def stored_in(contents: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    """ArrayRecord of each array in a description."""
    stored = {}
    for path, recorded in contents["arrays"].items():
        match recorded:
            case [str() as dtype, [*shape], int() as checksum] if all(
                isinstance(size, int) and size >= 0 for size in shape
            ):
                stored[path] = ArrayRecord(dtype, tuple(shape), checksum)
            case _:
                raise ValueError(f"invalid record of array {path}: {json.dumps(recorded)[:100]}")
    return stored


def mismatches(
    stored: Mapping[str, ArrayRecord], expected: Mapping[str, Any], *, partial: bool
) -> list[str]:
    """One line for each array whose dtype or shape differs from the expected one."""
    paths = expected if partial else {**stored, **expected}
    lines = []
    for path in sorted(paths):
        saved_text, expected_text = str(stored.get(path, "nothing")), "nothing"
        if (x := expected.get(path)) is not None:
            expected_text = str(ArrayRecord(np.dtype(x.dtype).name, x.shape, 0))
        if saved_text != expected_text:
            lines.append(f"  {path}: {saved_text} in the checkpoint, {expected_text} requested")
    return lines


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Sum of each array's words, modulo 2 ** 32; changing a single bit changes it."""
    paths, sums = list(arrays), dict[str, Any]()
    for first in range(0, len(paths), MAX_CONCURRENT):
        some = paths[first : first + MAX_CONCURRENT]
        sums |= jax.device_get({path: array_checksum(arrays[path]) for path in some})
    return {path: int(x) for path, x in sums.items()}


def array_checksum(x: Array | np.ndarray) -> Any:
    """Checksum of an array, computed where it is: on the host or on its devices."""
    if isinstance(x, np.ndarray):
        return np.sum(x.view(f"uint{8 * x.dtype.itemsize}"), dtype=np.uint32)
    return _device_checksum(x)


@jax.jit
def _device_checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Sum of the elements' bits, read as unsigned integers."""
    return jnp.sum(x.view(f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)


def first_lines(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    num_omitted = len(lines) - MAX_LISTED
    return lines if num_omitted <= 0 else [*lines[:MAX_LISTED], f"  and {num_omitted} more"]
