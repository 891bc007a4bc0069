"""Train / held-out split of documents, and the gzip baseline."""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxformer.checks import require
from jaxformer.data.corpus import AnyDocument, CorpusSize, Document, Documents, corpus_size
from jaxformer.data.instructions import Instruction


class Split(NamedTuple):
    """Training documents and held-out documents."""

    train: Documents
    held_out: Documents


def split(
    documents: Iterable[AnyDocument], *, held_out: float = 0.05, max_bytes: int | None = None
) -> Split:
    """Split documents into a training and a held-out part.

    In the order of a hash of their names, documents are held out until their bytes reach the
    fraction. The last of these is split, and its end held out, so that the fraction is exact up to
    one character; an instruction is not split but held out. The order of the documents does not
    matter, and a larger fraction holds out the same text and more.

    Args:
        documents: Documents with unique names. They are read once here, and again by each iteration
            over a part.
        held_out: Fraction of the bytes of their text, in UTF-8, to hold out; between 0 and 1.
        max_bytes: Maximum number of bytes to hold out; None is no limit.

    Returns:
        Both parts, in the order of the documents. The halves of a split document are called
        ``name[:n]`` and ``name[n:]``, where n is a number of characters.

    Raises:
        ValueError: The fraction is out of range, two documents have the same name, or a part would
            be empty.
    """
    require(0 < held_out < 1, f"held_out must lie between 0 and 1; got {held_out}.")
    held_out_bytes, *sizes = _plan(documents, held_out, max_bytes)

    def part(which: int) -> Iterator[AnyDocument]:
        for document, end in zip(documents, held_out_bytes.tolist(), strict=True):
            half = _split_document(document, num_held_out_bytes=end)[which]
            if half.text:
                yield half

    return Split(*(Documents(partial(part, i), partial(sizes.__getitem__, i)) for i in (0, 1)))


def _plan(
    documents: Iterable[AnyDocument], held_out: float, max_bytes: int | None
) -> tuple[np.ndarray, CorpusSize, CorpusSize]:
    """Bytes at the end of each document that are held out, and the sizes of both parts."""
    # Only hashes and sizes are stored, 24 bytes per document.
    digests, byte_counts, has_instructions = bytearray(), array("q"), False
    for document in documents:
        digests += _split_key(document.name)
        byte_counts.append(len(document.text.encode()))
        has_instructions = isinstance(document, Instruction)
    sizes = np.array(byte_counts)
    keys = np.frombuffer(bytes(digests), ">u8").reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    is_duplicate = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    if is_duplicate.any():
        raise ValueError(
            f"{len(sizes)} documents have {len(sizes) - is_duplicate.sum()} distinct names; give "
            "each document a unique name."
        )
    total, held_out_bytes = int(sizes.sum()), np.empty_like(sizes)
    bytes_before = np.cumsum(sizes[order]) - sizes[order]
    wanted = min(round(held_out * total), total if max_bytes is None else max_bytes)
    held_out_bytes[order] = np.clip(wanted - bytes_before, 0, sizes[order])
    if has_instructions:  # none is split
        held_out_bytes = np.where(held_out_bytes > 0, sizes, 0)
    if 0 < total - held_out_bytes.sum() < 4:  # it may be within one character
        for i, document in enumerate(documents):
            half = _split_document(document, num_held_out_bytes=int(held_out_bytes[i]))[1]
            held_out_bytes[i] = len(half.text.encode())
    train, end = (
        CorpusSize(int(np.count_nonzero(x)), has_instructions, int(x.sum()))
        for x in (sizes - held_out_bytes, held_out_bytes)
    )
    if not train.num_bytes or not end.num_bytes:
        raise ValueError(
            f"held_out={held_out} of {len(sizes)} documents with {total} bytes leaves "
            f"{train.num_bytes} bytes for training and {end.num_bytes} held out; use more text or "
            "another held_out."
        )
    return held_out_bytes, train, end


def sample_texts(corpora: Sequence[Documents], num_bytes: int) -> Iterator[str]:
    """Yield the texts of several corpora; if they have more bytes, pieces from all of them.

    Texts are cut into pieces of at most `num_bytes` / 2000 characters; a hash of name and place
    decides which are in the sample, so it is the same on every machine.

    Args:
        corpora: The corpora.
        num_bytes: Maximum number of bytes, in UTF-8.

    Yields:
        Texts, or pieces of them, in the order of the corpora.
    """
    total, remaining = sum(corpus_size(documents).num_bytes for documents in corpora), num_bytes
    width, share = total, 1.0
    if total > num_bytes:
        # So many pieces that their sum hardly ever exceeds the maximum.
        width, share = max(1, num_bytes // 2000), 0.9 * num_bytes / total
    for document in chain.from_iterable(corpora):
        for start in range(0, len(document.text), width):
            digest = hashlib.sha256(f"{document.name} {start}".encode()).digest()
            if int.from_bytes(digest[:7]) < share * 2**56:
                piece = document.text[start : start + width]
                remaining -= len(piece.encode())
                if remaining >= 0:
                    yield piece


def gzip_bits_per_byte(documents: Iterable[AnyDocument]) -> float:
    """Bits per byte of ``gzip -9``, the baseline for a language model.

    ``8 * len(gzip(text)) / len(text)`` of the concatenated texts, in UTF-8.

    Args:
        documents: At least one byte of text; for instructions pass their `loss_text`.

    Returns:
        Bits per byte.

    Raises:
        ValueError: There is no text.
    """
    compressor = zlib.compressobj(9, wbits=31)  # with gzip header
    size = compressed_size = 0
    for document in documents:
        data = document.text.encode()
        size += len(data)
        compressed_size += len(compressor.compress(data))
    require(size > 0, "The documents have no text to compress.")
    return 8 * (compressed_size + len(compressor.flush())) / size


def _split_key(name: str) -> bytes:
    """Hash of a name, by which documents are ordered for the split.

    Any hash gives an exact fraction; MD5 holds out many files of the standard library, while one
    file is 62% of what SHA-256 holds out.
    """
    return hashlib.md5(name.encode(), usedforsecurity=False).digest()


def _split_document(
    document: AnyDocument, *, num_held_out_bytes: int
) -> tuple[AnyDocument, AnyDocument]:
    """Split a document before its last bytes, at a character boundary."""
    name = document.name
    # An answer stays with its prompt.
    if not num_held_out_bytes or isinstance(document, Instruction):
        nothing = Document(name, "")
        return (nothing, document) if num_held_out_bytes else (document, nothing)
    data = document.text.encode()
    split_at = len(data) - num_held_out_bytes
    while split_at < len(data) and data[split_at] & 0xC0 == 0x80:  # inside a UTF-8 character
        split_at -= 1
    start, rest = data[:split_at].decode(), data[split_at:].decode()
    if not start or not rest:
        return Document(name, start), Document(name, rest)
    place = len(start)
    return Document(f"{name}[:{place}]", start), Document(f"{name}[{place}:]", rest)
