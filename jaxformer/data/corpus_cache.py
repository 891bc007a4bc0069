"""Caches what is made of a corpus, by the digests of its files; see `CachedSource`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus import (
    AnyDocument,
    CorpusSize,
    Document,
    Documents,
    Source,
    SourceFiles,
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
from jaxformer.data.tokenization import loss_text
from jaxformer.data.tokenizer_loading import build_tokenizer, tokenizer_from_json
from jaxformer.data.tokenizers import BPE, Characters, Tokenizer, TokenizerConfig
from jaxformer.json_files import json_digest, read_checked_json, write_checked_json

PartName = Literal["train", "held_out"]


@runtime_checkable
class AnySource(Protocol):
    """Protocol of opened sources: `CachedSource`, `StreamedSource` and `TokenizedSource`."""

    @property
    def source(self) -> Source:
        """The source."""
        ...

    @property
    def record(self) -> Mapping[str, Any]:
        """What a run saves of it; the next start passes it as `recorded`."""
        ...

    @property
    def key(self) -> str:
        """Digest of all that determines the text of both parts."""
        ...

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part, listed when they are first iterated over."""
        ...

    def pack(
        self,
        part: PartName,
        tokenizer: Tokenizer,
        *,
        row_length: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> AnyRows:
        """The rows of a part; see `pack`."""
        ...


class CachedSource:
    """A source of a corpus whose split, tokenizer and packed rows are cached.

    They are found by the content of the files, which is read again only if the size or the time of
    a file has changed; so the next start reads no text.

    Attributes:
        source: The source.
        record: SHA-256 of each file, by its relative path.
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
        self.source, self._folder = source, folder
        self._share: dict[str, Any] = {"held_out": held_out, "max_bytes": max_bytes}
        self._template, self._states = template, dict[Path, list[int]]()
        self._files: SourceFiles | None = None
        try:
            self._files = source_files(source)
        except (ValueError, OSError):
            if recorded is None:
                raise
            self.record = dict(recorded)  # the text is gone, the rows may be cached
            return
        path, _, files = self._files
        self._states = {path: file_state(path) for path in files.values()}
        name = json_digest([str(path.resolve()), asdict(source)])[:32]
        self.record = file_digests(files, folder / "files" / f"{name}.json")
        if recorded is not None and self.record != recorded:
            raise ValueError(
                f"The text of {path} is not that of the run: "
                f"{describe_differences(recorded, self.record)}. Restore it, or start a new run."
            )

    @cached_property
    def text_key(self) -> str:
        """Digest of all that determines the documents, wherever the files are."""
        options = {k: x for k, x in asdict(self.source).items() if k not in ("path", "suffixes")}
        template = None if self._template is None else self._template.key
        kind = type(self.source).__name__
        return json_digest([FORMAT_VERSION, kind, options, template, sorted(self.record.items())])

    @cached_property
    def key(self) -> str:
        """Digest of all that determines the text of both parts."""
        return json_digest([self.text_key, self._share])

    @cached_property
    def documents(self) -> Documents:
        """All documents, listed when they are first iterated over.

        Iterating raises a ValueError if a file has changed since its digest was computed.
        """
        return self._checked(
            lambda: documents(self.source, template=self._template, files=self._files)
        )

    @cached_property
    def split(self) -> Split:
        """Training and held-out documents; their text is read when they are iterated over."""
        return split(self.documents, **self._share)

    def pack(
        self,
        part: PartName,
        tokenizer: Tokenizer,
        *,
        row_length: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> PackedRows:
        """Pack a part, or open its cached rows; see `pack`."""
        return pack(
            self.lazy(part),
            tokenizer,
            row_length=row_length,
            folder=self._folder,
            key=f"{self.key} {part}",
            on_progress=on_progress,
        )

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part; see `documents`."""
        checked = self._checked(lambda: getattr(self.split, part))

        def size() -> CorpusSize:
            with self._explained_by_changes():
                return getattr(self.split, part).size()

        return Documents(checked.__iter__, size)

    def _checked(self, make: Callable[[], Documents]) -> Documents:
        def read() -> Iterator[AnyDocument]:
            with self._explained_by_changes():
                yield from make()
            self._check_unchanged()

        return Documents(read)

    @contextlib.contextmanager
    def _explained_by_changes(self) -> Iterator[None]:
        """Name a file that has changed, if that may be the reason of an error."""
        try:
            yield
        except ValueError:
            self._check_unchanged()
            raise

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
    parts = [source.lazy("train") for source in sources]
    if not isinstance(config, BPE | Characters):
        return build_tokenizer(config, ())

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
    saved = cached_json(folder / "tokenizers" / f"{json_digest(key)[:32]}.json", train)
    return tokenizer_from_json(saved)


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
    return cached_json(
        folder / "gzip" / f"{json_digest(key)[:32]}.json",
        lambda: gzip_bits_per_byte(Document(x.name, loss_text(x, tokenizer)) for x in held_out),
    )


def cached_json(path: Path, make: Callable[[], Any]) -> Any:
    """Content of a JSON file, made and written if it is missing or damaged."""
    content = read_checked_json(path)
    if content is None:
        content = make()
        write_checked_json(path, content)
    return content


def describe_differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The first files that differ, and how."""
    words = {name: "is missing" for name in old.keys() - new.keys()}
    words |= {name: "is new" for name in new.keys() - old.keys()}
    words |= {n: "has changed" for n in old.keys() & new.keys() if old[n] != new[n]}
    shown = [f"{name} {word}" for name, word in sorted(words.items())[:3]]
    return ", ".join(shown) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
