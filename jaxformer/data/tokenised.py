"""Documents to tokens, in parts that are written as they are made: what was ended goes on."""

import contextlib
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt

from jaxformer.data.chat_templates import Pieces
from jaxformer.data.corpus import AnyDocument, Instruction
from jaxformer.data.tokenizers import BPETokenizer, Tokenizer

CHARACTERS_AT_ONCE = 1 << 22


class Part(NamedTuple):
    """Some documents in tokens.

    Attributes:
        tokens: Of all of them, each with the end of text that closes it.
        counts: Which of them count.
        lengths: How many each document has.
        opens: Whether an end of text opens it.
        num_bytes: Of their text.
    """

    tokens: UInt[np.ndarray, " N"]
    counts: Bool[np.ndarray, " N"]
    lengths: Int64[np.ndarray, " D"]
    opens: Bool[np.ndarray, " D"]
    num_bytes: int


def tokenised(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, folder: Path
) -> Iterator[Part]:
    """The tokens of documents, a part at a time.

    Args:
        documents: Any number.
        tokenizer: What encodes them, on as many cores as it can.
        folder: Of these documents and this tokenizer alone. Each part is written there, and read
            from there the next time.

    Yields:
        The parts, in order; the documents of each have `CHARACTERS_AT_ONCE` characters or, with
        the last of them, more.

    Raises:
        ValueError: A document cannot be encoded; says which.
        OSError: A part cannot be written.
    """
    for number, group in enumerate(_groups(documents)):
        path = folder / f"{number}.npz"
        try:
            with np.load(path) as saved:
                part = Part(**saved)
        except (OSError, ValueError, zipfile.BadZipFile):
            part = _encode(group, tokenizer)
            # Another process with the same documents may be done, and have removed the folder.
            with contextlib.suppress(FileNotFoundError):
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f".{number}.{secrets.token_hex(8)}.npz"
                np.savez(partial, **part._asdict())
                os.replace(partial, path)
        yield part


def tokens_of(document: AnyDocument, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of one document and the end of text that closes it, and which of them count.

    Args:
        document: A text, of which all counts, or an instruction.
        tokenizer: What encodes it.

    Returns:
        Both, of one length.

    Raises:
        ValueError: It cannot be encoded; says which.
    """
    part = _encode([document], tokenizer)
    return part.tokens.tolist(), part.counts.tolist()


def unsigned(count: int) -> np.dtype:
    """16 or 32 bits, whichever hold the numbers below ``count``."""
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)


def _groups(documents: Iterable[AnyDocument]) -> Iterator[list[AnyDocument]]:
    group, size = list[AnyDocument](), 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> Part:
    pieces = [_pieces(document) for document in documents]
    opens = [not isinstance(document, Instruction) or document.opens for document in documents]
    encode = tokenizer.encode_batch
    if not all(opens) and isinstance(tokenizer, BPETokenizer):
        encode = tokenizer.encode_rendered  # a template spells out special tokens
    try:
        found = iter(encode([text for each in pieces for text, _ in each]))
    except ValueError:
        for document, each in zip(documents, pieces, strict=True):
            try:
                encode([text for text, _ in each])
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise
    tokens, counts, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
    for each in pieces:
        *ids, _ = (next(found) for _ in each)
        ids.append(np.array([tokenizer.end_of_text]))
        tokens += ids
        counts += [np.full(len(i), count) for i, (_, count) in zip(ids, each, strict=True)]
        lengths.append(sum(map(len, ids)))
    return Part(
        np.concatenate(tokens).astype(unsigned(tokenizer.vocab_size)),
        np.concatenate(counts),
        np.array(lengths),
        np.array(opens),
        sum(len(document.text.encode()) for document in documents),
    )


def _pieces(document: AnyDocument) -> Pieces:
    """Its parts and whether each counts; the last is empty, and stands for the end of text."""
    if isinstance(document, Instruction):
        return document.pieces
    return (document.text, True), ("", True)
