"""Safetensors files: what they hold, one tensor at a time, and writing them.

A file is eight bytes with the length of a header, the header (JSON: name to dtype, shape and byte
range), and the bytes of the tensors. Nothing is ever executed, as opposed to pickles.

The `safetensors` package (0.8) reads no float8 into numpy and writes from a whole shard in memory;
here both directions hold one tensor at a time, and a damaged file is named with its numbers.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxformer.json_files import field, parse_object, read_json

FLOATS: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class Stored(NamedTuple):
    """Where one tensor lies.

    `dtype` is the format's name of it; `start` and `stop` are bytes from the start of the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_folder(folder: Path) -> dict[str, Stored]:
    """Everything that a folder's safetensors files hold, by name; only headers are read.

    Args:
        folder: Where ``model.safetensors`` is, or ``model.safetensors.index.json`` and its shards.

    Returns:
        Where each tensor lies.

    Raises:
        ValueError: There is no such file, or files are missing, truncated or corrupt; all of them
            are named.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if pickles:
        raise ValueError(
            f"{folder} has its weights only as pickles ({', '.join(pickles)}), which can run any "
            f"code when opened, so they are not read. Convert them to safetensors: load the folder "
            f"with the library that wrote it and save it again with safe_serialization=True."
        )
    hint = f"; the names {', '.join(others)} are not theirs" if others else ""
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}.")


def read_header(path: Path) -> dict[str, Stored]:
    """What one file holds.

    Args:
        path: The file.

    Returns:
        Where each tensor lies.

    Raises:
        ValueError: The file is truncated or corrupt.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ValueError(
                f"{path} is a note that git-lfs left; fetch the file with git lfs pull."
            )
        length = int.from_bytes(start, "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is truncated or no safetensors file: it has {size} bytes and its header "
                f"would take {length}."
            )
        text = file.read(length)
    try:
        header = parse_object(text, where="it")
        header.pop("__metadata__", None)
        found = {name: _stored(path, 8 + length, name, said) for name, said in header.items()}
    except ValueError as error:
        raise ValueError(f"{path} has a corrupt header: {error}") from error
    end = max((stored.stop for stored in found.values()), default=8 + length)
    _check_ranges(path, found, 8 + length)
    if end < size:
        raise ValueError(f"{path} is corrupt: it has {size} bytes and its header promises {end}.")
    if end > size:
        cut = sorted(name for name, stored in found.items() if stored.stop > size)
        raise ValueError(
            f"{path} is truncated: it has {size} bytes and its header promises {end}; "
            f"{len(cut)} tensors are cut off, from {cut[0]} to {cut[-1]} by name."
        )
    _check_sizes(path, found)
    return found


def read(stored: Stored) -> np.ndarray:
    """The values of one tensor, in the dtype of the file.

    Args:
        stored: Where it lies; of a float dtype.

    Returns:
        The values.
    """
    raw = np.empty(stored.stop - stored.start, np.uint8)
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        count = file.readinto(raw.data)
    if count != raw.size:
        raise ValueError(f"{stored.path} ended after {count} of {raw.size} bytes of a tensor.")
    return raw.view(FLOATS[stored.dtype]).reshape(stored.shape)


def write(path: Path, entries: Iterable[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Write one file, one tensor in memory at a time.

    Args:
        path: The file.
        entries: What will be written.
        arrays: The values, in the order of `entries`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    entries, start = list(entries), 0
    for name, dtype, shape in entries:
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            whole = np.ascontiguousarray(array, entry.dtype).reshape(entry.shape)
            file.write(whole.reshape(-1).view(np.uint8).data)


def write_folder(
    folder: Path, entries: list[Entry], arrays: Iterable[np.ndarray], *, max_shard_bytes: int
) -> None:
    """Write a single file, or as many as the size of a shard asks for, with their index.

    Args:
        folder: Where to.
        entries: What will be written.
        arrays: The values, in the order of `entries`.
        max_shard_bytes: A file grows no larger than this, but for one tensor that does.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        held = sum(e.nbytes for e in shards[-1])
        if shards[-1] and held + entry.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    values = iter(arrays)
    if len(shards) == 1:
        write(folder / SINGLE, entries, values)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / name, shard, (next(values) for _ in shard))
        weight_map.update({entry.name: name for entry in shard})
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _open_shards(folder: Path) -> dict[str, Stored]:
    """Everything in the shards that an index names."""
    weight_map = field(read_json(folder / INDEX), "weight_map", dict, where=folder / INDEX)
    names = sorted({field(weight_map, name, str, where=folder / INDEX) for name in weight_map})
    outside = [name for name in names if Path(name).name != name or "\0" in name]
    if outside:
        raise ValueError(f"{folder / INDEX} names files outside its folder: {outside}.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder / INDEX} names {len(names)} shards, of which {len(absent)} are absent: "
            f"{', '.join(absent)}."
        )
    headers, broken = {}, []
    for name in names:
        try:
            headers[name] = read_header(folder / name)
        except ValueError as error:
            broken.append(str(error))
    if broken:
        raise ValueError("\n".join(broken))
    lost = [
        f"{name} (in {shard})" for name, shard in weight_map.items() if name not in headers[shard]
    ]
    if lost:
        raise ValueError(f"{folder / INDEX} names tensors that are absent: {', '.join(lost)}.")
    unlisted = {name: stored for header in headers.values() for name, stored in header.items()}
    return unlisted | {name: headers[shard][name] for name, shard in weight_map.items()}


def _stored(path: Path, offset: int, name: str, entry: Any) -> Stored:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is no object.")
    dtype = field(entry, "dtype", str, where=name)
    shape = field(entry, "shape", list, where=name)
    ends = field(entry, "data_offsets", list, where=name)
    whole = len(ends) == 2 and all(type(n) is int and n >= 0 for n in (*ends, *shape))
    if not whole or ends[0] > ends[1]:
        raise ValueError(f"{name} has the impossible byte range {ends} or shape {shape}.")
    return Stored(path, dtype, tuple(shape), offset + ends[0], offset + ends[1])


def _check_ranges(path: Path, found: Mapping[str, Stored], start: int) -> None:
    """Refuse tensors that share bytes or leave some between them."""
    before = "the header"
    for name, stored in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != start:
            raise ValueError(
                f"{path} is corrupt: {name} starts at byte {stored.start}, but {before} ends at "
                f"byte {start}."
            )
        before, start = name, stored.stop


def _check_sizes(path: Path, found: Mapping[str, Stored]) -> None:
    """Refuse tensors whose byte range does not fit their shape."""
    wrong = []
    for name, stored in found.items():
        if stored.dtype in FLOATS:
            expected = math.prod(stored.shape) * FLOATS[stored.dtype].itemsize
            if stored.stop - stored.start != expected:
                wrong.append(
                    f"{name} ({stored.dtype} {list(stored.shape)} takes {expected} bytes, "
                    f"not {stored.stop - stored.start})"
                )
    if wrong:
        raise ValueError(f"{path} is corrupt: {', '.join(wrong)}.")
