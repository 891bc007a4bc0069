"""Shards of a corpus: the documents or the tokens of some files, and how they are split."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.data.chat_templates import ChatTemplate
from jaxformer.data.corpus import AnyDocument, CorpusSize, Document, Documents, documents
from jaxformer.data.instructions import Instructions
from jaxformer.data.packing import FORMAT_VERSION, METADATA, open_packed, pack
from jaxformer.data.rows import PackedRows
from jaxformer.data.shard_files import LocalFiles, StoreFiles, raise_if_exiting
from jaxformer.data.splits import Split, split
from jaxformer.data.token_files import open_token_file
from jaxformer.data.tokenization import Progress
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.json_files import json_digest

PartName = Literal["train", "held_out"]
BYTES_PER_TOKEN = 4  # about; limits what is held out of tokens


class HoldOut(NamedTuple):
    """What to hold out: a fraction of the text, and at most so many bytes; None is no limit."""

    fraction: float
    max_bytes: int | None


@dataclass(kw_only=True, eq=False)
class Shard:
    """Files of a corpus that are read together.

    Attributes:
        source: The source.
        files: The files.
        folder: Folder of the rows.
        copies: Folder for copies of files that are read several times; None if they are read once.
        hold_out: What to hold out; None is nothing.
    """

    source: Any  # of the types that a subclass reads
    files: LocalFiles | StoreFiles
    folder: Path
    copies: Path | None = None
    hold_out: HoldOut | None = None

    @cached_property
    def key(self) -> str:
        """Digest of all that determines the text and what is held out."""
        options = {k: x for k, x in asdict(self.source).items() if k not in ("path", "suffixes")}
        content = [type(self.source).__name__, options, self._reader_key(), self.files.key]
        return json_digest([FORMAT_VERSION, *content, self.hold_out])

    def _reader_key(self) -> str | None:
        """Digest of what the files are read with."""
        raise NotImplementedError

    def documents(self, part: PartName | None) -> Documents:
        """The documents of a part, or all, which are read when they are iterated over."""
        raise NotImplementedError

    def pack(
        self, part: PartName | None, tokenizer: Tokenizer, row_length: int, on_progress: Progress
    ) -> list[PackedRows]:
        """Rows of a part, in order; None is all."""
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class TextShard(Shard):
    """Documents, split by a hash of their names; see `split`.

    Attributes:
        template: Chat template, for instructions.
    """

    template: ChatTemplate | None

    def _reader_key(self) -> str | None:
        return None if self.template is None else self.template.key

    def documents(self, part: PartName | None) -> Documents:
        """The documents of a part, or all, which are read when they are iterated over."""

        def read() -> Iterator[AnyDocument]:
            with self._open() as files:
                if part is not None:
                    yield from getattr(self.split, part)
                    return
                for document in documents(self.source, template=self.template, files=files):
                    raise_if_exiting()
                    yield document

        def size() -> CorpusSize:
            if part is None:  # about
                return CorpusSize(1, isinstance(self.source, Instructions), self.files.num_bytes)
            with self._open():
                return getattr(self.split, part).size()

        return Documents(read, size)

    def pack(
        self, part: PartName | None, tokenizer: Tokenizer, row_length: int, on_progress: Progress
    ) -> list[PackedRows]:
        """The rows of a part, or all; they are packed once."""
        options: Any = {"folder": self.folder, "key": f"{self.key} {part}"}
        options |= {"row_length": row_length, "on_progress": on_progress}
        return [pack(self.documents(part), tokenizer, **options)]

    @cached_property
    def split(self) -> Split:
        """Training and held-out documents; their text is read when they are iterated over."""
        assert self.hold_out is not None
        fraction, max_bytes = self.hold_out
        return split(self.documents(None), held_out=fraction, max_bytes=max_bytes)

    def _open(self) -> contextlib.AbstractContextManager[Mapping[str, Path]]:
        return self.files.open(self.copies or self.folder / "files", keep=self.copies is not None)


@dataclass(kw_only=True, eq=False)
class TokenShard(Shard):
    """Text that is already tokenized; the last documents are held out.

    Attributes:
        tokenizer: The tokenizer of the text.
    """

    tokenizer: Tokenizer

    def _reader_key(self) -> str | None:
        return json_digest(self.tokenizer.to_json())

    def documents(self, part: PartName | None) -> Documents:
        """The documents of a part, or all, decoded."""

        def read() -> Iterator[AnyDocument]:
            parts = (ids for rows in self.split[part] for ids in rows.documents())
            for number, ids in enumerate(parts):
                yield Document(f"{part} {number}", self.tokenizer.decode(ids))

        return Documents(read)

    def pack(
        self, part: PartName | None, tokenizer: Tokenizer, row_length: int, on_progress: Progress
    ) -> list[PackedRows]:
        """The rows of a part, or all, in order."""
        return [replace(rows, row_length=row_length) for rows in self.split[part]]

    @cached_property
    def split(self) -> dict[PartName | None, list[PackedRows]]:
        """All rows, and the rows of both parts."""
        with self.files.open(self.folder / "tokens", keep=True) as files:
            parts = [*self._open_parts(files)]
        if self.hold_out is None:
            return {None: parts}
        total = sum(rows.num_inputs for rows in parts)
        remaining = round(self.hold_out.fraction * total)  # inputs to hold out
        if self.hold_out.max_bytes is not None:
            remaining = min(remaining, self.hold_out.max_bytes // BYTES_PER_TOKEN)
        train, held_out = list[PackedRows](), list[PackedRows]()
        for rows in reversed(parts):
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
                f"held_out={self.hold_out.fraction} of {total} tokens leaves none "
                f"{'for training' if held_out else 'held out'}; use more text or another held_out."
            )
        return {None: parts, "train": train, "held_out": held_out}

    def _open_parts(self, files: Mapping[str, Path]) -> Iterator[PackedRows]:
        """Open the parts that jaxformer wrote, or the files of another program."""
        digest = self._reader_key()
        written = [name for name, path in files.items() if path.name == METADATA]
        for name in written or [name for name in files if not name.endswith(".idx")]:
            path, version = files[name], self.files.versions[name]
            if written:
                rows = open_packed(path.parent)
            else:
                field = self.source.field
                rows = open_token_file(path, version, field, self.tokenizer, self.folder)
            if rows.tokenizer_digest != digest:
                raise ValueError(
                    f"{name.removesuffix(f'/{METADATA}')} was tokenized by another tokenizer; pass "
                    f"the one with which {self.source.path} was written, and no other part."
                )
            yield rows
