"""Where text comes from, and which of it is held out."""

import gzip
import hashlib
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jaxformer.data.instructions import ChatTemplate, Pieces, pieces_of
from jaxformer.json_files import parse_object

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

    A file of any name is one document; a ``.jsonl`` file has one document on each line that is not
    blank. A folder is read to any depth, files and folders whose names begin with a dot and links
    to folders left out. What ends in ``.gz`` besides is unpacked.

    Attributes:
        path: The file or the folder.
        suffixes: Which files of a folder are read.
        field: The key of the text in each line of a ``.jsonl`` file.
    """

    path: str
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".jsonl")
    field: str = "text"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Prompts and answers, of which the answers alone are learned.

    JSON lines with a prompt and an answer, or with messages of roles system, user and assistant. A
    tokenizer that has a chat template writes both; without one, the answer stands behind the
    prompt, and an end of text behind that.

    Attributes:
        path: A ``.jsonl`` file, which may be packed (``.jsonl.gz``), or a folder of them.
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


Corpus: TypeAlias = StandardLibrary | TextFiles | Instructions


class Document(NamedTuple):
    """One text and the name it is known by, unique within its corpus."""

    name: str
    text: str

    @property
    def counted(self) -> str:
        """What of it is to be learned: all."""
        return self.text


class Instruction(NamedTuple):
    """A text of which some is to be learned.

    Attributes:
        name: It is known by, unique within its corpus.
        text: All of it.
        pieces: Its parts in order, and whether each counts; the last is empty, and stands for the
            end of text.
        opens: Whether an end of text opens it; a chat template opens its own.
    """

    name: str
    text: str
    pieces: Pieces
    opens: bool

    @property
    def counted(self) -> str:
        """What of it is to be learned: the answers."""
        return "".join(text for text, counts in self.pieces if counts)


AnyDocument: TypeAlias = Document | Instruction


class Split(NamedTuple):
    """Documents to learn from and documents never learned from."""

    train: list[AnyDocument]
    held_out: list[AnyDocument]


def documents(corpus: Corpus, *, template: ChatTemplate | None = None) -> list[AnyDocument]:
    """Read a corpus, in the order of names relative to its folder.

    Texts are taken as they are, line ends included. Empty ones are left out.

    Args:
        corpus: What to read.
        template: That of the tokenizer, which writes instructions.

    Returns:
        Its documents, or instructions. Names are paths relative to the folder, with ``/`` on every
        system; in a ``.jsonl`` file ``:`` and the line number follow.

    Raises:
        ValueError: The path does not exist, no text is found, bytes are not UTF-8, or a line of
            JSON lacks the field.
        OSError: A file or folder cannot be read.
    """
    suffixes: tuple[str, ...] = (".py",)
    each: Iterable[Iterable[AnyDocument]]
    match corpus:
        case StandardLibrary():
            where = root = Path(sysconfig.get_path("stdlib"))
            files = _files(root, suffixes, leave_out=LIBRARY_EXCLUDES)
            files = [file for file in files if not file.name.startswith("_sysconfigdata")]
            each = [[Document(file.relative_to(root).as_posix(), _text(file))] for file in files]
        case TextFiles(path=path) | Instructions(path=path):
            where = Path(path)
            if not where.exists():
                raise ValueError(f"{where} does not exist.")
            suffixes = corpus.suffixes if isinstance(corpus, TextFiles) else (".jsonl",)
            root = where if where.is_dir() else where.parent
            files = _files(where, suffixes) if where.is_dir() else [where]
            names = [file.relative_to(root).as_posix() for file in files]
            if isinstance(corpus, TextFiles):
                each = (_read(f, n, corpus.field) for f, n in zip(files, names, strict=True))
            else:
                each = (
                    _examples(f, n, corpus, template) for f, n in zip(files, names, strict=True)
                )
    read = [document for found in each for document in found]
    kept = [document for document in read if document.text]
    if not files:
        raise ValueError(
            f"{where} has no text: no file in it, at any depth, ends in {' or '.join(suffixes)}."
        )
    if not kept:
        raise ValueError(
            f"{where} has no text: {len(files)} files to read, {len(read)} documents, all empty."
        )
    return kept


def split(documents: Sequence[AnyDocument], *, held_out: float = 0.05) -> Split:
    """Divide documents into those to train on and those to evaluate on.

    In the order of a digest of their names, documents are held out until the share of all bytes is
    reached. The one that crosses it is cut in two, and its end held out, so that the share is met
    to the byte, or to the character where that has several. A single document is cut likewise;
    instructions are not, and the one that crosses the share is held out. The
    order of the list does not matter, and a larger share holds out the same text and more.

    Args:
        documents: Their names are unique.
        held_out: The share of the bytes of their text, in UTF-8, to hold out; between 0 and 1.

    Returns:
        Both parts, in the order given. The halves of a document that was cut are named by the
        characters they have: ``name[:n]`` and ``name[n:]``.

    Raises:
        ValueError: The share is out of range, two documents have one name, or a part would be
            empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1; got {held_out}.")
    if len(names := {document.name for document in documents}) != len(documents):
        raise ValueError(
            f"{len(documents)} documents have {len(names)} names; a split needs one each."
        )
    sizes = {document.name: len(document.text.encode()) for document in documents}
    total = sum(sizes.values())
    # Of each document, the bytes at its end that are held out.
    ends, left = {}, round(held_out * total)
    for name in sorted(sizes, key=_place):
        ends[name] = min(left, sizes[name])
        left -= ends[name]
    parts = Split([], [])
    for document in documents:
        for part, half in zip(parts, _cut(document, end=ends[document.name]), strict=True):
            part += [half] if half.text else []
    if not parts.train or not parts.held_out:
        counts = [sum(len(d.text.encode()) for d in part) for part in parts]
        raise ValueError(
            f"held_out={held_out} of {len(documents)} documents, {total} bytes in all, leaves "
            f"{counts[0]} bytes to train on and {counts[1]} held out; give more text or another "
            "share."
        )
    return parts


def gzip_bits_per_byte(documents: Sequence[AnyDocument]) -> float:
    """Size under ``gzip -9`` in bits per byte: what a model of the text has to beat.

    ``8 * len(gzip(text)) / len(text)`` of all texts joined, in UTF-8.

    Args:
        documents: At least one byte of text.

    Returns:
        Bits per byte.

    Raises:
        ValueError: There is no text.
    """
    data = "".join(document.counted for document in documents).encode()
    if not data:
        raise ValueError(f"{len(documents)} documents have 0 bytes of text; nothing to compress.")
    return 8 * len(gzip.compress(data, 9, mtime=0)) / len(data)


def _files(
    root: Path, suffixes: tuple[str, ...], *, leave_out: frozenset[str] = frozenset()
) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root, onerror=_pass_on):
        folders[:] = [f for f in folders if f not in leave_out and not f.startswith(".")]
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if _suffix(path) in suffixes and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _pass_on(error: OSError) -> None:
    """A folder that cannot be read is an error, not a smaller corpus."""
    raise error


def _read(path: Path, name: str, field: str) -> Iterator[Document]:
    if _suffix(path) != ".jsonl":
        yield Document(name, _text(path))
        return
    for number, line in _lines(path):
        yield Document(f"{name}:{number}", _field(line, field, where=f"{path} line {number}"))


def _examples(
    path: Path, name: str, corpus: Instructions, template: ChatTemplate | None
) -> Iterator[Instruction]:
    for number, line in _lines(path):
        where = f"{path} line {number}"
        pieces = pieces_of(
            parse_object(line, where=where),
            prompt=corpus.prompt,
            answer=corpus.answer,
            messages=corpus.messages,
            template=template,
            where=where,
        )
        text = "".join(piece for piece, _ in pieces)
        yield Instruction(f"{name}:{number}", text, pieces, opens=template is None)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers."""
    # Not splitlines: U+2028 and its like may stand inside a JSON string.
    lines = _text(path).removeprefix("\ufeff").split("\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _suffix(path: Path) -> str:
    """What a file holds, packed or not."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _text(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}.") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} "
            f"of {len(data)}, in line {line}. Convert it (`iconv -f ENCODING -t UTF-8`) or leave "
            "it out."
        ) from error


def _field(line: str, field: str, *, where: str) -> str:
    text = parse_object(line, field, where=where)[field]
    if text is None:
        raise ValueError(f"{where}: field {field!r} is null; leave the line out.")
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: field {field!r} has half a surrogate pair, {text[error.start]!a}, "
            f"at character {error.start}."
        ) from error
    return text


def _place(name: str) -> tuple[bytes, str]:
    """Where a name stands in the order of holding out, the same in every process.

    Any digest would do for a share that is met exactly; what this one holds out of the standard
    library is spread over its files (with SHA-256, one file is 62% of it).
    """
    return hashlib.md5(name.encode(), usedforsecurity=False).digest(), name


def _cut(document: AnyDocument, *, end: int) -> tuple[AnyDocument, AnyDocument]:
    """A document without its last ``end`` bytes, and those; no character is cut."""
    name, data = document.name, document.text.encode()
    if isinstance(document, Instruction):  # what is answered stays with what was asked
        nothing = Document(name, "")
        return (nothing, document) if end else (document, nothing)
    at = len(data) - end
    while at < len(data) and data[at] & 0xC0 == 0x80:  # inside a character of UTF-8
        at -= 1
    start, rest = data[:at].decode(), data[at:].decode()
    if not start or not rest:
        return Document(name, start), Document(name, rest)
    place = len(start)
    return Document(f"{name}[:{place}]", start), Document(f"{name}[{place}:]", rest)
