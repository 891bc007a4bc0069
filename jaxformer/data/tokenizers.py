"""Tokenizers: UTF-8 bytes, characters, or byte-level BPE (Hugging Face ``tokenizers``)."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, SupportsIndex, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxformer.checks import AtPath, Checked, Must
from jaxformer.extras import import_extra

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"

# Pre-tokenization: a token never spans two matches. Matches are punctuation, a word with the one
# character before it, up to three digits, and a line end with the punctuation before it and the
# indentation after it. Bytes per token on the standard library (mean of four held-out twentieths)
# with vocabularies of 2048 and 4096: 3.22 and 3.70; without the punctuation before a line end
# 3.13 and 3.56; GPT-2's pattern 3.10 and 3.49; GPT-4's 3.04 and 3.46.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]+[ \t]*"
    r"|\s*[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]+|\s+"
)


@dataclass(frozen=True, kw_only=True)
class ByteLevel:
    """One token per byte of UTF-8; nothing to train, nothing to install."""


@dataclass(frozen=True, kw_only=True)
class BPE(Checked):
    """Byte-level byte pair encoding, trained on the corpus.

    Attributes:
        vocab_size: Maximum number of tokens, including 256 bytes and the end of text.
        sample_bytes: Maximum number of bytes of text that it is trained on; of a larger corpus, a
            sample from all of it.
    """

    vocab_size: Annotated[
        int, Must("be at least 257, for 256 bytes and the end of text", lambda size: size >= 257)
    ] = 2048
    sample_bytes: Annotated[int, Must("be positive", lambda count: count > 0)] = 200_000_000


@dataclass(frozen=True, kw_only=True)
class Characters:
    """One token per character of the corpus; other characters are errors."""


@dataclass(frozen=True, kw_only=True)
class PretrainedTokenizer(AtPath):
    """A tokenizer loaded from a file or folder.

    Attributes:
        path: Its ``tokenizer.json``, or the folder that has one; see `load_tokenizer`.
    """

    path: str


TokenizerConfig: TypeAlias = ByteLevel | BPE | Characters | PretrainedTokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """Protocol of tokenizers: text to integers below ``vocab_size`` and back.

    ``end_of_text`` is a token that no text encodes to, even one that contains its characters.
    Decoding leaves it out, and replaces invalid UTF-8 by U+FFFD. A tokenizer whose texts start with
    another token has a ``bos_token_id``; see `bos_token_id`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> Int32[np.ndarray, " T"]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str: ...

    def to_json(self) -> str: ...

    def save(self, folder: str | Path) -> None: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, then the end of text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Encode a text as its bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode bytes to text."""
        text_ids = [i for i in _check_ids(ids, self.vocab_size) if i != self.end_of_text]
        return bytes(text_ids).decode(errors="replace")

    def to_json(self) -> str:
        """JSON for `tokenizer_from_json`."""
        return json.dumps({"type": "ByteTokenizer"})

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` into a folder, for `load_tokenizer`."""
        _write_file(folder, "tokenizer.json", self.to_json())


class CharacterTokenizer:
    """The characters of an alphabet, then the end of text.

    Attributes:
        alphabet: The characters.
    """

    def __init__(self, alphabet: str):
        """Number the characters.

        Args:
            alphabet: Distinct characters, at least one.

        Raises:
            ValueError: The alphabet is empty or has a duplicate.
        """
        self._ids = {character: i for i, character in enumerate(alphabet)}
        if not alphabet or len(self._ids) != len(alphabet):
            raise ValueError(
                "alphabet must have at least one character and no duplicates; got "
                f"{len(alphabet)} characters, {len(self._ids)} of them distinct."
            )
        self.alphabet = alphabet
        self.end_of_text = len(alphabet)
        self.vocab_size = len(alphabet) + 1

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Look up each character."""
        try:
            return np.array([self._ids[character] for character in text], np.int32)
        except KeyError as error:
            character = error.args[0]
            position = text.index(character)
            line = text.count("\n", 0, position) + 1
            more = "..." if len(self.alphabet) > 20 else ""
            raise ValueError(
                f"Character {character!a} (U+{ord(character):04X}) at {position}, in line {line} "
                f"of the text, is not among the {len(self._ids)} of this tokenizer "
                f"({self.alphabet[:20]!r}{more}); ByteLevel and BPE encode every character."
            ) from None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Join characters."""
        text_ids = [i for i in _check_ids(ids, self.vocab_size) if i != self.end_of_text]
        return "".join(self.alphabet[i] for i in text_ids)

    def to_json(self) -> str:
        """JSON for `tokenizer_from_json`."""
        return json.dumps({"type": "CharacterTokenizer", "alphabet": self.alphabet})

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` into a folder, for `load_tokenizer`."""
        _write_file(folder, "tokenizer.json", self.to_json())


class BPETokenizer:
    """Wrapper of a Hugging Face tokenizer, with its end-of-text token.

    For a tokenizer of `train_bpe`, decoding restores every text; others may normalize texts.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        end_of_text: str = END_OF_TEXT,
        split_special_tokens: bool = True,
    ):
        """Wrap a backend; truncation, padding and added special tokens are turned off.

        Args:
            backend: Tokenizer of the library ``tokenizers``.
            end_of_text: Name of its end-of-text token.
            split_special_tokens: Whether special tokens in a prompt are encoded as characters, as
                they always are in documents.

        Raises:
            ValueError: The vocabulary has no such token.
        """
        backend.no_truncation()
        backend.no_padding()
        # A document that contains the characters of a special token must not be encoded to it.
        backend.encode_special_tokens = True
        self._split_special_tokens = split_special_tokens
        ids = backend.get_vocab(with_added_tokens=True)
        if end_of_text not in ids:
            raise ValueError(
                f"The end-of-text token {end_of_text!r} is not among the {len(ids)} tokens."
            )
        self._backend = backend
        self._end_name = end_of_text
        self.end_of_text: int = ids[end_of_text]
        with self._encoding(split_special_tokens=False):
            self.bos_token_id: int = backend.encode(end_of_text).ids[0]
        # Not the number of tokens: a vocabulary may have gaps.
        self.vocab_size: int = max(ids.values()) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The end of text and all special tokens, except the unknown token."""
        model = json.loads(self._backend.to_str())["model"]
        unknown = model.get("unk_id", self._backend.token_to_id(model.get("unk_token") or ""))
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        return frozenset(special - {unknown} | {self.end_of_text})

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Encode a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode many texts, on all cores."""
        with self._encoding(split_special_tokens=True):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_special_tokens(
        self, text: str, *, add_special_tokens: bool = True
    ) -> Int32[np.ndarray, " T"]:
        """Encode a prompt, as transformers does, but without a second bos token.

        Args:
            text: Prompt; its special tokens are encoded as such, unless ``split_special_tokens``.
            add_special_tokens: Whether to add the special tokens of the post-processor; first ones
                with which the text begins are not added again.
        """
        with self._encoding(split_special_tokens=self._split_special_tokens):
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids, added = np.array(encoding.ids, np.int32), np.array(encoding.special_tokens_mask, bool)
        num_first = int(np.append(added, False).argmin())
        repeated = np.array_equal(ids[:num_first], ids[~added][:num_first])
        return ids[num_first:] if repeated else ids

    def encode_rendered_chat(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode rendered chat templates, parsing special tokens in the text."""
        return [ids for ids, _ in self.encode_offsets(texts, rendered=True)]

    def encode_offsets(
        self, texts: Sequence[str], *, rendered: bool
    ) -> list[tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, "T 2"]]]:
        """Encode many texts on all cores, with the range of characters of each token.

        Args:
            texts: Whole texts.
            rendered: Whether they are rendered chat templates; else they are encoded as prompts.

        Returns:
            The tokens of each text, and start and end of each token in it.
        """
        with self._encoding(split_special_tokens=self._split_special_tokens and not rendered):
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2))
            for encoding in encodings
        ]

    @contextlib.contextmanager
    def _encoding(self, *, split_special_tokens: bool) -> Iterator[None]:
        self._backend.encode_special_tokens = split_special_tokens
        try:
            yield
        except Exception as error:
            if type(error) is not Exception:  # the type that the library raises
                raise
            raise ValueError(f"The text cannot be encoded: {error}.") from error
        finally:
            self._backend.encode_special_tokens = True

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decode ids to text, without special tokens."""
        return self._backend.decode(_check_ids(ids, self.vocab_size), skip_special_tokens=True)

    def to_json(self) -> str:
        """JSON for `tokenizer_from_json`."""
        backend = json.loads(self._backend.to_str())
        return json.dumps(
            {"type": "BPETokenizer", "end_of_text": self._end_name, "tokenizer": backend}
        )

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, for `load_tokenizer` and others."""
        _write_file(folder, "tokenizer.json", self._backend.to_str())
        settings = {
            "eos_token": self._end_name,
            "split_special_tokens": self._split_special_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        _write_file(folder, "tokenizer_config.json", json.dumps(settings))


def bos_token_id(tokenizer: Tokenizer) -> int:
    """The first token of a document.

    Args:
        tokenizer: Any tokenizer.

    Returns:
        Its ``bos_token_id`` if it has one, else its end of text.
    """
    return getattr(tokenizer, "bos_token_id", tokenizer.end_of_text)


def decode_continuation(
    tokenizer: Tokenizer, prompt: Sequence[SupportsIndex], new: Sequence[SupportsIndex]
) -> str:
    """Text that tokens add to their prompt; alone, they may lack their first space.

    Args:
        tokenizer: Any tokenizer.
        prompt: Tokens before them.
        new: The tokens.

    Returns:
        The text of all tokens, without the beginning that the prompt's text has.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole[len(commonprefix([before, whole])) :]


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens without text: the end of text and the special tokens, except the unknown token."""
    return getattr(tokenizer, "special_ids", frozenset([tokenizer.end_of_text]))


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> BPETokenizer:
    """Train byte-level byte pair encoding.

    Every text can be encoded, and decoding restores it. Training is deterministic.

    Args:
        texts: Training texts.
        vocab_size: Vocabulary size, at least 257; a small corpus gives fewer tokens.

    Returns:
        The tokenizer; token 0 is the end of text, followed by the bytes and the merged tokens in
        the order of their merges.

    Raises:
        ValueError: ``vocab_size`` is too small.
        ImportError: ``tokenizers`` is not installed.

    References:
        Sennrich, Haddow and Birch, Neural Machine Translation of Rare Words with Subword Units,
        2016, arXiv:1508.07909, section 3.2.
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.2
        (over bytes).
    """
    BPE(vocab_size=vocab_size)
    hf = import_extra("tokenizers")
    backend = hf.Tokenizer(hf.models.BPE())
    words = hf.pre_tokenizers.Split(hf.Regex(SPLIT_PATTERN), "isolated")
    to_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = hf.pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return BPETokenizer(backend)


def _check_ids(ids: Iterable[SupportsIndex], vocab_size: int) -> list[int]:
    checked = [index(i) for i in ids]
    if bad := [i for i in checked if not 0 <= i < vocab_size]:
        raise ValueError(f"Token ids must be between 0 and {vocab_size - 1}; got {bad[0]}.")
    return checked


def _write_file(folder: str | Path, name: str, text: str) -> None:
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror}.") from error
