"""Binary files with a digest for each block, which is checked when the block is first read."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 16
DIGEST_BYTES = 8  # of SHA-256


class CheckedFileWriter:
    """Writes a file, and digests its blocks meanwhile."""

    def __init__(self, path: Path):
        """Open the file; it is not memory-mapped, since a full disk would kill the process."""
        self._file = open(path, "wb")  # noqa: SIM115
        self._digests, self._block = bytearray(), hashlib.sha256()
        self._space = BLOCK_BYTES  # left in the block

    def write(self, array: np.ndarray) -> None:
        """Append an array."""
        data = np.ascontiguousarray(array).data.cast("B")
        self._file.write(data)
        while data:
            part, data = data[: self._space], data[self._space :]
            self._block.update(part)
            self._space -= len(part)
            if not self._space:
                self._end_block()

    def finish(self) -> bytes:
        """Write to disk; returns the digests of the blocks."""
        if self._space < BLOCK_BYTES:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        return bytes(self._digests)

    def close(self) -> None:
        """Close the file, also if it is incomplete."""
        self._file.close()

    def _end_block(self) -> None:
        self._digests += self._block.digest()[:DIGEST_BYTES]
        self._block, self._space = hashlib.sha256(), BLOCK_BYTES


class CheckedFile:
    """A memory-mapped file whose blocks are checked when they are first read."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        digests: bytes,
        on_damage: Callable[[], None] = lambda: None,
        *,
        offset: int = 0,
    ):
        """Map the file.

        Args:
            path: The file.
            dtype: Dtype of its numbers.
            digests: From `CheckedFileWriter.finish`.
            on_damage: Called before `windows` raises for a damaged block.
            offset: Bytes before the first number.
        """
        has_bytes = path.stat().st_size > offset
        self._path, self._on_damage = path, on_damage
        self._bytes = (
            np.memmap(path, np.uint8, mode="r", offset=offset)
            if has_bytes
            else np.zeros(0, np.uint8)
        )
        self._numbers = self._bytes.view(dtype)
        self._digests = digests
        self._windows: np.ndarray | None = None  # a view, which takes long to make
        self._is_checked = np.zeros(len(digests) // DIGEST_BYTES, bool)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the numbers."""
        return self._numbers.dtype

    def read(self) -> np.ndarray:
        """All numbers, after checking every block."""
        self._check(np.arange(len(self._is_checked)))
        return self._numbers

    def windows(self, begins: np.ndarray, width: int) -> np.ndarray:
        """The `width` numbers from each index on, as ``[len(begins), width]``.

        Raises:
            ValueError: A block of them does not match its digest.
        """
        first = begins * self.dtype.itemsize // BLOCK_BYTES
        last = ((begins + width) * self.dtype.itemsize - 1) // BLOCK_BYTES
        blocks = first[:, None] + np.arange(1 + np.max(last - first, initial=0))
        try:
            self._check(np.unique(np.minimum(blocks, last[:, None])))
        except ValueError:
            self._on_damage()
            raise
        if self._windows is None or self._windows.shape[1] != width:
            self._windows = np.lib.stride_tricks.sliding_window_view(self._numbers, width)
        return self._windows[begins]

    def _check(self, blocks: np.ndarray) -> None:
        for block in blocks[~self._is_checked[blocks]].tolist():
            begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            digest = hashlib.sha256(self._bytes[begin:end].data).digest()[:DIGEST_BYTES]
            if digest != self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
                raise ValueError(
                    f"{self._path.parent} is damaged: {self._path.name} does not match its SHA-256 "
                    f"in bytes {begin} to {min(end, len(self._bytes))}; the next start packs it."
                )
            self._is_checked[block] = True
