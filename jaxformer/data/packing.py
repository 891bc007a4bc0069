"""Packs tokenized documents into rows, cached on disk and memory-mapped."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.data.corpus import AnyDocument, Instruction
from jaxformer.data.row_writer import RowWriter
from jaxformer.data.rows import PackedRows
from jaxformer.data.tokenised import tokenised
from jaxformer.data.tokenizers import Tokenizer, begin_of_text
from jaxformer.json_files import field, read_json

# Raised whenever the layout of rows or files changes, so that older caches are not found.
FORMAT = 4
METADATA = "metadata.json"


def pack(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    *,
    row_length: int,
    folder: str | Path,
    told: Callable[[int, int], None] | None = None,
) -> PackedRows:
    """Tokenize and pack documents into rows, or open the cached rows.

    The layout is that of `jaxformer.data.rows`. The files lie in a subfolder of ``folder`` whose
    name is a digest of the texts, the tokenizer, the row length and `FORMAT`. It appears there
    complete or not at all, also when several processes write it at once; one that was damaged
    since, in a single bit, is written anew, with a warning. Texts are tokenised on all cores, in
    parts that are kept until the whole is written, so that what was ended goes on; a part is in
    memory at a time.

    Args:
        documents: At least one; all of them instructions, or none. They are gone through twice.
        tokenizer: Its vocabulary decides between 16 and 32 bits per token.
        row_length: Inputs of a row.
        folder: Where caches are kept; made if it is not there.
        told: Called after each part with the bytes of text that are tokenised, and with all.

    Returns:
        The rows, memory-mapped.

    Raises:
        ValueError: The row length is below 1, or there is nothing to pack: no document, or of
            instructions no answer.
        OSError: Writing failed. A full disk is reported with the folder and how far it went.
            Nothing is left but the parts.
    """
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1; got {row_length}.")
    digest, size = _digest(documents, tokenizer, row_length=row_length)
    if not size.documents:
        raise ValueError("There are 0 documents to pack.")
    final = Path(folder) / digest
    if final.exists():
        try:
            return open_packed(final)
        except ValueError as error:
            warnings.warn(f"Packing again: {error}", stacklevel=2)
    num_bytes_done = 0
    parts = final.with_name(f".{final.name}.parts")
    try:
        with _appearing(final) as partial:
            writer = RowWriter(partial, tokenizer, row_length, whole=size.instructions)
            with contextlib.closing(writer):
                for part in tokenised(documents, tokenizer, parts):
                    writer.add(part)
                    num_bytes_done += int(part.num_bytes)
                    if told is not None:
                        told(num_bytes_done, size.bytes)
                writer.finish()
            if size.instructions and not writer.num_bytes:
                raise ValueError(
                    f"The prompts of {size.documents} instructions leave no room for an answer in "
                    f"rows of {row_length} tokens; take longer rows."
                    if writer.cut
                    else f"The answers of {size.documents} instructions are empty."
                )
            metadata = {
                "end_of_text": tokenizer.end_of_text,
                "begin_of_text": begin_of_text(tokenizer),
                "num_documents": writer.num_documents,
                "num_bytes": writer.num_bytes,
                "num_targets": writer.num_targets,
            }
            _describe(partial, metadata)
            # Opened before it has its name: another process may replace what bears that.
            rows = open_packed(partial)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = (
            f"No space left in {folder}, where {num_bytes_done:,} of {size.bytes:,} bytes of text "
            "are "
            "tokenised; make room, and the same command goes on"
        )
        raise OSError(error.errno, message) from error
    shutil.rmtree(parts, ignore_errors=True)
    if writer.cut:
        warnings.warn(
            f"{writer.cut} of {size.documents} instructions are longer than a row of {row_length} "
            "tokens: what does not fit is left out.",
            stacklevel=2,
        )
    return rows


def open_packed(folder: str | Path) -> PackedRows:
    """Open a packed folder after verifying its checksums.

    Every byte is read once and compared with the digest taken when it was written: about a second
    for a gigabyte.

    Args:
        folder: The subfolder itself.

    Returns:
        The rows, memory-mapped.

    Raises:
        ValueError: The folder holds no rows, or its files are not as they were written.
    """
    folder = Path(folder)
    where = folder / METADATA
    try:
        metadata = read_json(where, "checksum", "content")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no packed rows: {METADATA} cannot be read.") from error
    checksum, content = metadata["checksum"], field(metadata, "content", dict, where=where)
    if _checksum(content) != checksum:
        raise ValueError(f"{folder} is damaged: {METADATA} does not match its checksum {checksum}.")
    if (version := field(content, "format", int, where=where)) != FORMAT:
        raise ValueError(f"{folder} has format {version}; this version reads {FORMAT}.")
    files, numbers = (field(content, name, dict, where=where) for name in ("files", "metadata"))
    for name in ("segments", "positions", "tokens"):
        field(files, f"{name}.npy", dict, where=where)
    for name in ("end_of_text", "num_documents", "num_bytes", "num_targets"):
        field(numbers, name, int, where=where)
    arrays = {}
    for name in files:
        path, of = folder / name, f"{where}: {name}"
        expected = field(files, name, dict, where=where)
        size, sha256 = (
            field(expected, "size", int, where=of),
            field(expected, "sha256", str, where=of),
        )
        actual_size = path.stat().st_size if path.is_file() else 0
        if actual_size != size:
            raise ValueError(f"{folder} is damaged: {name} has {actual_size} of {size} bytes.")
        if _file_digest(path) != sha256:
            raise ValueError(f"{folder} is damaged: {name} does not match its SHA-256.")
        arrays[path.stem] = np.load(path, mmap_mode="r")
    return PackedRows(**arrays, **numbers)


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Size(NamedTuple):
    """How many documents, whether instructions, and the bytes of their text."""

    documents: int
    instructions: bool
    bytes: int


def _digest(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, *, row_length: int
) -> tuple[str, Size]:
    digest = hashlib.sha256(f"{FORMAT} {row_length} {tokenizer.to_json()}".encode())
    size = Size(0, False, 0)
    for document in documents:
        data = document.text.encode()
        size = Size(size.documents + 1, isinstance(document, Instruction), size.bytes + len(data))
        # The length keeps two documents apart from one that joins them.
        digest.update(f" {len(data)} ".encode() + data)
        if isinstance(document, Instruction):
            span_info = [document.opens, *((len(text), counts) for text, counts in document.pieces)]
            digest.update(json.dumps(span_info).encode())
    return digest.hexdigest()[:32], size


@contextlib.contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """Temporary folder that is renamed to `final` on success and deleted on failure."""
    partial = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, final: Path) -> None:
    # A damaged one is moved aside, never emptied in place: by then it may be another's whole one.
    damaged_folder = final.with_name(f"{partial.name}.damaged")
    try:
        if final.exists() and not _is_whole(final):
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, damaged_folder)
        os.rename(partial, final)
    except OSError:
        # If it is there now, another process was faster, with the same content.
        if not final.exists():
            raise
    finally:
        shutil.rmtree(damaged_folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        open_packed(folder)
    except (OSError, ValueError):
        return False
    return True


def _describe(folder: Path, metadata: dict[str, int]) -> None:
    """Write metadata.json with a SHA-256 of each file."""
    paths = sorted(folder.glob("*.npy"))
    files = {p.name: {"size": p.stat().st_size, "sha256": _file_digest(p)} for p in paths}
    content = {"format": FORMAT, "files": files, "metadata": metadata}
    file_content = {"checksum": _checksum(content), "content": content}
    (folder / METADATA).write_text(json.dumps(file_content, indent=1))


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
