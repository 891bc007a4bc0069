"""Reads text, JSON lines, Parquet and Arrow files, compressed or not.

Compression and tables are recognized by the first bytes of a file. JSON Lines are recognized by the
suffix in any case, or by a first line that has one of the keys.
"""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from jaxformer.extras import import_extra
from jaxformer.json_files import JSON_TYPE_NAMES, parse_json, parse_json_object

Record: TypeAlias = dict[str, Any]

# Suffixes of files with many records, and of compressed files.
TABLE_SUFFIXES = (".parquet", ".arrow")
RECORD_SUFFIXES = (".jsonl", ".ndjson", ".jl", ".json", *TABLE_SUFFIXES)
COMPRESSED_SUFFIXES = (".gz", ".zst")
SPREADSHEETS = (".csv", ".tsv")
ROWS_PER_BATCH = 1024
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def data_suffix(path: Path) -> str:
    """Suffix of a file in lower case, without that of a compression."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSED_SUFFIXES else name.suffix


def read_text(path: Path) -> str:
    """Text of a UTF-8 file with its line ends, without a byte order mark.

    Raises:
        ValueError: It is not UTF-8, has a zero byte, is a table of comma-separated values, or
            cannot be decompressed.
    """
    if data_suffix(path) in SPREADSHEETS:
        raise ValueError(
            f"{path} is a table; {' and '.join(SPREADSHEETS)} files are not supported. Convert it "
            "to JSON Lines or Parquet, or rename it to .txt to use it as plain text."
        )
    with _open_decompressed(path) as file:
        data = file.read()
    try:
        text, wrong = data.decode(), data.find(0)
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong < 0:
        return text.removeprefix("\ufeff")
    line = data.count(b"\n", 0, wrong) + 1
    encoding = "UTF-16" if data.startswith(UTF16) else "ENCODING"
    raise ValueError(
        f"{path} is not {'UTF-8' if data[wrong] else 'text'}: byte {data[wrong]:#04x} at offset "
        f"{wrong} of {len(data)}, in line {line}. Convert it (`iconv -f {encoding} -t UTF-8`) or "
        "leave it out."
    )


def read_records(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, Record, str]]:
    """Yield the records of a JSON-lines, Parquet or Arrow file.

    Args:
        path: A table, a JSON array of objects, or JSON Lines.
        keys: Columns to read of a table; all columns if it has none of these. Their texts are
            checked.

    Returns:
        An iterator of (number, record, location): the number of the line, row or object from 1, and
        the location for error messages.

    Raises:
        ValueError: The file cannot be decompressed or read, a line is not a JSON object, or a text
            has an unpaired surrogate.
        ImportError: ``pyarrow`` is needed and not installed.
    """
    for number, record, where in _records(path, keys):
        for key in keys:
            _check_text(record.get(key), f"{where}: field {key!r}")
        yield number, record, where


def has_records(path: Path, keys: Sequence[str]) -> bool:
    """Whether a file has records and the first one has one of the keys."""
    try:
        first = islice(_records(path, keys), 1)
        return any(key in record for _, record, _ in first for key in keys)
    except ValueError:
        return False


def _records(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, Record, str]]:
    with _open_decompressed(path) as file:
        head, number = file.peek(8), 0
        is_table = head.startswith((PARQUET, ARROW_FILE, ARROW_STREAM))
        if is_table or data_suffix(path) in TABLE_SUFFIXES:
            try:
                for number, record in enumerate(_table_rows(path, file, keys), start=1):
                    yield number, record, f"{path} row {number}"
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} row {number + 1} is not UTF-8: {error}.") from error
        elif head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, record in enumerate(parse_json(file.read(), location=path), start=1):
                where = f"{path} entry {number}"
                if not isinstance(record, dict):
                    raise ValueError(f"{where} is {JSON_TYPE_NAMES[type(record)]}, not an object.")
                yield number, record, where
        else:
            # Only \n ends a line: a JSON string may contain U+2028 and other line separators.
            for number, line in enumerate(file, start=1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    where = f"{path} line {number}"
                    yield number, parse_json_object(line, location=where), where


@contextlib.contextmanager
def _open_decompressed(path: Path) -> Iterator[io.BufferedReader]:
    with open(path, "rb") as file:
        magic = file.peek(4)
        if not magic.startswith((GZIP, ZSTD)):
            yield file
            return
        try:
            if magic.startswith(GZIP):
                opened: Any = gzip.open(file)
            else:
                opened = import_extra("pyarrow").input_stream(str(path), compression="zstd")
            with opened as raw, io.BufferedReader(raw, 1 << 20) as unpacked:
                yield unpacked
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}.") from error


def _table_rows(path: Path, file: io.BufferedReader, keys: Sequence[str]) -> Iterator[Record]:
    """The rows of a table, one batch in memory at a time; all rows of a compressed one."""
    arrow, head = import_extra("pyarrow"), file.peek(8)
    plain = isinstance(file.raw, io.FileIO)
    try:
        # Not memory-mapped, as its pages would count as memory of the process.
        with arrow.OSFile(str(path)) if plain else arrow.BufferReader(file.read()) as source:
            # The library datasets saves the stream format.
            if head.startswith(ARROW_FILE):
                table = arrow.ipc.open_file(source)
                batches = map(table.get_batch, range(table.num_record_batches))
            elif head.startswith(ARROW_STREAM) or data_suffix(path) == ".arrow":
                batches = arrow.ipc.open_stream(source)
            else:
                table = import_extra("pyarrow.parquet").ParquetFile(source, pre_buffer=False)
                columns = _columns_to_read(keys, table.schema_arrow.names)
                batches = table.iter_batches(ROWS_PER_BATCH, columns=columns)
            for batch in batches:
                wanted = batch.select(_columns_to_read(keys, batch.schema.names))
                try:
                    rows = wanted.to_pylist()
                except UnicodeDecodeError:  # one by one, so that the row can be named
                    rows = (wanted.slice(i, 1).to_pylist()[0] for i in range(len(wanted)))
                for row in rows:
                    yield {name: _without_nulls(value) for name, value in row.items()}
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error


def _columns_to_read(keys: Sequence[str], names: list[str]) -> list[str]:
    """Columns to read: the requested ones, or all if none of them exists."""
    return [name for name in keys if name in names] or names


def _without_nulls(value: Any) -> Any:
    """A value without the nulls of absent fields in its objects."""
    match value:
        case dict():
            return {name: _without_nulls(x) for name, x in value.items() if x is not None}
        case list():
            return [_without_nulls(x) for x in value]
    return value


def _check_text(value: Any, what: str) -> None:
    """Raise for an unpaired surrogate, which JSON can contain and UTF-8 cannot encode."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{what} has an unpaired surrogate, {value[error.start]!a}, at character "
                    f"{error.start}."
                ) from error
        case dict():
            _check_text([*value.values()], what)
        case list():
            for x in value:
                _check_text(x, what)
