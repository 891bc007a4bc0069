"""Token files of other programs: llm.c, nanoGPT, Megatron-LM, and Parquet with a column of ids.

They are read from where they lie. An index of each (where documents start, digests of its blocks)
is cached by its SHA-256. Documents start at the bos token, else end at the end of text. Where a
file has neither, those of Megatron-LM's index are copied with an end of text after each.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.atomic_files import atomic_file
from jaxformer.checks import require
from jaxformer.data.cached_files import cached_arrays, cached_json
from jaxformer.data.checked_files import BLOCK_BYTES, CheckedFile, block_digests
from jaxformer.data.rows import PackedRows
from jaxformer.data.tokenization import smallest_unsigned_dtype
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.extras import import_extra
from jaxformer.json_files import json_digest

LOG = logging.getLogger("jaxformer.data")

# llm.c's header: 256 int32, of which the first are magic number, version and number of tokens.
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # of GPT-2 and of Llama 3
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
TOKENS_PER_BLOCK = BLOCK_BYTES << 4  # read at once
HEADERLESS_DTYPES = ("<i8", "<u4")  # besides uint16
LARGEST_VOCABULARY = 1 << 20  # that a tokenizer has
NUM_TRIED = 1 << 16  # ids that tell the dtype


class TokenFile(NamedTuple):
    """A file of token ids: its dtype, the bytes before the first id, the index of Megatron-LM."""

    path: Path
    dtype: str
    offset: int = 0
    megatron_index: Path | None = None


def describe_token_file(path: Path, vocab_size: int) -> TokenFile:
    """Find out how a ``.bin`` file stores its tokens, from its header or the ``.idx`` beside it.

    Args:
        path: Shard of llm.c, file of nanoGPT (without a header), or of Megatron-LM.
        vocab_size: Vocabulary size of the tokenizer; of a file without a header, the widest dtype
            is taken of which the ids could be of a vocabulary.

    Returns:
        The description.

    Raises:
        ValueError: The header is unknown, or the file is cut off or empty.
    """
    size, index = path.stat().st_size, path.with_suffix(".idx")
    num_tokens: float
    if index.exists():
        dtype, ends = _read_megatron_index(index)
        file, num_tokens = TokenFile(path, dtype, megatron_index=index), int(ends[-1])
    else:
        head = np.fromfile(path, "<i4", 3)
        magic, version, num_tokens = head.tolist() if len(head) == 3 else (0, 0, 0)
        if magic not in {magic for magic, _ in LLMC_DTYPES}:
            file = TokenFile(path, _headerless_dtype(path, size, vocab_size))
            num_tokens = size / np.dtype(file.dtype).itemsize
        elif (magic, version) in LLMC_DTYPES:
            is_wide = size == LLMC_HEADER_BYTES + 4 * num_tokens  # whatever the version says
            dtype = "<u4" if is_wide else LLMC_DTYPES[magic, version]
            file = TokenFile(path, dtype, LLMC_HEADER_BYTES)
        else:
            raise ValueError(f"{path} has llm.c's header of version {version}, which is unknown.")
    expected = file.offset + num_tokens * np.dtype(file.dtype).itemsize
    if size != expected or size % np.dtype(file.dtype).itemsize:
        raise ValueError(
            f"{path} has {size} bytes; {num_tokens:g} tokens of {np.dtype(file.dtype)} are "
            f"{expected:g}. It is cut off, or has another form."
        )
    require(num_tokens >= 2, f"{path} has {num_tokens:g} tokens; it needs two or more.")
    return file


def _headerless_dtype(path: Path, size: int, vocab_size: int) -> str:
    """Dtype of a file without a header: read as a wider one, pairs of ids are far too large.

    Ids of a larger vocabulary stay wide, so that they are refused by the largest of them. Only
    pairs of ids of a few characters may be small.
    """
    most = vocab_size if vocab_size <= 4096 else max(vocab_size, LARGEST_VOCABULARY)
    for dtype in HEADERLESS_DTYPES:
        ids = np.fromfile(path, dtype, NUM_TRIED)
        if len(ids) and not size % ids.itemsize and 0 <= ids.min() <= ids.max() < most:
            return dtype
    return "<u2"


def _read_megatron_index(path: Path) -> tuple[str, np.ndarray]:
    """Dtype and the end of each document of Megatron-LM's ``.bin`` file."""
    data = path.read_bytes()
    if len(data) < 34 or not data.startswith(MEGATRON_MAGIC):
        raise ValueError(f"{path} is not an index of Megatron-LM.")
    (version,), code = np.frombuffer(data[9:17], "<u8"), data[17]
    if version != 1 or code not in MEGATRON_DTYPES:
        raise ValueError(
            f"{path} has version {version} and dtype {code}; version 1 and the dtypes "
            f"{', '.join(map(str, MEGATRON_DTYPES))} can be read."
        )
    count, num_bounds = np.frombuffer(data[18:34], "<u8").tolist()
    lengths = np.frombuffer(data[34 : 34 + 4 * count], "<i4")
    require(len(lengths) == count, f"{path} is cut off: it has {len(lengths)} of {count} lengths.")
    bounds = np.frombuffer(data[34 + 12 * count :][: 8 * num_bounds], "<i8")  # after the pointers
    if len(bounds) != num_bounds or (num_bounds and bounds[-1] > count):
        raise ValueError(f"{path} is cut off: it has {len(bounds)} of {num_bounds} documents.")
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return MEGATRON_DTYPES[code], ends[np.append(bounds[1:], count)]


def separate_documents(
    file: TokenFile, version: str, tokenizer: Tokenizer, cache: Path
) -> tuple[TokenFile, str]:
    """Copy a file of Megatron-LM once, if the documents of its index have no end and no bos token.

    Args:
        file: The file.
        version: Changes with its content.
        tokenizer: The tokenizer of its text.
        cache: Folder of caches.

    Returns:
        The file or its copy, and its version.
    """
    if file.megatron_index is None:
        return file, version
    ends = _read_megatron_index(file.megatron_index)[1]
    ends = ends[np.diff(ends, prepend=0) > 0]
    numbers = np.memmap(file.path, file.dtype, mode="r")
    index_sha256 = hashlib.sha256(file.megatron_index.read_bytes()).hexdigest()
    end, bos = tokenizer.end_of_text, bos_token_id(tokenizer)
    identity = [version, index_sha256, end, bos, tokenizer.vocab_size]

    def missing() -> np.ndarray:
        """Ends of the documents that no end of text closes and no bos token opens."""
        opens = (numbers[np.append(0, ends[:-1])] == bos) & (bos != end)
        return ends[~opens & (numbers[ends - 1] != end)]

    folder, content = cache / "token_files", json_digest(identity)
    if cached_json(folder, identity, lambda: not len(missing())):
        return file, version
    target = folder / f"{content[:32]}.bin"
    return _copy(file.path, _insert_ends(numbers, missing, end), tokenizer, target), content


def _insert_ends(
    numbers: np.ndarray, find_places: Callable[[], np.ndarray], end: int
) -> Iterator[np.ndarray]:
    """Yield token ids in blocks, with an end of text inserted at some places."""
    places = find_places()
    for first in range(0, len(numbers), TOKENS_PER_BLOCK):
        ids = np.asarray(numbers[first : first + TOKENS_PER_BLOCK], np.int64)
        bounds = np.searchsorted(places, (first, first + len(ids)), side="right")
        yield np.insert(ids, places[slice(*bounds)] - first, end)


def _read_parquet(path: Path, field: str, end: int) -> Iterator[np.ndarray]:
    """Yield the token ids of each document of a column, with an end of text.

    Raises:
        ValueError: There is no such column.
        ImportError: ``pyarrow`` is not installed.
    """
    table = import_extra("pyarrow.parquet").ParquetFile(path)
    if field not in (names := table.schema_arrow.names):
        raise ValueError(f"{path} has no column {field!r}; it has {', '.join(names)}.")
    for batch in table.iter_batches(1024, columns=[field]):
        for row in batch.column(0):
            ids = np.asarray(row.values, np.int64)
            yield ids if len(ids) and ids[-1] == end else np.append(ids, end)


def _copy(
    path: Path, pieces: Iterable[np.ndarray], tokenizer: Tokenizer, target: Path
) -> TokenFile:
    """Copy token ids of a file to a ``.bin`` file, once.

    Raises:
        ValueError: An id is not in the vocabulary.
    """
    dtype = smallest_unsigned_dtype(tokenizer.vocab_size)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as partial, open(partial, "wb") as file:
            for ids in pieces:
                _check_largest(path, ids, tokenizer)
                file.write(ids.astype(dtype).data)
    return TokenFile(target, dtype.str)


def _check_largest(path: Path, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= ids.min() <= (largest := ids.max()) < tokenizer.vocab_size:
        raise ValueError(
            f"{path} has the id {largest if ids.min() >= 0 else ids.min()}, but the tokenizer has "
            f"{tokenizer.vocab_size} tokens: it is of another vocabulary."
        )


def open_token_file(
    path: Path, version: str, field: str, tokenizer: Tokenizer, cache: Path
) -> PackedRows:
    """Open a token file as rows of one token; its index is made once.

    Args:
        path: The file.
        version: Changes with its content, and names the index.
        field: Column of the token ids in Parquet.
        tokenizer: The tokenizer of its text.
        cache: Folder of caches.

    Returns:
        The rows. Bytes of their documents are not known: 0.

    Raises:
        ValueError: The file is cut off or has another form, or an id is not in the vocabulary.
        ImportError: ``pyarrow`` is not installed.
    """
    end, bos = tokenizer.end_of_text, bos_token_id(tokenizer)
    if path.suffix == ".parquet":
        version = json_digest([version, field, end, tokenizer.vocab_size])
        target = cache / "token_files" / f"{version[:32]}.bin"
        file = _copy(path, _read_parquet(path, field, end), tokenizer, target)
    else:
        file = describe_token_file(path, tokenizer.vocab_size)
        file, version = separate_documents(file, version, tokenizer, cache)
    identity = [version, file.dtype, file.offset, end, bos, tokenizer.vocab_size]
    saved = cache / "token_files" / f"{json_digest(identity)[:32]}.npz"
    names = ("starts", "digests", "has_bos")
    index = cached_arrays(saved, names, lambda: _index(file, tokenizer))
    starts, digests = index["starts"], index["digests"].tobytes()
    tokens = CheckedFile(file.path, file.dtype, digests, offset=file.offset)
    if len(starts) == 1:
        LOG.warning(
            "%s has no end of text (id %d) between its %s tokens, so they are one document; are "
            "they of this tokenizer?",
            *(file.path, end, f"{len(tokens):,}"),
        )
    return PackedRows(
        tokens=tokens,
        starts=starts,
        document_bytes=np.zeros(len(starts), np.int64),
        num_inputs=len(tokens) - 1,
        row_length=1,
        end_of_text=end,
        num_documents=len(starts),
        num_bytes=0,
        num_targets=len(tokens) - 1,
        digest=json_digest(identity),
        tokenizer_digest=json_digest(tokenizer.to_json()),
        bos_token_id=None if index["has_bos"] else bos,
    )


def _index(file: TokenFile, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Where documents start, the digests of the blocks, and whether bos tokens open documents."""
    numbers = np.memmap(file.path, file.dtype, mode="r", offset=file.offset)
    end, bos, found = tokenizer.end_of_text, bos_token_id(tokenizer), list[np.ndarray]()
    for first in range(0, len(numbers), TOKENS_PER_BLOCK):
        ids = np.asarray(numbers[first : first + TOKENS_PER_BLOCK])
        _check_largest(file.path, ids, tokenizer)
        found.append(first + np.flatnonzero((ids == end) | (ids == bos)))
    places = np.concatenate(found)
    is_bos = (numbers[places] == bos) & (bos != end)
    # An end of text before a bos token only ends its document.
    starts = np.setdiff1d(places, places[is_bos] - 1)
    starts = np.union1d(starts, 0)
    digests = np.frombuffer(block_digests(file.path, offset=file.offset), np.uint8)
    starts = starts[starts < len(numbers) - 1]
    return {"starts": starts, "digests": digests, "has_bos": np.array(is_bos.any())}
