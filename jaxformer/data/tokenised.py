"""Documents to tokens, in parts that are written as they are made: what was ended goes on."""

import contextlib
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt

from jaxformer.data.chat_templates import ChatTemplate, Message, Pieces
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


def asked_tokens(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> list[int]:
    """The tokens of a conversation, up to where the assistant is to speak.

    Args:
        messages: Each with ``role`` and ``content``.
        template: What writes them.
        tokenizer: What encodes what is written.

    Returns:
        The tokens, special ones as the template spells them.

    Raises:
        ValueError: The template refuses the messages, or the text cannot be encoded.
    """
    text = template.render(messages, answering=True)
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encode_rendered([text])[0].tolist()
    return tokenizer.encode(text).tolist()


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
    try:
        encoded = _tokens(documents, tokenizer)
    except ValueError:
        for document in documents:
            try:
                _tokens([document], tokenizer)
            except ValueError as error:
                raise ValueError(f"{document.name}: {error}") from error
        raise
    end = np.array([tokenizer.end_of_text])
    tokens, counts, lengths = list[np.ndarray](), list[np.ndarray](), list[int]()
    for document, (ids, count) in zip(documents, encoded, strict=True):
        tokens += ids, end
        counts += count, np.array([_pieces(document)[-1][1]])
        lengths.append(len(ids) + 1)
    return Part(
        np.concatenate(tokens).astype(unsigned(tokenizer.vocab_size)),
        np.concatenate(counts),
        np.array(lengths),
        np.array([_opens(document) for document in documents]),
        sum(len(document.text.encode()) for document in documents),
    )


def _tokens(
    documents: Sequence[AnyDocument], tokenizer: Tokenizer
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens of each document and which of them count, without its end of text."""
    pieces = [_pieces(document)[:-1] for document in documents]
    texts = [document.text for document in documents]
    if not any(isinstance(document, Instruction) for document in documents):
        return [(ids, np.ones(len(ids), bool)) for ids in tokenizer.encode_batch(texts)]
    if isinstance(tokenizer, BPETokenizer):
        rendered = not all(map(_opens, documents))
        encoded = tokenizer.encode_offsets(texts, rendered=rendered)
        return [
            (ids, _counts(offsets, each))
            for (ids, offsets), each in zip(encoded, pieces, strict=True)
        ]
    # Bytes and characters are the same in parts as in the whole.
    found = iter(tokenizer.encode_batch([text for each in pieces for text, _ in each]))
    parts = [[(next(found), counts) for _, counts in each] for each in pieces]
    return [
        (
            np.concatenate([ids for ids, _ in each]),
            np.concatenate([np.full(len(ids), counts) for ids, counts in each]),
        )
        for each in parts
    ]


def _opens(document: AnyDocument) -> bool:
    """Whether the token that begins a text opens it; a chat template opens its own."""
    return not isinstance(document, Instruction) or document.opens


def _counts(offsets: Int32[np.ndarray, "T 2"], pieces: Pieces) -> Bool[np.ndarray, " T"]:
    """Which tokens of a text count: those with a character of a piece that does."""
    lengths = [len(text) for text, _ in pieces]
    counted = np.repeat([counts for _, counts in pieces], lengths)
    before = np.concatenate([[0], np.cumsum(counted)])  # each character, of those that count
    begin, end = offsets.T
    # Where a tokenizer leaves spaces out of its offsets, a token of spaces alone has no width.
    begin = np.where(begin < end, begin, np.minimum(begin, np.append(0, end[:-1])))
    return before[end] > before[begin]


def _pieces(document: AnyDocument) -> Pieces:
    """Its parts and whether each counts; the last is empty, and stands for the end of text."""
    if isinstance(document, Instruction):
        return document.pieces
    return (document.text, True), ("", True)
