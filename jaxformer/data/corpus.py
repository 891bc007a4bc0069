"""Corpora: text files, JSON lines, Parquet, instructions, mixtures."""

import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

from jaxformer.checks import NOT_EMPTY, AtPath, Checked, Must, require
from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus_files import corpus_files
from jaxformer.data.instructions import (
    TOOLS,
    Instruction,
    Instructions,
    is_instruction,
    make_instruction,
)
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

    suffixes: ClassVar = (".py",)
    keys: ClassVar = ()

    @property
    def path(self) -> str:
        """Folder of the library."""
        return sysconfig.get_path("stdlib")

    def __str__(self) -> str:
        return f"Python {platform.python_version()} standard library (licence PSF-2.0)"


@dataclass(frozen=True, kw_only=True)
class TextFiles(AtPath):
    """UTF-8 text from one file or a folder.

    A text file is one document. In JSON Lines (suffix ``.jsonl``, ``.ndjson``, ``.jl`` or
    ``.json``, or a first line with the field) every line that is not blank is a document, in a JSON
    array every entry, in a Parquet or Arrow table every row. Files compressed by gzip or Zstandard
    are decompressed, byte order marks removed. A folder is read recursively, without hidden files
    and folders and links to folders; it may be a folder that the library datasets saved.

    An address of a store, such as ``hf://datasets/NAME/data/*.parquet``, ``gs://bucket/folder`` or
    ``s3://bucket/folder``, is read file by file, by `Corpus`.

    Attributes:
        path: File or folder, or the address of a file, a folder or a pattern in a store.
        suffixes: Suffixes of the files of a folder that are read, also with ``.gz`` or ``.zst``;
            ``.json`` files only if their first record has the field.
        field: Key or column of the text in each record.
    """

    path: str
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", *RECORD_SUFFIXES)
    field: str = "text"

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a record."""
        return (self.field,)

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Packed(AtPath):
    """A text that is already tokenized. The last documents are held out.

    A folder that ``jaxformer data`` wrote, with its tokenizer; or a file or folder of
    another program, whose tokenizer a run needs beside it: ``.bin`` shards of llm.c (with its
    header) and nanoGPT (without), ``.bin`` with ``.idx`` of Megatron-LM, ``.parquet`` with a column
    of ids. Documents start at a bos token, else end at the end of text or by the index.

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


Weight: TypeAlias = Annotated[
    float, Must("be positive", lambda weight: weight > 0, "To leave out a part, remove it.")
]


@dataclass(frozen=True, kw_only=True)
class Mixture(Checked):
    """Several corpora, sampled by weight in every batch.

    Attributes:
        parts: The corpora.
        weights: Relative number of rows drawn from each; None is its number of rows.
    """

    parts: Annotated[tuple[Source, ...], NOT_EMPTY]
    weights: tuple[Weight, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None and len(self.weights) != len(self.parts):
            raise ValueError(
                f"weights must have one number for each of the {len(self.parts)} parts; got "
                f"{len(self.weights)}."
            )

    def __str__(self) -> str:
        return " and ".join(str(part) for part in self.parts)


CorpusConfig: TypeAlias = Source | Mixture


class NoTextError(ValueError):
    """All documents are empty, or no answer fits in a row."""


class Document(NamedTuple):
    """One text with a name that is unique in its corpus."""

    name: str
    text: str


AnyDocument: TypeAlias = Document | Instruction


class CorpusSize(NamedTuple):
    """Number of documents, whether they are instructions, and bytes of their text."""

    num_documents: int
    has_instructions: bool
    num_bytes: int


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
    num_documents, has_instructions, num_bytes = 0, False, 0
    for document in documents:
        num_documents, num_bytes = num_documents + 1, num_bytes + len(document.text.encode())
        has_instructions = isinstance(document, Instruction)
    return CorpusSize(num_documents, has_instructions, num_bytes)


def source_files(source: TextSource) -> dict[str, Path]:
    """List the files of a source.

    Returns:
        The files, sorted, by their path relative to the folder, with ``/`` on every system.

    Raises:
        ValueError: The path is empty or does not exist, or it has no file with one of the suffixes.
        OSError: A folder cannot be read.
    """
    require(source.path != "", "The path of a corpus must name a file or folder; got ''.")
    if is_store(source.path):
        raise ValueError(
            f"{source.path} is an address in a store; pass it to jaxformer.data.Corpus or "
            "jaxformer pretrain, or copy its files."
        )
    path, leave_out = Path(source.path), frozenset[str]()
    if isinstance(source, StandardLibrary):
        leave_out = LIBRARY_EXCLUDES
    files = corpus_files(path, source.suffixes, source.keys, leave_out)
    if isinstance(source, StandardLibrary):  # without the build record
        files = [file for file in files if not file.name.startswith("_sysconfigdata")]
    if not files:
        raise ValueError(
            f"{path} has no text: no file in it or its subfolders has the suffix "
            f"{' or '.join(source.suffixes)}."
        )
    root = path if path.is_dir() else path.parent
    return {file.relative_to(root).as_posix(): file for file in files}


def documents(
    corpus: TextSource,
    *,
    template: ChatTemplate | None = None,
    files: Mapping[str, Path] | None = None,
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
    paths = source_files(corpus) if files is None else files

    def read() -> Iterator[AnyDocument]:
        num_documents = num_nonempty = 0
        for name, file in paths.items():
            for document in _read_documents(file, name, corpus, template):
                num_documents += 1
                if document.text:
                    num_nonempty += 1
                    yield document
        if not num_nonempty:
            raise NoTextError(
                f"{corpus.path} has no text: all {num_documents} documents in {len(paths)} files "
                "are empty."
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
    require(not path.is_dir(), f"{path} is a folder; pass a file in it.")
    if _is_of_records(path, field):
        records = read_records(path, (field,))
        pairs = [(_text_field(record, field, where=where), where) for _, record, where in records]
    else:
        *texts, last = read_text(path).split("\n")
        texts += [last] * bool(last)
        pairs = [(x.removesuffix("\r"), f"{path} line {i}") for i, x in enumerate(texts, start=1)]
    require(len(pairs) > 0, f"{path} has no lines.")
    return pairs


def _read_documents(
    path: Path, name: str, corpus: TextSource, template: ChatTemplate | None
) -> Iterator[AnyDocument]:
    if isinstance(corpus, Instructions):
        for number, record, where in read_records(path, (*corpus.keys, TOOLS)):
            yield make_instruction(f"{name}:{number}", record, corpus, template, where=where)
    elif isinstance(corpus, TextFiles) and _is_of_records(path, corpus.field):
        for number, record, where in read_records(path, corpus.keys):
            yield Document(f"{name}:{number}", _text_field(record, corpus.field, where=where))
    else:
        yield Document(name, read_text(path))


def _is_of_records(path: Path, field: str) -> bool:
    return data_suffix(path) in RECORD_SUFFIXES or has_records(path, (field,))


def _text_field(record: Record, field: str, *, where: str) -> str:
    if field not in record:
        advice = ""
        if is_instruction(record):
            advice = " Prompts and answers are read by 'Instructions(path=...)' instead of a path."
        raise ValueError(
            f"{where} has no field {field!r}; it has {', '.join(record) or 'no fields'}.{advice}"
        )
    text: Any = record[field]
    if text is None:
        raise ValueError(f"{where}: field {field!r} is null; remove the record.")
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} must be a string; got a {type(text).__name__}.")
    return text
