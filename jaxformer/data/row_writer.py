"""Writes packed rows to .npy files while documents are being tokenized."""

import contextlib
import os
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt

from jaxformer.data.rows import pack_stream
from jaxformer.data.tokenization import TokenizedPart, smallest_unsigned_dtype
from jaxformer.data.tokenizers import Tokenizer

TOKENS_PER_WRITE = 1 << 20


class RowWriter:
    """Writes packed rows to .npy files, buffering less than one row.

    Attributes:
        num_documents: Documents with loss, so far.
        num_targets: Targets with loss in the written rows.
        num_bytes: Bytes of the text with loss, so far, without truncated text.
        num_truncated: Documents that were truncated to a row; only with `keep_whole`.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, row_length: int, *, keep_whole: bool):
        """Open the files.

        Args:
            folder: Folder for ``tokens.npy``, ``segments.npy`` and ``positions.npy``.
            tokenizer: Tokenizer; its vocabulary size selects 16 or 32 bits per token.
            row_length: Inputs of a row.
            keep_whole: Whether documents are never split over two rows, and ``loss_mask.npy`` is
                written too.
        """
        self._length, self._whole = row_length, keep_whole
        self._end = tokenizer.end_of_text
        token_dtype, position_dtype = (
            smallest_unsigned_dtype(tokenizer.vocab_size),
            smallest_unsigned_dtype(row_length + 1),
        )
        self._layout = {
            "tokens": (token_dtype, row_length + 1),
            "segments": (position_dtype, row_length),
            "positions": (position_dtype, row_length),
        }
        if keep_whole:
            self._layout["loss_mask"] = (np.dtype(bool), row_length)
        # Tokens for the next row: the last token of the last row, and those after it.
        self._stream, self._counts = np.array([self._end], token_dtype), np.zeros(1, bool)
        self._starts = list[int]()
        self._rows = self.num_documents = self.num_targets = self.num_bytes = self.num_truncated = 0
        with contextlib.ExitStack() as stack:
            # Not memory maps: writing to one on a full disk kills the process by a signal.
            self._files = {
                name: stack.enter_context(open(folder / f"{name}.npy", "wb"))
                for name in self._layout
            }
            self._closing = stack.pop_all()
        self._write_headers()

    def close(self) -> None:
        """Close the files, also if they are incomplete."""
        self._closing.close()

    def add(self, part: TokenizedPart) -> None:
        """Append tokenized documents and write the rows that are complete."""
        length = self._length
        stream, loss_masks, starts = [self._stream], [self._counts], self._starts
        size, end = len(self._stream), 0
        for num_tokens, opens in zip(
            part.lengths.tolist(), part.prepend_end_of_text.tolist(), strict=True
        ):
            begin, end = end, end + num_tokens
            ids, ids_loss_mask = part.tokens[begin:end], part.loss_mask[begin:end]
            sizes = part.sizes[begin:end]
            first = size - opens  # its first input
            if self._whole:
                max_tokens = length - opens
                if num_tokens - 1 > max_tokens:
                    ids = np.append(ids[:max_tokens], ids[-1:])
                    ids_loss_mask, sizes = (
                        np.append(ids_loss_mask[:max_tokens], False),
                        sizes[:max_tokens],
                    )
                    self.num_truncated += 1
                # A row without loss would train nothing
                if not ids_loss_mask.any():
                    continue
                if first // length != (size + len(ids) - 2) // length:
                    fill = -first % length
                    stream.append(np.full(fill, self._end, ids.dtype))
                    loss_masks.append(np.zeros(fill, bool))
                    size, first = size + fill, first + fill
            self.num_documents += 1
            self.num_bytes += int(sizes.sum())
            starts.append(first)
            stream.append(ids)
            loss_masks.append(ids_loss_mask)
            size += len(ids)
        self._stream, self._counts = np.concatenate(stream), np.concatenate(loss_masks)
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
        length, stream, token_loss_mask = self._length, self._stream, self._counts
        starts_document = np.zeros(len(stream), bool)
        starts_document[self._starts] = True
        rows_per_write = max(1, TOKENS_PER_WRITE // length)
        for row in range(0, num_rows, rows_per_write):
            part = slice(row * length, min(row + rows_per_write, num_rows) * length + 1)
            self._write_rows(stream[part], starts_document[part], token_loss_mask[part])
        num_written = num_rows * length
        self._stream, self._counts = stream[num_written:], token_loss_mask[num_written:]
        self._starts = [start - num_written for start in self._starts if start >= num_written]

    def _write_rows(
        self,
        stream: UInt[np.ndarray, " N"],
        starts: Bool[np.ndarray, " N"],
        token_loss_mask: Bool[np.ndarray, " N"],
    ) -> None:
        packed = pack_stream(stream, starts, row_length=self._length, end_of_text=self._end)
        shape = packed.segments.shape
        loss_mask = np.pad(
            token_loss_mask[1:], (0, packed.segments.size - len(token_loss_mask) + 1)
        ).reshape(shape)
        self._rows += len(loss_mask)
        self.num_targets += int(loss_mask.sum())
        arrays = {**packed._asdict(), "loss_mask": loss_mask}
        for name, (dtype, _) in self._layout.items():
            self._files[name].write(np.ascontiguousarray(arrays[name], dtype).data)

    def _write_headers(self) -> None:
        """Write the .npy headers with the current number of rows."""
        for name, (dtype, width) in self._layout.items():
            self._files[name].seek(0)
            header = {"descr": dtype.str, "fortran_order": False, "shape": (self._rows, width)}
            np.lib.format.write_array_header_1_0(self._files[name], header)
