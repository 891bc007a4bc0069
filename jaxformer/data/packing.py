"""Documents to packed rows, tokenised once and kept in memory-mapped files."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt

from jaxformer.data.corpus import AnyDocument, Instruction
from jaxformer.data.rows import PackedRows, pack_stream
from jaxformer.data.tokenizers import BPETokenizer, Tokenizer
from jaxformer.json_files import read_json

# Raised whenever the layout of rows or files changes, so that older caches are not found.
FORMAT = 2
METADATA = "metadata.json"
TOKENS_AT_ONCE = 1 << 20
TEXTS_AT_ONCE = 64


def pack(
    documents: Sequence[AnyDocument],
    tokenizer: Tokenizer,
    *,
    row_length: int,
    folder: str | Path,
) -> PackedRows:
    """Tokenise documents into rows, or open the rows if that was done before.

    The layout is that of `jaxformer.data.rows`. The files lie in a subfolder of ``folder`` whose
    name is a digest of the texts, the tokenizer, the row length and `FORMAT`. It appears there
    complete or not at all, also when several processes write it at once; one that was damaged
    since, in a single bit, is written anew, with a warning. While writing, the tokens of all
    documents are in memory.

    Args:
        documents: At least one; all of them instructions, or none.
        tokenizer: Its vocabulary decides between 16 and 32 bits per token.
        row_length: Inputs of a row.
        folder: Where caches are kept; made if it is not there.

    Returns:
        The rows, memory-mapped.

    Raises:
        ValueError: The row length is below 1, or there is nothing to pack.
        OSError: Writing failed. A full disk is reported with the folder and the bytes needed.
            Nothing partial is left.
    """
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1; got {row_length}.")
    if not documents:
        raise ValueError("There are 0 documents to pack.")
    final = Path(folder) / _digest(documents, tokenizer, row_length=row_length)
    if final.exists():
        try:
            return open_packed(final)
        except ValueError as error:
            warnings.warn(f"Packing again: {error}", stacklevel=2)
    counted = None
    if examples := [each for each in documents if isinstance(each, Instruction)]:
        stream, starts, counted = _stream_of_examples(examples, tokenizer, row_length)
    else:
        stream, starts = _stream(documents, tokenizer)
    metadata = {
        "end_of_text": tokenizer.end_of_text,
        "num_documents": len(documents),
        "num_bytes": sum(len(document.counted.encode()) for document in documents),
        "num_targets": len(stream) - 1 if counted is None else int(counted.sum()),
    }
    layout = _layout(len(stream), stream.dtype, row_length=row_length)
    if counted is not None:
        layout["counted"] = (np.dtype(bool), layout["segments"][1])
    try:
        with _appearing(final) as partial:
            _write(partial, stream, starts, counted, layout=layout, metadata=metadata)
            # Opened before it has its name: another process may replace what bears that.
            rows = open_packed(partial)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = sum(dtype.itemsize * rows * width for dtype, (rows, width) in layout.values())
        message = f"No space left in {folder}: the packed rows need {needed} bytes"
        raise OSError(error.errno, message) from error
    return rows


def open_packed(folder: str | Path) -> PackedRows:
    """Open the rows of one folder that `pack` wrote.

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
    try:
        saved = read_json(folder / METADATA, "checksum", "content")
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no packed rows: {METADATA} cannot be read.") from error
    checksum, content = saved["checksum"], saved["content"]
    if _checksum(content) != checksum:
        raise ValueError(f"{folder} is damaged: {METADATA} does not match its checksum {checksum}.")
    if content["format"] != FORMAT:
        raise ValueError(f"{folder} has format {content['format']}; this version reads {FORMAT}.")
    arrays = {}
    for name, written in content["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != written["size"]:
            raise ValueError(f"{folder} is damaged: {name} has {found} of {written['size']} bytes.")
        if _file_digest(path) != written["sha256"]:
            raise ValueError(f"{folder} is damaged: {name} does not match its SHA-256.")
        arrays[path.stem] = np.load(path, mmap_mode="r")
    return PackedRows(**arrays, **content["metadata"])


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(documents: Sequence[AnyDocument], tokenizer: Tokenizer, *, row_length: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {row_length} {tokenizer.to_json()}".encode())
    for document in documents:
        data = document.text.encode()
        # The length keeps two documents apart from one that joins them.
        digest.update(f" {len(data)} ".encode() + data)
        if isinstance(document, Instruction):
            said = [document.opens, *((len(text), counts) for text, counts in document.pieces)]
            digest.update(json.dumps(said).encode())
    return digest.hexdigest()[:32]


def _stream(
    documents: Sequence[AnyDocument], tokenizer: Tokenizer
) -> tuple[UInt[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """All tokens, and where documents begin; the last end of text begins none."""
    dtype = _unsigned(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype)
    parts, starts, place = [end], [], 0
    for first in range(0, len(documents), TEXTS_AT_ONCE):
        batch = documents[first : first + TEXTS_AT_ONCE]
        for tokens in _encode(batch, tokenizer):
            parts += [tokens.astype(dtype), end]
            starts.append(place)
            place += len(tokens) + 1
    opens = np.zeros(place + 1, bool)
    opens[starts] = True
    return np.concatenate(parts), opens


def _stream_of_examples(
    documents: Sequence[Instruction], tokenizer: Tokenizer, row_length: int
) -> tuple[UInt[np.ndarray, " N"], Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """All tokens, where documents begin, and which tokens count; no document crosses a row."""
    end, cut = tokenizer.end_of_text, 0
    stream, starts, counted = [end], [], [False]
    for document in documents:
        ids, counts = _encode_pieces(document, tokenizer)
        first = len(stream) - document.opens  # its first input
        room = row_length - document.opens
        if len(ids) > room:
            ids, counts, cut = ids[:room], [*counts[:room], False], cut + 1
        if first // row_length != (len(stream) + len(ids) - 1) // row_length:
            fill = -first % row_length
            stream += [end] * fill
            counted += [False] * fill
            first += fill
        starts.append(first)
        stream += [*ids, end]
        counted += counts
    if cut:
        warnings.warn(
            f"{cut} of {len(documents)} instructions are longer than a row of {row_length} "
            "tokens: what does not fit is left out.",
            stacklevel=3,
        )
    opens = np.zeros(len(stream), bool)
    opens[starts] = True
    return np.array(stream, _unsigned(tokenizer.vocab_size)), opens, np.array(counted)


def _encode_pieces(document: Instruction, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a document, and whether each counts, with one more for its end of text."""
    encode = tokenizer.encode
    if not document.opens and isinstance(tokenizer, BPETokenizer):
        encode = tokenizer.encode_rendered  # a template spells out special tokens
    *pieces, (_, ends) = document.pieces
    ids, counts = list[int](), list[bool]()
    for text, piece_counts in pieces:
        try:
            found = encode(text).tolist()
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from error
        ids += found
        counts += [piece_counts] * len(found)
    return ids, [*counts, ends]


def _encode(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The tokens of each; an error says in which document it arose."""
    try:
        return tokenizer.encode_batch([document.text for document in documents])
    except ValueError:
        for document in documents:
            try:
                tokenizer.encode(document.text)
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise


def _unsigned(count: int) -> np.dtype:
    """16 or 32 bits, whichever hold the numbers below ``count``."""
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)


def _layout(length: int, dtype: np.dtype, *, row_length: int) -> dict:
    """Type and shape of each array of a stream's rows."""
    rows = -(-(length - 1) // row_length)
    places = (_unsigned(row_length + 1), (rows, row_length))
    return {"tokens": (dtype, (rows, row_length + 1)), "segments": places, "positions": places}


@contextlib.contextmanager
def _appearing(final: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``final`` at the end, whole, or goes."""
    partial = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, final: Path) -> None:
    # A damaged one is moved aside, never emptied in place: by then it may be another's whole one.
    aside = final.with_name(f"{partial.name}.damaged")
    try:
        if final.exists() and not _is_whole(final):
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, aside)
        os.rename(partial, final)
    except OSError:
        # If it is there now, another process was faster, with the same content.
        if not final.exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        open_packed(folder)
    except (OSError, ValueError):
        return False
    return True


def _write(
    folder: Path,
    stream: UInt[np.ndarray, " N"],
    starts: Bool[np.ndarray, " N"],
    counted: Bool[np.ndarray, " N"] | None,
    *,
    layout: dict,
    metadata: dict[str, int],
) -> None:
    num_rows, row_length = layout["segments"][1]
    step = max(1, TOKENS_AT_ONCE // row_length)
    end_of_text = metadata["end_of_text"]
    with contextlib.ExitStack() as stack:
        # Not memory maps: on a full disk, writing to one ends the process by a signal.
        opened = {name: stack.enter_context(open(folder / f"{name}.npy", "wb")) for name in layout}
        for name, (dtype, shape) in layout.items():
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(opened[name], header)
        for row in range(0, num_rows, step):
            part = slice(row * row_length, (row + step) * row_length + 1)
            packed = pack_stream(
                stream[part], starts[part], row_length=row_length, end_of_text=end_of_text
            )
            arrays = packed._asdict()
            if counted is not None:
                of_targets = counted[row * row_length + 1 : (row + step) * row_length + 1]
                fill = packed.segments.size - len(of_targets)
                arrays["counted"] = np.pad(of_targets, (0, fill)).reshape(packed.segments.shape)
            for name, array in arrays.items():
                opened[name].write(np.ascontiguousarray(array, layout[name][0]).data)
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())
    paths = [folder / f"{name}.npy" for name in layout]
    files = {p.name: {"size": p.stat().st_size, "sha256": _file_digest(p)} for p in paths}
    content = {"format": FORMAT, "files": files, "metadata": metadata}
    saved = {"checksum": _checksum(content), "content": content}
    (folder / METADATA).write_text(json.dumps(saved, indent=1))


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
