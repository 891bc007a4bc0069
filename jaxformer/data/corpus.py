"""Where text comes from, and which of it is held out."""

import gzip
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
    to folders left out.

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


Corpus: TypeAlias = StandardLibrary | TextFiles


class Document(NamedTuple):
    """One text and the name it is known by, unique within its corpus."""

    name: str
    text: str


class Split(NamedTuple):
    """Documents to learn from and documents never learned from."""

    train: list[Document]
    held_out: list[Document]


def documents(corpus: Corpus) -> list[Document]:
    """Read a corpus, in the order of names relative to its folder.

    Texts are taken as they are, line ends included. Empty ones are left out.

    Args:
        corpus: What to read.

    Returns:
        Its documents. Names are paths relative to the folder, with ``/`` on every system; in a
        ``.jsonl`` file ``:`` and the line number follow.

    Raises:
        ValueError: The path does not exist, no text is found, bytes are not UTF-8, or a line of
            JSON lacks the field.
        OSError: A file or folder cannot be read.
    """
    suffixes: tuple[str, ...] = (".py",)
    match corpus:
        case StandardLibrary():
            where = root = Path(sysconfig.get_path("stdlib"))
            files = _files(root, suffixes, leave_out=LIBRARY_EXCLUDES)
            files = [file for file in files if not file.name.startswith("_sysconfigdata")]
            read = [Document(file.relative_to(root).as_posix(), _text(file)) for file in files]
        case TextFiles(path=path, suffixes=suffixes, field=field):
            where = Path(path)
            if not where.exists():
                raise ValueError(f"{where} does not exist.")
            root = where if where.is_dir() else where.parent
            files = _files(where, suffixes) if where.is_dir() else [where]
            read = [document for file in files for document in _read(file, root=root, field=field)]
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


def split(documents: Sequence[Document], *, held_out: float = 0.05) -> Split:
    """Divide documents into those to train on and those to evaluate on.

    In the order of a digest of their names, documents are held out until the share of all bytes is
    reached. The one that crosses it is cut in two, and its end held out, so that the share is met
    to the byte, or to the character where that has several. A single document is cut likewise. The
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


def gzip_bits_per_byte(documents: Sequence[Document]) -> float:
    """Size under ``gzip -9`` in bits per byte: what a model of the text has to beat.

    ``8 * len(gzip(text)) / len(text)`` of all texts joined, in UTF-8.

    Args:
        documents: At least one byte of text.

    Returns:
        Bits per byte.

    Raises:
        ValueError: There is no text.
    """
    data = "".join(document.text for document in documents).encode()
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
        found += [path for path in paths if path.suffix in suffixes and path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _pass_on(error: OSError) -> None:
    """A folder that cannot be read is an error, not a smaller corpus."""
    raise error


def _read(path: Path, *, root: Path, field: str) -> Iterator[Document]:
    name = path.relative_to(root).as_posix()
    if path.suffix != ".jsonl":
        yield Document(name, _text(path))
        return
    # Not splitlines: U+2028 and its like may stand inside a JSON string.
    lines = _text(path).removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Document(f"{name}:{number}", _field(line, field, where=f"{path} line {number}"))


def _text(path: Path) -> str:
    data = path.read_bytes()
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


def _cut(document: Document, *, end: int) -> tuple[Document, Document]:
    """A document without its last ``end`` bytes, and those; no character is cut."""
    name, data = document.name, document.text.encode()
    at = len(data) - end
    while at < len(data) and data[at] & 0xC0 == 0x80:  # inside a character of UTF-8
        at -= 1
    start, rest = data[:at].decode(), data[at:].decode()
    if not start or not rest:
        return Document(name, start), Document(name, rest)
    place = len(start)
    return Document(f"{name}[:{place}]", start), Document(f"{name}[{place}:]", rest)
