"""Dtype, shape and checksum of each saved array, and their comparison at restore."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array, Shaped, UInt32

from jaxformer.json_files import field

SCHEMA = 2  # 1 was that of the versions before Orbax's CheckpointManager kept the folder
LISTED = 10  # lines of a message before the rest is only counted
AT_ONCE = 16  # where devices of a CPU exchange messages, JAX stalls for ever with 33 programs


class Stored(NamedTuple):
    """Dtype, shape and checksum of one saved array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def record(arrays: Mapping[str, Array]) -> dict[str, Stored]:
    """Of each array."""
    sums = checksums(arrays)
    return {path: Stored(x.dtype.name, x.shape, sums[path]) for path, x in arrays.items()}


def check_contents(contents: dict[str, Any]) -> None:
    """Refuse a description of this version that lacks something, or has it of another type."""
    if field(contents, "schema", int, where="its description") != SCHEMA:
        return
    field(contents, "description", dict, where="its description")
    if contents.get("loss", math.nan) is not None:
        field(contents, "loss", float, where="its description")
    field(contents, "arrays", dict, where="its description")
    stored_in(contents)


def stored_in(contents: Mapping[str, Any]) -> dict[str, Stored]:
    """What a description records of each array."""
    stored = {}
    for path, recorded in contents["arrays"].items():
        match recorded:
            case [str() as dtype, [*shape], int() as checksum] if all(
                isinstance(size, int) and size >= 0 for size in shape
            ):
                stored[path] = Stored(dtype, tuple(shape), checksum)
            case _:
                raise ValueError(f"of the array {path} it says {json.dumps(recorded)[:100]}")
    return stored


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by path, such as "params/decoder/final_norm/scale"."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def differences(
    stored: Mapping[str, Stored], wanted: Mapping[str, Any], *, partial: bool
) -> list[str]:
    """One line for each array whose dtype or shape differs from the expected one."""
    paths = wanted if partial else {**stored, **wanted}
    lines = []
    for path in sorted(paths):
        saved_text, expected_text = str(stored.get(path, "nothing")), "nothing"
        if path in wanted:
            expected_text = str(Stored(np.dtype(wanted[path].dtype).name, wanted[path].shape, 0))
        if saved_text != expected_text:
            lines.append(f"  {path}: saved {saved_text}, asked for {expected_text}")
    return lines


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Sum of the words of each array, modulo 2 ** 32: any one changed bit changes it."""
    paths, sums = list(arrays), dict[str, Any]()
    for first in range(0, len(paths), AT_ONCE):
        device_sums = {path: sum_of_bits(arrays[path]) for path in paths[first : first + AT_ONCE]}
        sums |= jax.device_get(device_sums)
    return {path: int(x) for path, x in sums.items()}


def sum_of_bits(x: Array | np.ndarray) -> Any:
    """Checksum of an array, computed where it is: on the host or on its devices."""
    if isinstance(x, np.ndarray):
        return np.sum(x.view(f"uint{8 * x.dtype.itemsize}"), dtype=np.uint32)
    return sum_of_words(x)


@jax.jit
def sum_of_words(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Sum of the elements' bits, read as unsigned integers."""
    return jnp.sum(x.view(f"uint{8 * x.dtype.itemsize}"), dtype=jnp.uint32)


def shortened(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    num_omitted = len(lines) - LISTED
    return lines if num_omitted <= 0 else [*lines[:LISTED], f"  and {num_omitted} more"]
