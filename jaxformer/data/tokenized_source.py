"""Corpora that are already tokenized, by ``python -m jaxformer.data`` or another program."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxformer.data.cached_files import cached_json
from jaxformer.data.corpus import AnyDocument, Document, Documents, Packed
from jaxformer.data.corpus_cache import PartName
from jaxformer.data.dataset_splits import training_files
from jaxformer.data.file_digests import file_digests
from jaxformer.data.mixed_rows import AnyRows, ConcatenatedRows
from jaxformer.data.packing import open_packed
from jaxformer.data.rows import PackedRows
from jaxformer.data.token_files import (
    convert_parquet,
    describe_token_file,
    open_token_file,
    separate_documents,
)
from jaxformer.data.tokenization import Progress
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.json_files import json_digest

PART_NAME = re.compile(r"part-(\d+)-of-(\d+)")
TOKEN_SUFFIXES = (".bin", ".parquet")  # of other programs
BYTES_PER_TOKEN = 4  # about; limits what is held out


class TokenizedSource:
    """A source of a corpus that is already tokenized; like `CachedSource`.

    Attributes:
        source: The source.
        record: Digest of each part, by its name.
        key: Digest of all that determines the rows of both parts.
    """

    def __init__(
        self,
        source: Packed,
        tokenizer: Tokenizer,
        *,
        folder: Path,
        held_out: float = 0.05,
        max_bytes: int | None = None,
        recorded: Mapping[str, str] | None = None,
    ):
        """Open the parts; tokens of other programs are read once, for an index.

        Args:
            source: The source.
            tokenizer: The tokenizer of the text.
            folder: Folder of caches.
            held_out: Fraction of the tokens to hold out: the last ones.
            max_bytes: Maximum number of bytes to hold out, at about 4 a token; None is no limit.
            recorded: The `record` of an earlier start.

        Raises:
            ValueError: A part is missing, incomplete, damaged or of another tokenizer, or is not
                that of the run.
        """
        self.source, self._held_out, self._max_bytes = source, held_out, max_bytes
        self._tokenizer, self._folder = tokenizer, folder
        self._parts = open_parts(source, tokenizer, folder)
        self.record = {name: part.digest for name, part in self._parts.items()}
        if recorded is not None and self.record != recorded:
            raise ValueError(
                f"The tokens of {source.path} are not those of the run. Restore them, or start a "
                "new run."
            )
        self.key = json_digest([held_out, max_bytes, self.record])

    def pack(
        self, part: PartName, tokenizer: Tokenizer, *, row_length: int, on_progress: Progress = None
    ) -> AnyRows:
        """The rows of a part; see `AnySource`."""
        parts = [with_bytes(rows, self.bytes_per_token) for rows in self._split[part]]
        parts = [replace(rows, row_length=row_length) for rows in parts]
        return parts[0] if len(parts) == 1 else ConcatenatedRows(tuple(parts))

    def bytes_per_token(self) -> float:
        """Bytes per token of the held-out text, which is decoded once."""
        tokens = sum(rows.num_targets for rows in self._split["held_out"])
        sizes = (len(document.text.encode()) for document in self.lazy("held_out"))
        return cached_json(self._folder / "bytes_per_token", self.key, lambda: sum(sizes) / tokens)

    def lazy(self, part: PartName) -> Documents:
        """The documents of a part, decoded."""

        def read() -> Iterator[AnyDocument]:
            documents = (ids for rows in self._split[part] for ids in rows.documents())
            for number, ids in enumerate(documents):
                yield Document(f"{part} {number}", self._tokenizer.decode(ids))

        return Documents(read)

    @cached_property
    def _split(self) -> dict[PartName, list[PackedRows]]:
        total = sum(rows.num_inputs for rows in self._parts.values())
        remaining = round(self._held_out * total)  # inputs to hold out
        if self._max_bytes is not None:
            remaining = min(remaining, self._max_bytes // BYTES_PER_TOKEN)
        train, held_out = list[PackedRows](), list[PackedRows]()
        for rows in reversed(self._parts.values()):
            # The first document that starts among the last inputs, else a part of one.
            first = max(0, rows.num_inputs - max(0, remaining))
            later = rows.starts[np.searchsorted(rows.starts, first) :]
            first = min(int(later[0]) if len(later) else first, rows.num_inputs)
            if first > 0:
                train.insert(0, rows.part(0, first))
            if first < rows.num_inputs:
                held_out.insert(0, rows.part(first, rows.num_inputs - first))
            remaining -= rows.num_inputs
        if not train or not held_out:
            raise ValueError(
                f"held_out={self._held_out} of {total} tokens leaves none "
                f"{'for training' if held_out else 'held out'}; use more text or another held_out."
            )
        return {"train": train, "held_out": held_out}


def open_parts(source: Packed, tokenizer: Tokenizer, folder: Path) -> dict[str, PackedRows]:
    """Rows of each part by its name; tokens of other programs are read once, for an index.

    Args:
        source: The source.
        tokenizer: The tokenizer of the text.
        folder: Folder of caches.

    Returns:
        The rows. Bytes of the text of other programs' tokens are not known: 0.

    Raises:
        ValueError: A part is missing, incomplete, damaged or of another tokenizer.
    """
    path = Path(source.path)
    if files := token_files(path):
        parts = dict(_open_files(files, source, tokenizer, folder))
    else:
        parts = {path.name: open_packed(path) for path in part_folders(path)}
    digest = json_digest(tokenizer.to_json())
    for name, rows in parts.items():
        if rows.tokenizer_digest != digest:
            raise ValueError(
                f"{name} was tokenized by another tokenizer; pass the one with which {source.path} "
                "was written, and no other part."
            )
    return parts


def with_bytes(rows: PackedRows, bytes_per_token: Callable[[], float]) -> PackedRows:
    """Rows with an estimate of the bytes of their text, if these are not known."""
    if rows.num_bytes or not rows.num_targets:
        return rows
    return replace(rows, num_bytes=round(bytes_per_token() * rows.num_targets))


def token_files(path: Path) -> list[Path]:
    """Token files of another program: a file, or those of a folder; none if it has other files.

    Validation and test files of a folder are left out, see `training_files`.
    """
    if path.is_file():
        return [path]
    names = sorted(file.name for file in path.glob("*") if file.suffix in TOKEN_SUFFIXES)
    return [path / name for name in training_files(names, path, always=True)]


def _open_files(
    paths: list[Path], source: Packed, tokenizer: Tokenizer, folder: Path
) -> Iterator[tuple[str, PackedRows]]:
    record = folder / "files" / f"{json_digest(str(Path(source.path).resolve()))[:32]}.json"
    digests = file_digests({path.name: path for path in paths}, record)
    for path in paths:
        sha256 = digests[path.name]
        if path.suffix == ".parquet":
            identity = [sha256, source.field, tokenizer.end_of_text, tokenizer.vocab_size]
            target = folder / "token_files" / f"{json_digest(identity)[:32]}.bin"
            file = convert_parquet(path, source.field, tokenizer, target)
        else:
            file = describe_token_file(path, tokenizer.vocab_size)
            file, sha256 = separate_documents(file, sha256, tokenizer, folder)
        yield path.name, open_token_file(file, sha256, tokenizer, folder)


def part_folders(folder: Path) -> list[Path]:
    """Folders of the parts of a tokenized corpus, in order.

    Raises:
        ValueError: There is none, or one of them is missing.
    """
    names = [path.name for path in folder.glob("part-*") if PART_NAME.fullmatch(path.name)]
    if not names:
        raise ValueError(
            f"{folder} has no tokenized text; write it by python -m jaxformer.data CORPUS "
            f"--tokenizer TOKENIZER --output {folder}."
        )
    return [folder / name for name in sorted_parts(names, folder)]


def sorted_parts(names: Iterable[str], where: str | Path) -> list[str]:
    """Names of parts in order.

    Raises:
        ValueError: One is missing, or they are parts of several corpora.
    """
    names = set(names)
    counts = {int(name.rpartition("-")[2]) for name in names}
    if len(counts) > 1:
        raise ValueError(
            f"{where} has parts of {' and of '.join(map(str, sorted(counts)))}; remove one kind."
        )
    (count,) = counts
    expected = [part_name(number, count) for number in range(1, count + 1)]
    if missing := [name for name in expected if name not in names]:
        raise ValueError(f"{where} lacks {', '.join(missing[:8])}; tokenize them first.")
    return expected


def part_name(number: int, count: int) -> str:
    """Name of the folder of a part, counted from 1."""
    return f"part-{number}-of-{count}"
