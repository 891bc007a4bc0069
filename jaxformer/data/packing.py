"""Packs tokenized documents into rows, cached on disk and memory-mapped."""

import contextlib
import errno
import hashlib
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxformer.checks import require
from jaxformer.data.checked_files import CheckedFile, block_digests
from jaxformer.data.corpus import AnyDocument, CorpusSize, NoTextError, corpus_size
from jaxformer.data.row_writer import RowWriter
from jaxformer.data.rows import PackedRows
from jaxformer.data.temporary_folders import LOCK, temporary_folder
from jaxformer.data.tokenization import Progress, documents_digest, tokenize_documents
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.json_files import get_field, json_digest, read_json, write_json_with_checksum

# Incremented when the layout of rows or files changes, so that older caches are not used.
FORMAT_VERSION = 6
METADATA = "metadata.json"
COUNTS = ("num_inputs", "num_documents", "num_bytes", "num_targets")  # of a writer
NUMBERS = (*COUNTS, "row_length", "end_of_text", "bos_token_id")


def pack(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    *,
    row_length: int,
    folder: str | Path,
    key: str | None = None,
    on_progress: Progress = None,
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
    require(row_length >= 1, f"row_length must be at least 1; got {row_length}.")
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
    require(size.num_documents > 0, "There are no documents to pack.")
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
    on_progress: Progress = None,
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
        with temporary_folder(folder) as temporary:
            writer = RowWriter(temporary, tokenizer, row_length, keep_whole=size.has_instructions)
            with contextlib.closing(writer):
                for part in tokenize_documents(documents, tokenizer, parts):
                    writer.add(part)
                    num_bytes_done += int(part.num_bytes)
                    if on_progress is not None:
                        on_progress(num_bytes_done, size.num_bytes)
                writer.finish()
            if size.has_instructions and not writer.num_bytes:
                raise NoTextError(
                    f"The prompts of {size.num_documents} instructions fill rows of {row_length} "
                    "tokens without an answer; use longer rows."
                    if writer.num_truncated
                    else f"The answers of {size.num_documents} instructions are empty."
                )
            _write_metadata(temporary, writer, tokenizer, row_length)
            # Opened before it is renamed, as another process may replace the final folder.
            rows = open_packed(temporary)
            _move_into_place(temporary, folder)
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


def open_packed(folder: str | Path) -> PackedRows:
    """Open a packed folder.

    Its metadata and the sizes of its files are checked at once, the tokens in blocks when they are
    first read, so that opening takes as long for any number of tokens.

    Args:
        folder: Subfolder with the files of the rows.

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
    described, saved = (get_field(content, x, dict, location=where) for x in ("files", "metadata"))
    names = ("tokens", "starts", "document_bytes", *(described.keys() & {"loss_mask"}))
    files: Any = {name: _open_file(folder, name, described) for name in names}
    files |= {name: files[name].read() for name in ("starts", "document_bytes")}
    numbers: Any = {x: get_field(saved, x, int, location=where) for x in NUMBERS}
    tokenizer_digest = get_field(saved, "tokenizer_digest", str, location=where)
    return PackedRows(**files, **numbers, digest=checksum, tokenizer_digest=tokenizer_digest)


def _open_file(folder: Path, name: str, described: dict[str, Any]) -> CheckedFile:
    path, where = folder / f"{name}.bin", folder / METADATA
    description = get_field(described, name, dict, location=where)
    size = get_field(description, "size", int, location=where)
    dtype = get_field(description, "dtype", str, location=where)
    sha256 = get_field(description, "sha256_of_digests", str, location=where)
    actual_size = path.stat().st_size if path.is_file() else 0
    if actual_size != size:
        raise ValueError(f"{folder} is damaged: {path.name} has {actual_size} of {size} bytes.")
    file = path.with_suffix(".digests")
    digests = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(digests).hexdigest() != sha256:
        raise ValueError(f"{folder} is damaged: {file.name} does not match its SHA-256.")
    # Without the metadata, the next start packs the rows again.
    return CheckedFile(path, dtype, digests, removed_on_damage=folder / METADATA)


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
    (final / LOCK).unlink(missing_ok=True)


def _is_intact(folder: Path) -> bool:
    try:
        open_packed(folder).check()
    except (OSError, ValueError):
        return False
    return True


def _write_metadata(folder: Path, writer: RowWriter, tokenizer: Tokenizer, row_length: int) -> None:
    """Write the digests of the files, and metadata.json."""
    files = {}
    for name, dtype in writer.dtypes.items():
        path = folder / f"{name}.bin"
        digests = block_digests(path)
        path.with_suffix(".digests").write_bytes(digests)
        sha256 = hashlib.sha256(digests).hexdigest()
        size = path.stat().st_size
        files[name] = {"size": size, "dtype": dtype.str, "sha256_of_digests": sha256}
    metadata = {name: getattr(writer, name) for name in COUNTS} | {
        "row_length": row_length,
        "end_of_text": tokenizer.end_of_text,
        "bos_token_id": bos_token_id(tokenizer),
        "tokenizer_digest": json_digest(tokenizer.to_json()),
    }
    content = {"format": FORMAT_VERSION, "files": files, "metadata": metadata}
    write_json_with_checksum(folder / METADATA, content)
