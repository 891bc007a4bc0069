"""Writes packed rows to .npy files while documents are being tokenized."""

import contextlib
import os
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt

from jaxformer.data.rows import pack_stream
from jaxformer.data.tokenised import Part, unsigned
from jaxformer.data.tokenizers import Tokenizer

TOKENS_AT_ONCE = 1 << 20


class RowWriter:
    """Writes packed rows to .npy files, buffering less than one row.

    Attributes:
        num_documents: Documents of which something counts, so far.
        num_targets: Targets that count, as far as rows are written.
        num_bytes: Bytes of the text that counts, so far, as far as it fits.
        cut: Documents that were longer than a row, where none may cross its end.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, row_length: int, *, whole: bool):
        """Open the files.

        Args:
            folder: Gets ``tokens.npy``, ``segments.npy`` and ``positions.npy``.
            tokenizer: Its vocabulary decides between 16 and 32 bits per token.
            row_length: Inputs of a row.
            whole: Whether no document crosses the end of a row, and ``counted.npy`` says which
                targets count.
        """
        self._length, self._whole = row_length, whole
        self._end = tokenizer.end_of_text
        tokens, places = unsigned(tokenizer.vocab_size), unsigned(row_length + 1)
        self._layout = {
            "tokens": (tokens, row_length + 1),
            "segments": (places, row_length),
            "positions": (places, row_length),
        }
        if whole:
            self._layout["counted"] = (np.dtype(bool), row_length)
        # What no row has yet: the last token of the last row, and what followed it.
        self._stream, self._counts = np.array([self._end], tokens), np.zeros(1, bool)
        self._starts = list[int]()
        self._rows = self.num_documents = self.num_targets = self.num_bytes = self.cut = 0
        with contextlib.ExitStack() as stack:
            # Not memory maps: on a full disk, writing to one ends the process by a signal.
            self._files = {
                name: stack.enter_context(open(folder / f"{name}.npy", "wb"))
                for name in self._layout
            }
            self._closing = stack.pop_all()
        self._write_headers()

    def close(self) -> None:
        """Close the files, whether or not all is written."""
        self._closing.close()

    def add(self, part: Part) -> None:
        """Append tokenized documents and write the rows that are complete."""
        length = self._length
        stream, counts, starts = [self._stream], [self._counts], self._starts
        size, end = len(self._stream), 0
        for num_tokens, opens in zip(part.lengths.tolist(), part.opens.tolist(), strict=True):
            begin, end = end, end + num_tokens
            ids, ids_count = part.tokens[begin:end], part.counts[begin:end]
            sizes = part.sizes[begin:end]
            first = size - opens  # its first input
            if self._whole:
                room = length - opens
                if num_tokens - 1 > room:
                    ids = np.append(ids[:room], ids[-1:])
                    ids_count, sizes = np.append(ids_count[:room], False), sizes[:room]
                    self.cut += 1
                if not ids_count.any():  # a row of nothing to learn would be an update of nothing
                    continue
                if first // length != (size + len(ids) - 2) // length:
                    fill = -first % length
                    stream.append(np.full(fill, self._end, ids.dtype))
                    counts.append(np.zeros(fill, bool))
                    size, first = size + fill, first + fill
            self.num_documents += 1
            self.num_bytes += int(sizes.sum())
            starts.append(first)
            stream.append(ids)
            counts.append(ids_count)
            size += len(ids)
        self._stream, self._counts = np.concatenate(stream), np.concatenate(counts)
        self._write((size - 1) // length)

    def finish(self) -> None:
        """Pad and write the last row, and the final headers."""
        self._write(-(-(len(self._stream) - 1) // self._length))
        self._write_headers()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _write(self, num_rows: int) -> None:
        """Write the first `num_rows` rows of the buffer and drop them from it."""
        length, stream, counts = self._length, self._stream, self._counts
        opens = np.zeros(len(stream), bool)
        opens[self._starts] = True
        step = max(1, TOKENS_AT_ONCE // length)
        for row in range(0, num_rows, step):
            part = slice(row * length, min(row + step, num_rows) * length + 1)
            self._write_rows(stream[part], opens[part], counts[part])
        done = num_rows * length
        self._stream, self._counts = stream[done:], counts[done:]
        self._starts = [start - done for start in self._starts if start >= done]

    def _write_rows(
        self,
        stream: UInt[np.ndarray, " N"],
        starts: Bool[np.ndarray, " N"],
        counts: Bool[np.ndarray, " N"],
    ) -> None:
        packed = pack_stream(stream, starts, row_length=self._length, end_of_text=self._end)
        shape = packed.segments.shape
        counted = np.pad(counts[1:], (0, packed.segments.size - len(counts) + 1)).reshape(shape)
        self._rows += len(counted)
        self.num_targets += int(counted.sum())
        arrays = {**packed._asdict(), "counted": counted}
        for name, (dtype, _) in self._layout.items():
            self._files[name].write(np.ascontiguousarray(arrays[name], dtype).data)

    def _write_headers(self) -> None:
        """Write the .npy headers with the current number of rows."""
        for name, (dtype, width) in self._layout.items():
            self._files[name].seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": (self._rows, width)}
            np.lib.format.write_array_header_1_0(self._files[name], header)
