"""Writes the token stream of packed rows while documents are being tokenized."""

import contextlib
import os
from array import array
from pathlib import Path

import numpy as np

from jaxformer.data.tokenization import TokenizedPart, smallest_unsigned_dtype
from jaxformer.data.tokenizers import Tokenizer


class RowWriter:
    """Writes the stream of `jaxformer.data.rows` to files.

    Attributes:
        dtypes: Dtype of each file, by its name.
        num_inputs: Inputs of the rows so far, without padding.
        num_documents: Documents with loss, so far.
        num_targets: Targets with loss, so far.
        num_bytes: Bytes of the text with loss, so far, without truncated text.
        num_truncated: Documents that were truncated to a row; only with `keep_whole`.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, row_length: int, *, keep_whole: bool):
        """Open the files.

        Args:
            folder: Folder for ``tokens.bin``, ``starts.bin`` and ``document_bytes.bin``.
            tokenizer: Tokenizer; its vocabulary size selects 16 or 32 bits per token.
            row_length: Inputs of a row.
            keep_whole: Whether documents are never split over two rows, and ``loss_mask.bin`` is
                written too.
        """
        self._length, self._whole, self._end = row_length, keep_whole, tokenizer.end_of_text
        self.dtypes = {"tokens": smallest_unsigned_dtype(tokenizer.vocab_size)}
        self.dtypes |= dict.fromkeys(("starts", "document_bytes"), np.dtype("<i8"))
        if keep_whole:
            self.dtypes["loss_mask"] = np.dtype(bool)
        self.num_inputs = self.num_documents = self.num_targets = 0
        self.num_bytes = self.num_truncated = 0
        with contextlib.ExitStack() as stack:
            # Not memory-mapped, since a full disk would kill the process.
            self._files = {
                name: stack.enter_context(open(folder / f"{name}.bin", "wb"))
                for name in self.dtypes
            }
            self._closing = stack.pop_all()
        self._write("tokens", [self._end])

    def close(self) -> None:
        """Close the files, also if they are incomplete."""
        self._closing.close()

    def add(self, part: TokenizedPart) -> None:
        """Append tokenized documents."""
        length, starts, document_bytes = self._length, array("q"), array("q")
        stream, loss_masks = [part.tokens[:0]], [part.loss_mask[:0]]
        size = self.num_inputs + 1  # tokens of the stream
        for ids, has_loss, sizes, opens in part.documents():
            first = size - opens  # its first input
            if self._whole:
                max_tokens = length - opens
                if len(ids) - 1 > max_tokens:
                    ids = np.append(ids[:max_tokens], ids[-1:])
                    has_loss = np.append(has_loss[:max_tokens], False)
                    sizes = sizes[:max_tokens]
                    self.num_truncated += 1
                if not has_loss.any():  # a row without loss would train nothing
                    continue
                if first // length != (size + len(ids) - 2) // length:
                    fill = -first % length
                    stream.append(np.full(fill, self._end, ids.dtype))
                    loss_masks.append(np.zeros(fill, bool))
                    size, first = size + fill, first + fill
            self.num_documents += 1
            starts.append(first)
            document_bytes.append(int(sizes.sum()))
            stream.append(ids)
            loss_masks.append(has_loss)
            size += len(ids)
        loss_mask = np.concatenate(loss_masks)
        self.num_targets += int(loss_mask.sum())
        self.num_inputs = size - 1
        self.num_bytes += sum(document_bytes)
        self._write("document_bytes", document_bytes)
        self._write("tokens", np.concatenate(stream))
        self._write("starts", starts)
        self._write("loss_mask", loss_mask)

    def finish(self) -> None:
        """Write to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def _write(self, name: str, values: object) -> None:
        if name in self._files:
            self._files[name].write(np.asarray(values, self.dtypes[name]).data)
