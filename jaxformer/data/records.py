"""Files as they are found: text, or records in JSON lines, Parquet and Arrow; packed or not."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from jaxformer.extras import import_extra
from jaxformer.json_files import parse_object

Record: TypeAlias = dict[str, Any]

# Files of many records, and what may stand behind any file's name: it is packed.
TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", *TABLES)
PACKED = (".gz", ".zst")
ROWS_AT_ONCE = 1024


def suffix_of(path: Path) -> str:
    """What a file holds, packed or not."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


def read_text(path: Path) -> str:
    """The text of a file of UTF-8, its line ends as they are.

    Raises:
        ValueError: It is not UTF-8, or cannot be unpacked.
    """
    with _unpacked(path) as file:
        data = file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} "
            f"of {len(data)}, in line {line}. Convert it (`iconv -f ENCODING -t UTF-8`) or leave "
            "it out."
        ) from error


def read_records(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, Record, str]]:
    """The records of a file, one at a time.

    Args:
        path: Its suffix says which of `RECORDS` it is; any other is read as JSON lines.
        keys: Which columns are wanted of a table, if it has any of them.

    Returns:
        An iterator over the number of the line, or of the row from 1; the record; and what to call
        it in errors.

    Raises:
        ValueError: The file cannot be unpacked or read, or a line is no JSON object.
        ImportError: ``pyarrow`` is needed and not installed.
    """
    if path.suffix in TABLES:
        for number, record in enumerate(_rows(path, keys), start=1):
            yield number, record, f"{path} row {number}"
        return
    with _unpacked(path) as file:
        # Lines of bytes end in \n alone: U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path} line {number}"
                yield number, parse_object(line, where=where), where


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    if path.suffix not in PACKED:
        with open(path, "rb") as file:
            yield file
        return
    try:
        if path.suffix == ".gz":
            opened = gzip.open(path)
        else:
            opened = import_extra("pyarrow").input_stream(str(path), compression="zstd")
        with opened as raw, io.BufferedReader(raw, 1 << 20) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}.") from error


def _rows(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The rows of a table, a batch in memory at a time."""
    arrow = import_extra("pyarrow")
    try:
        with arrow.OSFile(str(path)) as file:  # pages of a map would count as memory
            if path.suffix == ".parquet":
                table = import_extra("pyarrow.parquet").ParquetFile(file, pre_buffer=False)
                names = table.schema_arrow.names
                batches = table.iter_batches(ROWS_AT_ONCE, columns=_wanted(keys, names))
            elif file.read(6) == b"ARROW1":  # with an index at its end; else as datasets are saved
                table = arrow.ipc.open_file(file)
                batches = map(table.get_batch, range(table.num_record_batches))
                names = table.schema.names
            else:
                file.seek(0)
                batches = table = arrow.ipc.open_stream(file)
                names = table.schema.names
            for batch in batches:
                yield from batch.select(_wanted(keys, names)).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error


def _wanted(keys: Sequence[str], names: list[str]) -> list[str]:
    """The columns to read; all of them where none is wanted, so that an error can name them."""
    return [name for name in keys if name in names] or names
