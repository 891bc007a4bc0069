"""Binary files with a digest for each block, which is checked when the block is first read."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 16
DIGEST_BYTES = 8  # of SHA-256


def block_digests(path: Path, *, offset: int = 0) -> bytes:
    """Digests of the blocks of a file, one after another.

    Args:
        path: The file.
        offset: Bytes before the first block.
    """
    digests = bytearray()
    with open(path, "rb") as file:
        file.seek(offset)
        while block := file.read(BLOCK_BYTES):
            digests += hashlib.sha256(block).digest()[:DIGEST_BYTES]
    return bytes(digests)


class CheckedFile:
    """A memory-mapped file whose blocks are checked when they are first read."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        digests: bytes,
        *,
        offset: int = 0,
        removed_on_damage: Path | None = None,
    ):
        """Map the file.

        Args:
            path: The file.
            dtype: Dtype of its numbers.
            digests: Its `block_digests`.
            offset: Bytes before the first number.
            removed_on_damage: File to remove before `windows` raises for a damaged block.
        """
        self._path, self._removed_on_damage = path, removed_on_damage
        self._bytes: np.ndarray = np.zeros(0, np.uint8)
        if path.stat().st_size > offset:
            self._bytes = np.memmap(path, np.uint8, mode="r", offset=offset)
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
            if self._removed_on_damage is not None:
                with contextlib.suppress(OSError):
                    self._removed_on_damage.unlink()
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
