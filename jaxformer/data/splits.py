"""Train / held-out split of documents, and the gzip baseline."""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxformer.data.corpus import AnyDocument, Document, Documents, Instruction


class Split(NamedTuple):
    """Training documents and held-out documents."""

    train: Documents
    held_out: Documents


def split(documents: Iterable[AnyDocument], *, held_out: float = 0.05) -> Split:
    """Split documents into a training and a held-out part.

    In the order of a digest of their names, documents are held out until the share of all bytes is
    reached. The one that crosses it is cut in two, and its end held out, so that the share is met
    to the byte, or to the character where that has several. A single document is cut likewise;
    instructions are not, and the one that crosses the share is held out. The
    order of the list does not matter, and a larger share holds out the same text and more.

    Args:
        documents: Their names are unique. They are gone through once here, and once whenever a
            part is.
        held_out: The share of the bytes of their text, in UTF-8, to hold out; between 0 and 1.

    Returns:
        Both parts, in the order given. The halves of a document that was cut are named by the
        characters they have: ``name[:n]`` and ``name[n:]``.

    Raises:
        ValueError: The share is out of range, two documents have one name, or a part would be
            empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1; got {held_out}.")
    # Digests and sizes alone are kept, 24 bytes a document.
    digests, byte_counts = bytearray(), array("q")
    for document in documents:
        digests += _split_key(document.name)
        byte_counts.append(len(document.text.encode()))
    sizes = np.array(byte_counts)
    keys = np.frombuffer(bytes(digests), ">u8").reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    is_duplicate = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    if is_duplicate.any():
        raise ValueError(
            f"{len(sizes)} documents have {len(sizes) - is_duplicate.sum()} names; a split needs "
            "one each."
        )
    # Of each document, the bytes at its end that are held out.
    total, held_out_bytes = int(sizes.sum()), np.empty_like(sizes)
    bytes_before = np.cumsum(sizes[order]) - sizes[order]
    held_out_bytes[order] = np.clip(round(held_out * total) - bytes_before, 0, sizes[order])

    def part(which: int) -> Iterator[AnyDocument]:
        for document, end in zip(documents, held_out_bytes.tolist(), strict=True):
            half = _split_document(document, num_held_out_bytes=end)[which]
            if half.text:
                yield half

    parts = Split(*(Documents(partial(part, which)) for which in (0, 1)))
    if any(next(iter(documents), None) is None for documents in parts):
        part_bytes = [sum(len(d.text.encode()) for d in part) for part in parts]
        raise ValueError(
            f"held_out={held_out} of {len(sizes)} documents, {total} bytes in all, leaves "
            f"{part_bytes[0]} bytes to train on and {part_bytes[1]} held out; give more text or "
            "another "
            "share."
        )
    return parts


def gzip_bits_per_byte(documents: Iterable[AnyDocument]) -> float:
    """Bits per byte of ``gzip -9``, the baseline for a language model.

    ``8 * len(gzip(text)) / len(text)`` of all texts joined, in UTF-8.

    Args:
        documents: At least one byte of text; see `loss_text` for what counts of instructions.

    Returns:
        Bits per byte.

    Raises:
        ValueError: There is no text.
    """
    compressor = zlib.compressobj(9, wbits=31)  # the form of gzip
    size = compressed_size = 0
    for document in documents:
        data = document.text.encode()
        size += len(data)
        compressed_size += len(compressor.compress(data))
    if not size:
        raise ValueError("The documents have 0 bytes of text; nothing to compress.")
    return 8 * (compressed_size + len(compressor.flush())) / size


def _split_key(name: str) -> bytes:
    """Digest of a name, by which documents are ordered for the split.

    Any digest would do for a share that is met exactly; what this one holds out of the standard
    library is spread over its files (with SHA-256, one file is 62% of it).
    """
    return hashlib.md5(name.encode(), usedforsecurity=False).digest()


def _split_document(
    document: AnyDocument, *, num_held_out_bytes: int
) -> tuple[AnyDocument, AnyDocument]:
    """Split a document before its last bytes, at a character boundary."""
    name = document.name
    if not num_held_out_bytes or isinstance(
        document, Instruction
    ):  # an answer stays with what was asked
        nothing = Document(name, "")
        return (nothing, document) if num_held_out_bytes else (document, nothing)
    data = document.text.encode()
    split_at = len(data) - num_held_out_bytes
    while split_at < len(data) and data[split_at] & 0xC0 == 0x80:  # inside a character of UTF-8
        split_at -= 1
    start, rest = data[:split_at].decode(), data[split_at:].decode()
    if not start or not rest:
        return Document(name, start), Document(name, rest)
    num_characters = len(start)
    return Document(f"{name}[:{num_characters}]", start), Document(
        f"{name}[{num_characters}:]", rest
    )
