"""Packs tokenized documents into rows, cached on disk and memory-mapped."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxformer.data.checked_files import CheckedFile
from jaxformer.data.corpus import AnyDocument, CorpusSize, NoTextError, corpus_size
from jaxformer.data.row_writer import RowWriter
from jaxformer.data.rows import PackedRows
from jaxformer.data.temporary_folders import LOCK, temporary_folder
from jaxformer.data.tokenization import documents_digest, tokenize_documents
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.json_files import get_field, json_digest, read_json

# Incremented when the layout of rows or files changes, so that older caches are not used.
FORMAT_VERSION = 6
METADATA = "metadata.json"


def pack(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    *,
    row_length: int,
    folder: str | Path,
    key: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackedRows:
    """Tokenize and pack documents into rows, or open the cached rows.

    The layout is that of `jaxformer.data.rows`. The rows are cached in a subfolder of ``folder``
    whose name is a digest of the texts, the tokenizer, the row length and `FORMAT_VERSION`. It is
    created atomically, also by several processes at once, and rewritten with a warning if it is
    incomplete. Texts are tokenized on all cores in parts, of which one is in memory at a time.
    Parts are stored until all rows are written, so that an interrupted call can continue.

    Args:
        documents: At least one; all or none are instructions. They are read several times.
        tokenizer: Tokenizer; its vocabulary size selects 16 or 32 bits per token.
        row_length: Inputs of a row.
        folder: Folder of caches; created if missing.
        key: Names the texts in place of their digest, so that cached rows are opened without
            reading a text.
        on_progress: Called after each part with the tokenized bytes of text and their total.

    Returns:
        The rows, memory-mapped.

    Raises:
        ValueError: The row length is below 1, there are no documents, or no instruction has an
            answer that fits in a row.
        OSError: Writing failed; for a full disk the message has the folder and the progress. Only
            the parts remain.
    """
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1; got {row_length}.")
    if key is None:
        key = documents_digest(documents)
    name = json_digest([FORMAT_VERSION, key, tokenizer.to_json(), row_length])[:32]
    final = Path(folder) / name
    if final.exists():
        try:
            return open_packed(final)
        except ValueError as error:
            warnings.warn(f"Cached rows are packed again: {error}", stacklevel=2)
    size = corpus_size(documents)
    if not size.num_documents:
        raise ValueError("There are no documents to pack.")
    return write_packed(
        documents,
        tokenizer,
        row_length=row_length,
        folder=final,
        size=size,
        on_progress=on_progress,
    )


def write_packed(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    *,
    row_length: int,
    folder: Path,
    size: CorpusSize,
    on_progress: Callable[[int, int], None] | None = None,
) -> PackedRows:
    """Tokenize and pack documents into a folder; see `pack`.

    Args:
        documents: As for `pack`.
        tokenizer: As for `pack`.
        row_length: As for `pack`. Only instructions depend on it.
        folder: Folder to create.
        size: Size of the documents.
        on_progress: As for `pack`.

    Returns:
        The rows, memory-mapped.

    Raises:
        ValueError: As for `pack`.
        OSError: As for `pack`.
    """
    num_bytes_done = 0
    digest = json_digest(tokenizer.to_json())[:16]
    parts = folder.with_name(f".{folder.name}.{digest}.parts")
    try:
        with _atomic_folder(folder) as temporary:
            writer = RowWriter(temporary, tokenizer, row_length, keep_whole=size.has_instructions)
            with contextlib.closing(writer):
                for part in tokenize_documents(documents, tokenizer, parts):
                    writer.add(part)
                    num_bytes_done += int(part.num_bytes)
                    if on_progress is not None:
                        on_progress(num_bytes_done, size.num_bytes)
                digests = writer.finish()
            rows = _open_written(temporary, writer, digests, tokenizer, size, row_length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = (
            f"No space left in {folder.parent} after tokenizing {num_bytes_done:,} of "
            f"{size.num_bytes:,} bytes of text; free space and run the same command to continue"
        )
        raise OSError(error.errno, message) from error
    shutil.rmtree(parts, ignore_errors=True)
    if writer.num_truncated:
        warnings.warn(
            f"{writer.num_truncated} of {size.num_documents} instructions are longer than a row of "
            f"{row_length} tokens and are truncated.",
            stacklevel=3,
        )
    return rows


def open_packed(folder: str | Path, *, row_length: int | None = None) -> PackedRows:
    """Open a packed folder.

    Its metadata and the sizes of its files are checked at once, the tokens in blocks when they are
    first read, so that opening takes as long for any number of tokens.

    Args:
        folder: Subfolder with the files of the rows.
        row_length: Inputs of a row; None is that of the writer. Instructions have only that.

    Returns:
        The rows, memory-mapped. Reading a damaged block raises a ValueError; then the next `pack`
        packs the rows again.

    Raises:
        ValueError: The folder has no packed rows, or a checksum does not match.
    """
    folder = Path(folder)
    where = folder / METADATA
    try:
        metadata = read_json(where, "checksum", "content")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no packed rows: {METADATA} cannot be read.") from error
    checksum, content = metadata["checksum"], get_field(metadata, "content", dict, location=where)
    if json_digest(content) != checksum:
        raise ValueError(f"{folder} is damaged: {METADATA} does not match its checksum {checksum}.")
    if (version := get_field(content, "format", int, location=where)) != FORMAT_VERSION:
        raise ValueError(f"{folder} has format {version}; this version reads {FORMAT_VERSION}.")
    described, numbers = (
        get_field(content, name, dict, location=where) for name in ("files", "metadata")
    )
    for name in ("num_inputs", "row_length", "end_of_text", "num_documents", "num_bytes"):
        get_field(numbers, name, int, location=where)
    get_field(numbers, "num_targets", int, location=where)
    get_field(numbers, "tokenizer_digest", str, location=where)
    files: Any = {
        name: _open_file(folder, name, get_field(described, name, dict, location=where))
        for name in ("tokens", "starts", "document_bytes", *(described.keys() & {"loss_mask"}))
    }
    files |= {name: files[name].read() for name in ("starts", "document_bytes")}
    rows = PackedRows(**files, **numbers, digest=checksum)
    if row_length in (None, rows.row_length):
        return rows
    if rows.loss_mask is not None:
        raise ValueError(
            f"{folder} has instructions in rows of {rows.row_length} tokens; got {row_length}."
        )
    return replace(rows, row_length=row_length)


def _open_file(folder: Path, name: str, description: dict[str, Any]) -> CheckedFile:
    path, where = folder / f"{name}.bin", f"{folder / METADATA}: {name}"
    size = get_field(description, "size", int, location=where)
    dtype, sha256 = (
        get_field(description, key, str, location=where) for key in ("dtype", "sha256_of_digests")
    )
    actual_size = path.stat().st_size if path.is_file() else 0
    if actual_size != size:
        raise ValueError(f"{folder} is damaged: {path.name} has {actual_size} of {size} bytes.")
    digests = folder / f"{name}.digests"
    if not digests.is_file() or _file_digest(digests) != sha256:
        raise ValueError(f"{folder} is damaged: {digests.name} does not match its SHA-256.")

    return CheckedFile(path, dtype, digests.read_bytes(), partial(_forget, folder))


def _forget(folder: Path) -> None:
    """Let the next start pack the rows again."""
    with contextlib.suppress(OSError):
        (folder / METADATA).unlink()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _atomic_folder(final: Path) -> Iterator[Path]:
    """Temporary folder that is renamed to `final` on success and deleted on failure."""
    with temporary_folder(final) as temporary:
        yield temporary
        _move_into_place(temporary, final)
        (final / LOCK).unlink(missing_ok=True)


def _move_into_place(temporary: Path, final: Path) -> None:
    # A damaged one is moved aside, never emptied in place: by then it may be another's whole one.
    damaged_folder = final.with_name(f"{temporary.name}.damaged")
    try:
        if final.exists() and not _is_intact(final):
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, damaged_folder)
        os.rename(temporary, final)
    except OSError:
        # If it is there now, another process was faster, with the same content.
        if not final.exists():
            raise
    finally:
        shutil.rmtree(damaged_folder, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    try:
        open_packed(folder).check()
    except (OSError, ValueError):
        return False
    return True


def _open_written(
    folder: Path,
    writer: RowWriter,
    digests: dict[str, bytes],
    tokenizer: Tokenizer,
    size: CorpusSize,
    row_length: int,
) -> PackedRows:
    """Complete a folder of rows by its metadata, and open it; error if no answer fits in a row."""
    if size.has_instructions and not writer.num_bytes:
        raise NoTextError(
            f"The prompts of {size.num_documents} instructions fill rows of {row_length} "
            "tokens without an answer; use longer rows."
            if writer.num_truncated
            else f"The answers of {size.num_documents} instructions are empty."
        )
    files = {}
    for name, dtype in writer.dtypes.items():
        path = folder / f"{name}.digests"
        path.write_bytes(digests[name])
        size_in_bytes = (folder / f"{name}.bin").stat().st_size
        files[name] = {
            "size": size_in_bytes,
            "dtype": dtype.str,
            "sha256_of_digests": _file_digest(path),
        }
    names = "num_inputs", "num_documents", "num_bytes", "num_targets"
    metadata = {name: getattr(writer, name) for name in names} | {
        "row_length": row_length,
        "end_of_text": tokenizer.end_of_text,
        "bos_token_id": bos_token_id(tokenizer),
        "tokenizer_digest": json_digest(tokenizer.to_json()),
    }
    _write_metadata(folder, {"format": FORMAT_VERSION, "files": files, "metadata": metadata})
    # Opened before it is renamed, as another process may replace the final folder.
    return open_packed(folder)


def _write_metadata(folder: Path, content: dict[str, Any]) -> None:
    """Write metadata.json with its checksum."""
    file_content = {"checksum": json_digest(content), "content": content}
    (folder / METADATA).write_text(json.dumps(file_content, indent=1))
