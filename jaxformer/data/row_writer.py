"""Writes the token stream of packed rows while documents are being tokenized."""

import contextlib
from array import array
from pathlib import Path

import numpy as np

from jaxformer.data.checked_files import CheckedFileWriter
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
            self._files = {
                name: stack.enter_context(
                    contextlib.closing(CheckedFileWriter(folder / f"{name}.bin"))
                )
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
        size, end = self.num_inputs + 1, 0  # tokens of the stream, and of this part
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
            starts.append(first)
            document_bytes.append(int(sizes.sum()))
            stream.append(ids)
            loss_masks.append(ids_loss_mask)
            size += len(ids)
        loss_mask = np.concatenate(loss_masks)
        self.num_targets += int(loss_mask.sum())
        self.num_inputs = size - 1
        self.num_bytes += sum(document_bytes)
        self._write("document_bytes", document_bytes)
        self._write("tokens", np.concatenate(stream))
        self._write("starts", starts)
        self._write("loss_mask", loss_mask)

    def finish(self) -> dict[str, bytes]:
        """Write to disk; returns the digests of each file, by its name."""
        return {name: file.finish() for name, file in self._files.items()}

    def _write(self, name: str, values: object) -> None:
        if name in self._files:
            self._files[name].write(np.asarray(values, self.dtypes[name]))
