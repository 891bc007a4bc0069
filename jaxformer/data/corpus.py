"""Corpora: text files, JSON lines, Parquet, instructions, mixtures."""

import math
import platform
import sysconfig
from collections.abc import Callable, Iterator
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

# Tests are data and fragments; the packages installed beside the library are not part of it.
LIBRARY_EXCLUDES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class StandardLibrary:
    """The Python standard library of the running interpreter: about 12 MB, no download.

    Its ``.py`` files without tests, without what is installed beside them, and without the build's
    own record (``_sysconfigdata*``), which differs between machines. Licence: PSF-2.0.
    """

    def __str__(self) -> str:
        return f"Python {platform.python_version()} standard library (licence PSF-2.0)"


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """UTF-8 text from one file or a folder.

    A file of any name is one document, without a byte order mark. Of JSON lines each line that is
    not blank is one, by the names ``.jsonl``, ``.ndjson``, ``.jl`` and ``.json`` or, whatever the
    name, by a first line that has the field; of one JSON array each entry, of a table in Parquet or
    Arrow each row. What gzip or Zstandard packed is unpacked. A folder is read to any depth, files
    and folders whose names begin with a dot and links to folders left out; it may be one that the
    library datasets saved.

    Attributes:
        path: The file or the folder.
        suffixes: Which files of a folder are read, packed (``.gz``, ``.zst``) or not; those that
            end in ``.json`` only if they begin with a record that has the field.
        field: The key or column of the text in each line or row.
    """

    path: str
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", *RECORD_SUFFIXES)
    field: str = "text"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Instruction data; the loss is on the answers only.

    JSON lines, or rows of Parquet or Arrow, with a prompt and an answer, or with messages of roles
    system, user and assistant; tools beside messages are not read, and refused. A tokenizer that
    has a chat template writes both; without one, the answer stands behind the prompt, and an end of
    text behind that.

    Attributes:
        path: A file of records, as `TextFiles` knows them, or a folder of such.
        prompt: The key of the prompt.
        answer: The key of the answer.
        messages: The key of a conversation, where a line has one.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    messages: str = "messages"

    def __str__(self) -> str:
        return self.path


Source: TypeAlias = StandardLibrary | TextFiles | Instructions


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Several corpora, sampled by weight in every batch.

    Attributes:
        parts: The corpora.
        weights: How many rows are drawn of each, in proportion, however many it has; None is as
            many as it has.
    """

    parts: tuple[Source, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.parts:
            raise ValueError("A mixture has at least one part; got none.")
        if self.weights is not None and len(self.weights) != len(self.parts):
            raise ValueError(
                f"A mixture has a weight for each of its {len(self.parts)} parts; got "
                f"{len(self.weights)}."
            )
        if self.weights is not None and not all(0 < w < math.inf for w in self.weights):
            raise ValueError(f"Weights must be above 0; got {self.weights}. Leave out a part.")

    def __str__(self) -> str:
        return " and ".join(str(part) for part in self.parts)


Corpus: TypeAlias = Source | Mixture


class Document(NamedTuple):
    """One text with a name that is unique in its corpus."""

    name: str
    text: str


class Instruction(NamedTuple):
    """One instruction: a text of which only some spans have loss.

    Attributes:
        name: It is known by, unique within its corpus.
        text: All of it.
        spans: Its parts in order, and whether each counts; the last is empty, and stands for the
            end of text.
        prepend_end_of_text: Whether an end of text opens it; a chat template opens its own.
    """

    name: str
    text: str
    spans: Spans
    prepend_end_of_text: bool


AnyDocument: TypeAlias = Document | Instruction


class Documents:
    """A re-iterable stream of documents, read from disk on each pass."""

    def __init__(self, read: Callable[[], Iterator[AnyDocument]]):
        """Store the function that starts a pass."""
        self._read = read

    def __iter__(self) -> Iterator[AnyDocument]:
        return self._read()


def documents(corpus: Source, *, template: ChatTemplate | None = None) -> Documents:
    """Documents of a corpus, sorted by path.

    Texts are taken as they are, line ends included. Empty ones are left out. One document is in
    memory at a time, so a corpus may be larger than that; going through it raises what is said of
    its content below.

    Args:
        corpus: What to read.
        template: That of the tokenizer, which writes instructions.

    Returns:
        Its documents, or instructions. Names are paths relative to the folder, with ``/`` on every
        system; in a file of many ``:`` and the number of the line or row follow.

    Raises:
        ValueError: The path does not exist, no text is found, bytes are not UTF-8, or a line or
            row lacks the field.
        OSError: A file or folder cannot be read.
        ImportError: A file needs ``pyarrow``, which is not installed.
    """
    suffixes: tuple[str, ...]
    keys: tuple[str, ...] = ()
    match corpus:
        case StandardLibrary():
            source_path, suffixes = Path(sysconfig.get_path("stdlib")), (".py",)
            files = corpus_files(source_path, suffixes, keys, LIBRARY_EXCLUDES)
            # Not the build's own record.
            files = [file for file in files if not file.name.startswith("_sysconfigdata")]
        case TextFiles(path=path) | Instructions(path=path):
            source_path = Path(path)
            if isinstance(corpus, TextFiles):
                suffixes, keys = corpus.suffixes, (corpus.field,)
            else:
                suffixes, keys = RECORD_SUFFIXES, (corpus.prompt, corpus.answer, corpus.messages)
            files = corpus_files(source_path, suffixes, keys)
    if not files:
        raise ValueError(
            f"{source_path} has no text: no file in it, at any depth, ends in "
            f"{' or '.join(suffixes)}."
        )
    root = source_path if source_path.is_dir() else source_path.parent

    def read() -> Iterator[AnyDocument]:
        num_documents = num_nonempty = 0
        for file in files:
            for document in _read_documents(
                file, file.relative_to(root).as_posix(), corpus, keys, template
            ):
                num_documents += 1
                if document.text:
                    num_nonempty += 1
                    yield document
        if not num_nonempty:
            raise ValueError(
                f"{source_path} has no text: {len(files)} files to read, {num_documents} "
                "documents, all empty."
            )

    return Documents(read)


def lines(path: str | Path, *, field: str) -> list[tuple[str, str]]:
    """The texts of a file, one a line, empty ones too.

    A line ends in a newline, and a carriage return before that belongs to its end; no other
    character ends one. What gzip or Zstandard packed is unpacked.

    Args:
        path: A file of text or of records, as `TextFiles` knows them.
        field: The key or column of the text where lines are JSON or rows.

    Returns:
        The texts, and what to call each in errors.

    Raises:
        ValueError: It is a folder, there is no line, bytes are not UTF-8, or a line or row lacks
            the field.
        ImportError: The file needs ``pyarrow``, which is not installed.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it.")
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
    path: Path, name: str, corpus: Source, keys: tuple[str, ...], template: ChatTemplate | None
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
        raise ValueError(f"{where} does not say {field}; it has {', '.join(record) or 'no keys'}.")
    text: Any = record[field]
    if text is None:
        raise ValueError(f"{where}: field {field!r} is null; leave it out.")
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not text.")
    return text
