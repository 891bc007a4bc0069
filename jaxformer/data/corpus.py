"""Corpora: text files, JSON lines, Parquet, instructions, mixtures."""

import math
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jaxformer.checks import check_fields
from jaxformer.data.chat_templates import ChatTemplate, Spans
from jaxformer.data.corpus_files import corpus_files
from jaxformer.data.instructions import TOOLS, instruction_spans
from jaxformer.data.records import (
    RECORD_SUFFIXES,
    Record,
    data_suffix,
    has_records,
    read_records,
    read_text,
)
from jaxformer.data.stores import is_store

# Tests are data and fragments; installed packages are not part of the library.
LIBRARY_EXCLUDES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class StandardLibrary:
    """The Python standard library of the running interpreter: about 12 MB, no download.

    All ``.py`` files except tests, installed packages and the build record ``_sysconfigdata*``,
    which differs between machines. Licence: PSF-2.0.
    """

    def __str__(self) -> str:
        return f"Python {platform.python_version()} standard library (licence PSF-2.0)"


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """UTF-8 text from one file or a folder.

    A text file is one document. In JSON Lines (suffix ``.jsonl``, ``.ndjson``, ``.jl`` or
    ``.json``, or a first line with the field) every line that is not blank is a document, in a JSON
    array every entry, in a Parquet or Arrow table every row. Files compressed by gzip or Zstandard
    are decompressed, byte order marks removed. A folder is read recursively, without hidden files
    and folders and links to folders; it may be a folder that the library datasets saved.

    An address of a store, such as ``hf://datasets/NAME/data/*.parquet``, ``gs://bucket/folder`` or
    ``s3://bucket/folder``, is read file by file, by `StreamedSource`.

    Attributes:
        path: File or folder, or the address of a file, a folder or a pattern in a store.
        suffixes: Suffixes of the files of a folder that are read, also with ``.gz`` or ``.zst``;
            ``.json`` files only if their first record has the field.
        field: Key or column of the text in each record.
    """

    path: str
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", *RECORD_SUFFIXES)
    field: str = "text"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Instruction data; the loss is on the answers only.

    JSON Lines, or rows of Parquet or Arrow, with a prompt and an answer, or with messages of roles
    system, user and assistant; a field of tools beside messages raises an error. Both are rendered
    with the tokenizer's chat template. Without one, the text is prompt, answer and end of text.

    Attributes:
        path: File of records, as in `TextFiles`, a folder of such files, or an address in a store.
        prompt: Key of the prompt.
        answer: Key of the answer.
        messages: Key of the conversation, in records that have one.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    messages: str = "messages"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A text that is already tokenized. The last documents are held out.

    A folder that ``python -m jaxformer.data`` wrote, with its tokenizer; or a file or folder of
    another program, whose tokenizer a run needs beside it: ``.bin`` shards of llm.c (with its
    header) and nanoGPT (uint16), ``.bin`` with ``.idx`` of Megatron-LM, ``.parquet`` with a column
    of ids. Documents end where the end of text stands.

    Attributes:
        path: File or folder.
        field: Column of the token ids in Parquet.
    """

    path: str
    field: str = "input_ids"

    def __str__(self) -> str:
        return self.path


TextSource: TypeAlias = StandardLibrary | TextFiles | Instructions
Source: TypeAlias = TextSource | Packed


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several corpora, sampled by weight in every batch.

    Attributes:
        parts: The corpora.
        weights: Relative number of rows drawn from each; None is its number of rows.
    """

    parts: tuple[Source, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.parts:
            raise ValueError("parts must have at least one corpus; got none.")
        if self.weights is not None and len(self.weights) != len(self.parts):
            raise ValueError(
                f"weights must have one number for each of the {len(self.parts)} parts; got "
                f"{len(self.weights)}."
            )
        if self.weights is not None and not all(0 < w < math.inf for w in self.weights):
            raise ValueError(
                f"weights must be positive and finite; got {self.weights}. To leave out a part, "
                "remove it."
            )

    def __str__(self) -> str:
        return " and ".join(str(part) for part in self.parts)


Corpus: TypeAlias = Source | Mixture


class NoTextError(ValueError):
    """All documents are empty, or no answer fits in a row."""


class Document(NamedTuple):
    """One text with a name that is unique in its corpus."""

    name: str
    text: str


class Instruction(NamedTuple):
    """One instruction: a text of which only some spans have loss.

    Attributes:
        name: Unique name in its corpus.
        text: The whole text.
        spans: (text, has loss) spans in order; the last one is empty and stands for the end of
            text.
        prepend_end_of_text: Whether an end of text precedes it; chat templates have a first token.
    """

    name: str
    text: str
    spans: Spans
    prepend_end_of_text: bool


AnyDocument: TypeAlias = Document | Instruction


class CorpusSize(NamedTuple):
    """Number of documents, whether they are instructions, and bytes of their text."""

    num_documents: int
    has_instructions: bool
    num_bytes: int

    def with_document(self, document: AnyDocument, num_bytes: int) -> "CorpusSize":
        """The size with one more document."""
        return CorpusSize(
            self.num_documents + 1, isinstance(document, Instruction), self.num_bytes + num_bytes
        )


EMPTY = CorpusSize(0, False, 0)


class Documents:
    """A re-iterable stream of documents, read from disk on each pass."""

    def __init__(
        self,
        read: Callable[[], Iterator[AnyDocument]],
        size: Callable[[], CorpusSize] | None = None,
    ):
        """Store the function that starts a pass, and one that returns the size."""
        self._read, self.size = read, size

    def __iter__(self) -> Iterator[AnyDocument]:
        return self._read()


def corpus_size(documents: Iterable[AnyDocument]) -> CorpusSize:
    """Size of a corpus; it is read for this, unless its documents know it."""
    if isinstance(documents, Documents) and documents.size is not None:
        return documents.size()
    size = EMPTY
    for document in documents:
        size = size.with_document(document, len(document.text.encode()))
    return size


class SourceFiles(NamedTuple):
    """Files of a source: by their path relative to the folder, with ``/`` on every system.

    Attributes:
        path: File or folder of the source.
        keys: Keys of a record.
        files: The files, sorted.
    """

    path: Path
    keys: tuple[str, ...]
    files: dict[str, Path]


def source_keys(source: TextFiles | Instructions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Suffixes of the files of a source, and the keys of its records.

    Raises:
        ValueError: The path is empty.
    """
    if not source.path:
        raise ValueError("The path of a corpus must name a file or folder; got ''.")
    if isinstance(source, TextFiles):
        return source.suffixes, (source.field,)
    return RECORD_SUFFIXES, (source.prompt, source.answer, source.messages)


def source_files(source: TextSource) -> SourceFiles:
    """List the files of a source.

    Raises:
        ValueError: The path does not exist, or it has no file with one of the suffixes.
        OSError: A folder cannot be read.
    """
    suffixes: tuple[str, ...]
    keys: tuple[str, ...] = ()
    match source:
        case StandardLibrary():
            path, suffixes = Path(sysconfig.get_path("stdlib")), (".py",)
            files = corpus_files(path, suffixes, keys, LIBRARY_EXCLUDES)
            # Not the build record.
            files = [file for file in files if not file.name.startswith("_sysconfigdata")]
        case TextFiles() | Instructions():
            suffixes, keys = source_keys(source)
            if is_store(source.path):
                raise ValueError(
                    f"{source.path} is an address in a store; pass it to "
                    "jaxformer.data.StreamedSource or experiments.pretrain, or copy its files."
                )
            path = Path(source.path)
            files = corpus_files(path, suffixes, keys)
    if not files:
        raise ValueError(
            f"{path} has no text: no file in it or its subfolders has the suffix "
            f"{' or '.join(suffixes)}."
        )
    root = path if path.is_dir() else path.parent
    return SourceFiles(path, keys, {file.relative_to(root).as_posix(): file for file in files})


def documents(
    corpus: TextSource, *, template: ChatTemplate | None = None, files: SourceFiles | None = None
) -> Documents:
    """Documents of a corpus, sorted by path.

    Texts are not changed, including line ends. Empty texts are left out. Only one document is in
    memory at a time; errors in the content are raised during iteration.

    Args:
        corpus: Corpus to read.
        template: Chat template of the tokenizer, for instructions.
        files: From `source_files`; None lists them.

    Returns:
        Documents or instructions. Their names are paths relative to the folder, with ``/`` on every
        system, followed by ``:`` and the line or row number in files of several documents.

    Raises:
        ValueError: The path does not exist, there is no text, bytes are not UTF-8, or a record
            lacks the field.
        OSError: A file or folder cannot be read.
        ImportError: A file needs ``pyarrow``, which is not installed.
    """
    path, keys, paths = files or source_files(corpus)

    def read() -> Iterator[AnyDocument]:
        num_documents = num_nonempty = 0
        for name, file in paths.items():
            for document in _read_documents(file, name, corpus, keys, template):
                num_documents += 1
                if document.text:
                    num_nonempty += 1
                    yield document
        if not num_nonempty:
            raise NoTextError(
                f"{path} has no text: all {num_documents} documents in {len(paths)} files are "
                "empty."
            )

    return Documents(read)


def lines(path: str | Path, *, field: str) -> list[tuple[str, str]]:
    """The texts of a file, one on each line, including empty ones.

    A line ends in LF or CR LF only. Files compressed by gzip or Zstandard are decompressed.

    Args:
        path: File of text or of records, as in `TextFiles`.
        field: Key or column of the text in records.

    Returns:
        (text, location) pairs; locations are for error messages.

    Raises:
        ValueError: It is a folder, has no lines, is not UTF-8, or a record lacks the field.
        ImportError: The file needs ``pyarrow``, which is not installed.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; pass a file in it.")
    if data_suffix(path) in RECORD_SUFFIXES or has_records(path, (field,)):
        records = read_records(path, (field,))
        pairs = [(_text_field(record, field, where=where), where) for _, record, where in records]
    else:
        *texts, last = read_text(path).split("\n")
        texts += [last] * bool(last)
        pairs = [(x.removesuffix("\r"), f"{path} line {i}") for i, x in enumerate(texts, start=1)]
    if not pairs:
        raise ValueError(f"{path} has no lines.")
    return pairs


def _read_documents(
    path: Path, name: str, corpus: TextSource, keys: tuple[str, ...], template: ChatTemplate | None
) -> Iterator[AnyDocument]:
    if isinstance(corpus, Instructions):
        for number, record, where in read_records(path, (*keys, TOOLS)):
            pieces = instruction_spans(
                {key: x for key, x in record.items() if x is not None},
                prompt=corpus.prompt,
                answer=corpus.answer,
                messages=corpus.messages,
                template=template,
                where=where,
            )
            text = "".join(piece for piece, _ in pieces)
            yield Instruction(
                f"{name}:{number}", text, pieces, prepend_end_of_text=template is None
            )
    elif keys and (data_suffix(path) in RECORD_SUFFIXES or has_records(path, keys)):
        for number, record, where in read_records(path, keys):
            yield Document(f"{name}:{number}", _text_field(record, *keys, where=where))
    else:
        yield Document(name, read_text(path))


def _text_field(record: Record, field: str, *, where: str) -> str:
    if field not in record:
        raise ValueError(
            f"{where} has no field {field!r}; it has {', '.join(record) or 'no fields'}."
        )
    text: Any = record[field]
    if text is None:
        raise ValueError(f"{where}: field {field!r} is null; remove the record.")
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} must be a string; got a {type(text).__name__}.")
    return text
