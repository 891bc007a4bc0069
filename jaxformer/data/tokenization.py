"""Tokenizes documents in parts that are cached on disk, so that an interrupted run continues."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt

from jaxformer.data.cached_files import cached_arrays
from jaxformer.data.chat_templates import ChatTemplate, Message, Spans
from jaxformer.data.corpus import AnyDocument, Document
from jaxformer.data.instructions import Instruction
from jaxformer.data.tokenizers import BPETokenizer, Tokenizer, special_ids

CHARACTERS_PER_PART = 1 << 22
PROGRESS_SECONDS = 10  # between progress lines
Progress: TypeAlias = Callable[[int, int], None] | None  # of the bytes so far and in total


class TokenizationProgress:
    """Prints the share, the rate and the time left every few seconds, and the end if it did."""

    def __init__(self) -> None:
        self._started_at = self._printed_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now, has_printed = time.monotonic(), self._printed_at > self._started_at
        if now - self._printed_at > PROGRESS_SECONDS or (has_printed and done >= total):
            self._printed_at = now
            rate = done / (now - self._started_at)
            print(
                f"  tokenized {done / total:.0%} of {total:,} bytes, {rate / 1e6:.1f} MB/s, "
                f"{(total - done) / rate / 60:.1f} min left",
                flush=True,
            )


class TokenizedPart(NamedTuple):
    """Tokens, loss mask and lengths of some documents.

    Attributes:
        tokens: Tokens of all documents, each followed by an end of text.
        loss_mask: Tokens with loss.
        sizes: Bytes of the text with loss of each token, 0 for special tokens. If a whole document
            has loss, its first token has all of its bytes.
        lengths: Number of tokens of each document, with its end of text.
        prepend_end_of_text: Whether an end of text precedes the document.
        num_bytes: Bytes of the text of all documents.
    """

    tokens: UInt[np.ndarray, " N"]
    loss_mask: Bool[np.ndarray, " N"]
    sizes: Int64[np.ndarray, " N"]
    lengths: Int64[np.ndarray, " D"]
    prepend_end_of_text: Bool[np.ndarray, " D"]
    num_bytes: int

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, bool]]:
        """Tokens, loss mask and sizes of each document; whether an end of text precedes it."""
        ends = np.cumsum(self.lengths)[:-1]
        arrays = (np.split(x, ends) for x in (self.tokens, self.loss_mask, self.sizes))
        return zip(*arrays, self.prepend_end_of_text.tolist(), strict=True)


def tokenize_documents(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, folder: Path
) -> Iterator[TokenizedPart]:
    """Tokenize documents, yielding cached parts.

    Args:
        documents: Any number of documents.
        tokenizer: Tokenizer.
        folder: Cache folder of the parts, only for these documents and this tokenizer.

    Yields:
        The parts in order, each of at least `CHARACTERS_PER_PART` characters except the last.

    Raises:
        ValueError: A document cannot be encoded; the message has its name.
        OSError: A part cannot be written.
    """
    for number, group in enumerate(_group_documents(documents)):
        # A text may have changed since the part was written.
        path = folder / f"{number}-{documents_digest(group)[:16]}.npz"
        make = partial(_tokenize_group, group, tokenizer)
        yield TokenizedPart(**cached_arrays(path, TokenizedPart._fields, make))


def documents_digest(documents: Iterable[AnyDocument]) -> str:
    """SHA-256 of all that determines the tokens of documents, in hexadecimal."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.text.encode()
        # The length distinguishes two documents from their concatenation.
        digest.update(f" {len(data)} ".encode() + data)
        if isinstance(document, Instruction):
            lengths = [(len(text), counts) for text, counts in document.spans]
            digest.update(json.dumps([document.prepend_end_of_text, *lengths]).encode())
    return digest.hexdigest()


def tokenize_document(document: AnyDocument, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of one document, with its closing end-of-text.

    Args:
        document: A document, all of which has loss, or an instruction.
        tokenizer: Tokenizer.

    Returns:
        Both, of the same length.

    Raises:
        ValueError: It cannot be encoded; the message has its name.
    """
    arrays = _tokenize_group([document], tokenizer)
    return arrays["tokens"].tolist(), arrays["loss_mask"].tolist()


def loss_text(document: AnyDocument, tokenizer: Tokenizer) -> str:
    """The text of the tokens with loss, without special tokens.

    Bits per byte use its bytes, so they do not depend on the spelling of special tokens.

    Args:
        document: A document, all of which has loss, or an instruction.
        tokenizer: Tokenizer.

    Returns:
        All of a document; the answers of an instruction.

    Raises:
        ValueError: It cannot be encoded; the message has its name.
    """
    if isinstance(document, Document):
        return document.text
    (tokens,) = _tokens([document], tokenizer)
    text, ends, sizes = document.text.encode(), np.cumsum(tokens.sizes), tokens.loss_bytes
    parts = (text[end - size : end] for end, size in zip(ends, sizes, strict=True))
    return b"".join(parts).decode(errors="replace")


def encode_chat(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> list[int]:
    """Encode a conversation, up to where the assistant's answer starts.

    Args:
        messages: Messages with ``role`` and ``content``.
        template: Chat template.
        tokenizer: Tokenizer.

    Returns:
        The tokens, with the special tokens of the template.

    Raises:
        ValueError: The template fails, or the text cannot be encoded.
    """
    text = template.render(messages, add_generation_prompt=True)
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encode_rendered_chat([text])[0].tolist()
    return tokenizer.encode(text).tolist()


def smallest_unsigned_dtype(count: int) -> np.dtype:
    """The smaller of uint16 and uint32 that can represent the numbers below ``count``."""
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)


def _group_documents(documents: Iterable[AnyDocument]) -> Iterator[list[AnyDocument]]:
    group, size = list[AnyDocument](), 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= CHARACTERS_PER_PART:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Tokens(NamedTuple):
    """Tokens of one document, without its end of text.

    Attributes:
        ids: The tokens.
        counts: Tokens with loss.
        special: Special tokens.
        sizes: Bytes of the text of each token.
    """

    ids: Int32[np.ndarray, " T"]
    counts: Bool[np.ndarray, " T"]
    special: Bool[np.ndarray, " T"]
    sizes: Int64[np.ndarray, " T"]

    @property
    def loss_bytes(self) -> Int64[np.ndarray, " T"]:
        """Bytes of the text with loss of each token."""
        return self.sizes * (self.counts & ~self.special)


def _tokenize_group(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields of `TokenizedPart`."""
    end, none = np.array([tokenizer.end_of_text]), np.zeros(1, np.int64)
    tokens, loss_masks, sizes = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    lengths = list[int]()
    for document, spans in zip(documents, _tokens(documents, tokenizer), strict=True):
        tokens += spans.ids, end
        loss_masks += spans.counts, np.array([_spans(document)[-1][1]])
        sizes += spans.loss_bytes, none
        lengths.append(len(spans.ids) + 1)
    return {
        "tokens": np.concatenate(tokens).astype(smallest_unsigned_dtype(tokenizer.vocab_size)),
        "loss_mask": np.concatenate(loss_masks),
        "sizes": np.concatenate(sizes),
        "lengths": np.array(lengths),
        "prepend_end_of_text": np.array([_starts_with_end_of_text(x) for x in documents]),
        "num_bytes": sum(len(document.text.encode()) for document in documents),
    }


def _tokens(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> list[_Tokens]:
    try:
        return _tokens_at_once(documents, tokenizer)
    except ValueError as error:
        if len(documents) == 1:
            raise ValueError(f"{documents[0].name}: {error}") from error
    return [_tokens([document], tokenizer)[0] for document in documents]


def _tokens_at_once(documents: Sequence[AnyDocument], tokenizer: Tokenizer) -> list[_Tokens]:
    pieces = [_spans(document)[:-1] for document in documents]
    texts = [document.text for document in documents]
    if not any(isinstance(document, Instruction) for document in documents):
        encoded = zip(texts, tokenizer.encode_batch(texts), strict=True)
        return [_all_counts(ids, len(text.encode())) for text, ids in encoded]
    special = list(special_ids(tokenizer))
    if isinstance(tokenizer, BPETokenizer):
        rendered = not all(map(_starts_with_end_of_text, documents))
        offsets = tokenizer.encode_offsets(texts, rendered=rendered)
        return [
            _Tokens(ids, _counts(spans, each), np.isin(ids, special), _sizes(text, spans))
            for text, (ids, spans), each in zip(texts, offsets, pieces, strict=True)
        ]
    # Byte and character tokens of the spans are those of the whole text.
    encodings = iter(tokenizer.encode_batch([text for each in pieces for text, _ in each]))
    parts = [[(next(encodings), text, counts) for text, counts in each] for each in pieces]
    return [
        _Tokens(
            ids := np.concatenate([ids for ids, _, _ in each]),
            np.concatenate([np.full(len(ids), counts) for ids, _, counts in each]),
            np.isin(ids, special),
            np.concatenate([_even_sizes(text, len(ids)) for ids, text, _ in each]),
        )
        for each in parts
    ]


def _all_counts(ids: Int32[np.ndarray, " T"], size: int) -> _Tokens:
    """Tokens of a document, which is never truncated; its first token has all of its bytes."""
    sizes = np.zeros(len(ids), np.int64)
    sizes[:1] = size
    return _Tokens(ids, np.ones(len(ids), bool), np.zeros(len(ids), bool), sizes)


def _sizes(text: str, offsets: Int32[np.ndarray, "T 2"]) -> Int64[np.ndarray, " T"]:
    """Bytes of a text that belong to each token, by its characters; their sum is exact.

    Characters between two tokens belong to the second, those after the last token to the last. The
    bytes of a character that several tokens share are divided evenly.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    before = np.concatenate([[0], np.cumsum(_character_sizes(text))])
    ends = np.maximum.accumulate(offsets[:, 1])
    ends[-1] = len(text)
    # Tokens that share one character, or several normalized to one, form a group.
    new = np.ones(len(offsets), bool)
    new[1:] = (offsets[1:] != offsets[:-1]).any(axis=1) | (offsets[1:, 0] >= offsets[1:, 1])
    groups, places = np.cumsum(new) - 1, np.flatnonzero(new)
    counts = np.diff(np.append(places, len(new)))
    totals = np.diff(before[ends[places + counts - 1]], prepend=0)
    place = np.arange(len(new)) - places[groups]
    shares = totals[groups] * np.stack([place, place + 1]) // counts[groups]
    return shares[1] - shares[0]


def _even_sizes(text: str, count: int) -> Int64[np.ndarray, " T"]:
    """Bytes of each token, if tokens are characters; else of equal tokens, such as bytes."""
    sizes = _character_sizes(text)
    if len(sizes) == count:
        return sizes
    return np.diff(sizes.sum() * np.arange(count + 1) // max(count, 1))


def _character_sizes(text: str) -> Int64[np.ndarray, " C"]:
    """Bytes of each character in UTF-8."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return 1 + np.sum([codes >= first for first in (0x80, 0x800, 0x10000)], axis=0)


def _starts_with_end_of_text(document: AnyDocument) -> bool:
    """Whether an end of text precedes a document; chat templates have a first token."""
    return not isinstance(document, Instruction) or document.prepend_end_of_text


def _counts(offsets: Int32[np.ndarray, "T 2"], pieces: Spans) -> Bool[np.ndarray, " T"]:
    """Tokens with loss: those with a character of a span with loss."""
    lengths = [len(text) for text, _ in pieces]
    counted = np.repeat([counts for _, counts in pieces], lengths)
    before = np.concatenate([[0], np.cumsum(counted)])  # characters with loss before each
    begin, end = offsets.T
    # If a tokenizer excludes spaces from offsets, a token of spaces has an empty range.
    begin = np.where(begin < end, begin, np.minimum(begin, np.append(0, end[:-1])))
    return before[end] > before[begin]


def _spans(document: AnyDocument) -> Spans:
    """(text, has loss) spans of a document; the last, empty one stands for the end of text."""
    if isinstance(document, Instruction):
        return document.spans
    return (document.text, True), ("", True)
