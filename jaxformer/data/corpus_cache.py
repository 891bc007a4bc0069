"""Caches what is made of a corpus, by the digests of its files; see `CachedSource`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jaxformer.data.cached_files import cached_json
from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus import (
    AnyDocument,
    CorpusSize,
    Document,
    Documents,
    Source,
    TextSource,
    corpus_size,
    documents,
    source_files,
)
from jaxformer.data.file_digests import check_unchanged, file_digests, file_state
from jaxformer.data.mixed_rows import AnyRows
from jaxformer.data.packing import FORMAT_VERSION, pack
from jaxformer.data.rows import PackedRows
from jaxformer.data.splits import Split, gzip_bits_per_byte, sample_texts, split
from jaxformer.data.tokenization import Progress, loss_text
from jaxformer.data.tokenizer_loading import build_tokenizer, tokenizer_from_json
from jaxformer.data.tokenizers import BPE, Characters, Tokenizer, TokenizerConfig
from jaxformer.json_files import json_digest

PartName = Literal["train", "held_out"]


@runtime_checkable
class AnySource(Protocol):
    """Protocol of opened sources: `CachedSource`, `StreamedSource` and `TokenizedSource`."""

    @property
    def source(self) -> Source:
        """The source."""

    @property
    def record(self) -> Mapping[str, Any]:
        """What a run saves of it; the next start passes it as `recorded`."""

    @property
    def key(self) -> str:
        """Digest of all that determines the text of both parts."""

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part, read when they are iterated over."""

    def pack(
        self, part: PartName, tokenizer: Tokenizer, *, row_length: int, on_progress: Progress = None
    ) -> AnyRows:
        """The rows of a part.

        Args:
            part: The part.
            tokenizer: Tokenizer; of tokens, that of their text.
            row_length: Inputs of a row.
            on_progress: As in `pack`; not called for tokens, nor for a stream.

        Returns:
            The rows; of a store, a stream for training.

        Raises:
            ValueError: A text or a shard cannot be read, a text cannot be encoded, or a part has no
                document; for a stream when it is read.
        """


class SplitSource:
    """Documents that are split into training and held-out text; rows are cached by their key.

    Attributes:
        documents: All documents.
        key: Digest of all that determines the text of both parts.
    """

    def __init__(self, documents: Documents, key: str, *, folder: Path, share: dict[str, Any]):
        """Set up the split.

        Args:
            documents: All documents.
            key: Digest of all that determines the text of both parts.
            folder: Folder of caches.
            share: What to hold out, as in `split`.
        """
        self.documents, self.key, self._folder, self._share = documents, key, folder, share

    @cached_property
    def split(self) -> Split:
        """Training and held-out documents; their text is read when they are iterated over."""
        return split(self.documents, **self._share)

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part; see `AnySource`."""

        def read() -> Iterator[AnyDocument]:
            with self._checked():
                yield from getattr(self.split, part)

        def size() -> CorpusSize:
            with self._checked():
                return getattr(self.split, part).size()

        return Documents(read, size)

    def pack(
        self, part: PartName, tokenizer: Tokenizer, *, row_length: int, on_progress: Progress = None
    ) -> PackedRows:
        """Pack a part, or open its cached rows; see `AnySource`."""
        return pack(
            self.lazy(part),
            tokenizer,
            row_length=row_length,
            folder=self._folder,
            key=f"{self.key} {part}",
            on_progress=on_progress,
        )

    def _checked(self) -> contextlib.AbstractContextManager[None]:
        """Context in which documents are read."""
        return contextlib.nullcontext()


class CachedSource(SplitSource):
    """A source of a corpus whose split, tokenizer and packed rows are cached.

    They are found by the content of the files, which is read again only if the size or the time of
    a file has changed; so the next start reads no text. Reading documents raises a ValueError if a
    file has changed since its digest was computed.

    Attributes:
        source: The source.
        record: SHA-256 of each file, by its relative path.
        text_key: Digest of all that determines the documents, wherever the files are.
    """

    def __init__(
        self,
        source: TextSource,
        *,
        folder: Path,
        held_out: float = 0.05,
        max_bytes: int | None = None,
        template: ChatTemplate | None = None,
        recorded: Mapping[str, str] | None = None,
    ):
        """Digest the files that are new.

        Args:
            source: The source.
            folder: Folder of caches.
            held_out: Fraction of the text to hold out, as in `split`.
            max_bytes: Maximum number of bytes to hold out, as in `split`.
            template: Chat template, for instructions.
            recorded: The `record` of an earlier start.

        Raises:
            ValueError: The source has no file, or one has changed since the run began.
            OSError: A file cannot be read.
        """
        self.source, self._template = source, template
        self._files: dict[str, Path] | None = None
        self._states = dict[Path, list[int]]()
        try:
            self._files = source_files(source)
        except (ValueError, OSError):
            if recorded is None:
                raise
            self.record = dict(recorded)  # the text is gone, the rows may be cached
        else:
            self._states = {path: file_state(path) for path in self._files.values()}
            name = json_digest([str(Path(source.path).resolve()), asdict(source)])[:32]
            self.record = file_digests(self._files, folder / "files" / f"{name}.json")
            check_recorded(source.path, recorded, self.record)
        options = {k: x for k, x in asdict(source).items() if k not in ("path", "suffixes")}
        template_key = None if template is None else template.key
        kind, files_key = type(source).__name__, sorted(self.record.items())
        self.text_key = json_digest([FORMAT_VERSION, kind, options, template_key, files_key])
        share: dict[str, Any] = {"held_out": held_out, "max_bytes": max_bytes}
        key = json_digest([self.text_key, share])
        super().__init__(Documents(self._read), key, folder=folder, share=share)

    def _read(self) -> Iterator[AnyDocument]:
        with self._checked():
            yield from documents(self.source, template=self._template, files=self._files)

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Name a file that has changed, which may also be the reason of another error."""
        try:
            yield
        except ValueError:
            self._check_unchanged()
            raise
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        for path, state in self._states.items():
            check_unchanged(path, state)


def cached_tokenizer(
    config: TokenizerConfig,
    sources: Sequence[AnySource],
    folder: Path,
    *,
    on_train: Callable[[int], None] | None = None,
) -> Tokenizer:
    """Build the tokenizer of a configuration; one that is trained is cached.

    Args:
        config: Tokenizer configuration.
        sources: Sources of the training text.
        folder: Folder of caches.
        on_train: Called before it is trained, with the bytes of text that it is trained on.

    Returns:
        The tokenizer.
    """
    if not isinstance(config, BPE | Characters):
        return build_tokenizer(config, ())
    parts = [source.lazy("train") for source in sources]

    def train() -> str:
        num_bytes = sum(corpus_size(part).num_bytes for part in parts)
        texts: Iterable[str] = (document.text for document in chain.from_iterable(parts))
        if isinstance(config, BPE):
            num_bytes = min(num_bytes, config.sample_bytes)
            texts = sample_texts(parts, config.sample_bytes)
        if on_train is not None:
            on_train(num_bytes)
        return build_tokenizer(config, texts).to_json()

    key = [type(config).__name__, asdict(config), *(source.key for source in sources)]
    return tokenizer_from_json(cached_json(folder / "tokenizers", key, train))


def cached_gzip_bits_per_byte(
    sources: Sequence[AnySource], tokenizer: Tokenizer, folder: Path
) -> float:
    """Bits per byte of gzip on the held-out text with loss; see `gzip_bits_per_byte`.

    Args:
        sources: Sources of the text.
        tokenizer: Tokenizer, which decides what text of instructions has loss.
        folder: Folder of caches.

    Returns:
        Bits per byte.
    """
    held_out: Iterable[Any] = chain.from_iterable(source.lazy("held_out") for source in sources)
    key = [tokenizer.to_json(), *(source.key for source in sources)]
    texts = (Document(x.name, loss_text(x, tokenizer)) for x in held_out)
    return cached_json(folder / "gzip", key, lambda: gzip_bits_per_byte(texts))


def check_recorded(
    path: str | Path, recorded: Mapping[str, str] | None, files: Mapping[str, str]
) -> None:
    """Raise if the files of a text are not those of the run, naming the first that differ.

    Args:
        path: Path of the text, for the message.
        recorded: Digest of each file when the run began; None if it begins.
        files: Digest of each file.
    """
    if recorded is None or recorded == files:
        return
    words = {name: "is missing" for name in recorded.keys() - files.keys()}
    words |= {name: "is new" for name in files.keys() - recorded.keys()}
    both = recorded.keys() & files.keys()
    words |= {name: "has changed" for name in both if recorded[name] != files[name]}
    differences = ", ".join(f"{name} {word}" for name, word in sorted(words.items())[:3])
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    raise ValueError(
        f"The text of {path} is not that of the run: {differences}{more}. Restore it, or start a "
        "new run."
    )
