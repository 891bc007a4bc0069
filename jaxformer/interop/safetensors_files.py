"""Read tensors from safetensors files one at a time, and write them in shards.

Unlike pickles, these files cannot execute code.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxformer.interop import mxfp4
from jaxformer.json_files import get_field, read_json

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPES = {**FLOAT_DTYPES, "U8": np.dtype(np.uint8)}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """Header entry of one tensor.

    Attributes:
        path: Its file.
        name: Its name.
        dtype: Name of its dtype.
        shape: Its shape.
        offset: Where its bytes begin.
        mxfp4: Entries of the blocks and the scales, if the values are read from these two.
        joined: Entries whose rows, one after another, hold the values; empty is this entry alone.
        first_row: First of these rows.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    mxfp4: tuple["StoredTensor", "StoredTensor"] | None = None
    joined: tuple["StoredTensor", ...] = ()
    first_row: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values, also of a dtype that is not read: "I64", "F8_E4M3", "BOOL"."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (1 if bits is None else int(bits[0]) // 8)


class TensorSpec(NamedTuple):
    """Name, shape and dtype of a tensor to write."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_folder_headers(folder: Path) -> dict[str, StoredTensor]:
    """Header entries of all tensors in a folder, by name.

    Args:
        folder: Folder with ``model.safetensors``, or ``model.safetensors.index.json`` and shards.

    Returns:
        The entries.

    Raises:
        ValueError: There is no such file, or files are missing or damaged; the message lists all.
    """
    if (folder / SINGLE_FILE).is_file():
        return _join_mxfp4(read_header(folder / SINGLE_FILE))
    if (folder / INDEX_FILE).is_file():
        return _join_mxfp4(_open_shards(folder))
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    other_files = sorted(p.name for p in folder.glob("*.safetensors"))
    if pickles:
        raise ValueError(
            f"{folder} has only pickle weights ({', '.join(pickles)}), which are not loaded "
            "because unpickling can run any code. Convert them: load the folder with its library "
            "and save it again with safe_serialization=True."
        )
    hint = f"; {', '.join(other_files)} cannot replace them" if other_files else ""
    raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}.")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Header entries of one file, by name.

    Raises:
        ValueError: The file is damaged.
    """
    with path.open("rb") as start:
        if start.read(8) == b"version ":
            raise ValueError(f"{path} is a git-lfs pointer; fetch the file with git lfs pull.")
    try:
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path}, of {size} bytes, is truncated, damaged or not a safetensors file: {error}."
        ) from error
    with path.open("rb") as start:
        header_size = int.from_bytes(start.read(8), "little")
        header = json.loads(start.read(header_size))
    return {
        name: StoredTensor(
            path,
            name,
            header[name]["dtype"],
            tuple(header[name]["shape"]),
            8 + header_size + header[name]["data_offsets"][0],
        )
        for name in names
    }


def _join_mxfp4(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace bytes NAME_blocks [E, F, D / 32, 16] and NAME_scales by NAME, kernels [E, D, F]."""
    joined = dict(stored)
    for blocks in stored.values():
        name = blocks.name.removesuffix("_blocks")
        scales = stored.get(f"{name}_scales")
        if name == blocks.name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
            continue
        if (*scales.shape, mxfp4.BLOCK_BYTES) != blocks.shape or len(scales.shape) != 3:
            raise ValueError(
                f"{blocks.path}: {blocks.name} must be [experts, outputs, inputs / 32, 16] and "
                f"{scales.name} as many without the last axis; got {list(blocks.shape)} and "
                f"{list(scales.shape)}."
            )
        del joined[blocks.name], joined[scales.name]
        experts, outputs, groups = scales.shape
        shape = experts, 2 * mxfp4.BLOCK_BYTES * groups, outputs
        joined[name] = StoredTensor(blocks.path, name, "BF16", shape, 0, (blocks, scales))
    return joined


def read_tensor(stored: StoredTensor) -> np.ndarray:
    """Return one tensor, which is read from its file where it is used.

    The file's size is checked here. The operating system ends the process (SIGBUS) if the file
    becomes shorter while the tensor is in use: a new file must take the name of the old one.

    Raises:
        ValueError: The file has become shorter since its header was read.
    """
    if stored.mxfp4 is not None:
        return mxfp4.dequantize(*map(read_tensor, stored.mxfp4))
    if stored.joined:
        rows = slice(stored.first_row, stored.first_row + stored.shape[0])
        return np.concatenate([read_tensor(part) for part in stored.joined])[rows]
    if not stored.nbytes:
        return np.empty(stored.shape, DTYPES[stored.dtype])
    try:
        data = np.memmap(stored.path, np.uint8, "r", stored.offset, (stored.nbytes,))
    except ValueError as error:
        raise ValueError(f"{stored.path} has become shorter while it was read.") from error
    return data.view(np.ndarray).view(DTYPES[stored.dtype]).reshape(stored.shape)


def write_folder(
    folder: Path, entries: list[TensorSpec], arrays: Iterable[np.ndarray], *, max_shard_bytes: int
) -> None:
    """Write tensors to one file, or to shards with an index.

    Args:
        folder: Output folder.
        entries: Names, shapes and dtypes of the tensors.
        arrays: The values, in the order of `entries`; one shard is in memory at a time.
        max_shard_bytes: Maximum size of a file; a larger tensor gets a file of its own.

    Raises:
        OSError: A file cannot be written.
    """
    shards: list[list[TensorSpec]] = [[]]
    for entry in entries:
        shard_bytes = sum(e.nbytes for e in shards[-1])
        if shards[-1] and shard_bytes + entry.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    values = iter(arrays)
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, values)
    if len(shards) > 1:
        weight_map = {e.name: n for n, shard in zip(names, shards, strict=True) for e in shard}
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": weight_map,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, entries: list[TensorSpec], values: Iterator[np.ndarray]) -> None:
    """Write the next values to one file.

    Args:
        path: The file.
        entries: Names, shapes and dtypes of its tensors.
        values: The values, in the order of `entries`; more may follow.

    Raises:
        OSError: The file cannot be written.
    """
    tensors = {
        e.name: np.ascontiguousarray(next(values), e.dtype).reshape(e.shape) for e in entries
    }
    path.touch()
    mode = path.stat().st_mode  # the default mode; safetensors restricts it to the owner
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # for example a full disk
        raise OSError(f"{path} could not be written: {error}.") from error
    path.chmod(mode)


def _open_shards(folder: Path) -> dict[str, StoredTensor]:
    """Header entries of all shards in the index."""
    weight_map = get_field(
        read_json(folder / INDEX_FILE), "weight_map", dict, location=folder / INDEX_FILE
    )
    names = sorted(
        {get_field(weight_map, name, str, location=folder / INDEX_FILE) for name in weight_map}
    )
    outside = [name for name in names if Path(name).name != name or "\0" in name]
    if outside:
        raise ValueError(f"{folder / INDEX_FILE} names files outside its folder: {outside}.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder / INDEX_FILE} names {len(names)} shards, but {len(absent)} are absent: "
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
    missing_tensors = [
        f"{name} (in {shard})" for name, shard in weight_map.items() if name not in headers[shard]
    ]
    if missing_tensors:
        raise ValueError(
            f"{folder / INDEX_FILE} names tensors that are absent: {', '.join(missing_tensors)}."
        )
    unlisted = {name: stored for header in headers.values() for name, stored in header.items()}
    return unlisted | {name: headers[shard][name] for name, shard in weight_map.items()}
