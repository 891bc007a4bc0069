"""Token files of other programs: llm.c, nanoGPT, Megatron-LM, and Parquet with a column of ids.

They are read from where they lie. An index of each (where documents start, digests of its blocks)
is cached by its SHA-256. Documents end where the end of text stands.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.checks import require
from jaxformer.data.cached_files import cached_arrays
from jaxformer.data.checked_files import BLOCK_BYTES, CheckedFile, block_digests
from jaxformer.data.rows import PackedRows
from jaxformer.data.tokenization import smallest_unsigned_dtype
from jaxformer.data.tokenizers import Tokenizer, bos_token_id
from jaxformer.extras import import_extra
from jaxformer.json_files import json_digest

# llm.c's header: 256 int32, of which the first are magic number, version and number of tokens.
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # of GPT-2 and of Llama 3
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
TOKENS_PER_BLOCK = BLOCK_BYTES << 4  # read at once


class TokenFile(NamedTuple):
    """A file of token ids: its dtype, and the bytes before the first id."""

    path: Path
    dtype: str
    offset: int = 0


def describe_token_file(path: Path) -> TokenFile:
    """Find out how a ``.bin`` file stores its tokens, from its header or the ``.idx`` beside it.

    Args:
        path: Shard of llm.c, file of nanoGPT (uint16 without a header), or of Megatron-LM.

    Returns:
        The description.

    Raises:
        ValueError: The header is unknown, or the file is cut off or empty.
    """
    size, index = path.stat().st_size, path.with_suffix(".idx")
    num_tokens: float
    if index.exists():
        dtype, num_tokens = _read_megatron_index(index)
        file = TokenFile(path, dtype)
    else:
        head = np.fromfile(path, "<i4", 3)
        magic, version, num_tokens = head.tolist() if len(head) == 3 else (0, 0, 0)
        if magic not in {magic for magic, _ in LLMC_DTYPES}:
            file, num_tokens = TokenFile(path, "<u2"), size / 2
        elif (magic, version) in LLMC_DTYPES:
            file = TokenFile(path, LLMC_DTYPES[magic, version], LLMC_HEADER_BYTES)
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


def _read_megatron_index(path: Path) -> tuple[str, int]:
    """Dtype and number of tokens of Megatron-LM's ``.bin`` file."""
    data = path.read_bytes()
    if len(data) < 34 or not data.startswith(MEGATRON_MAGIC):
        raise ValueError(f"{path} is not an index of Megatron-LM.")
    (version,), code = np.frombuffer(data[9:17], "<u8"), data[17]
    if version != 1 or code not in MEGATRON_DTYPES:
        raise ValueError(
            f"{path} has version {version} and dtype {code}; version 1 and the dtypes "
            f"{', '.join(map(str, MEGATRON_DTYPES))} can be read."
        )
    (count,) = np.frombuffer(data[18:26], "<u8")
    lengths = np.frombuffer(data[34 : 34 + 4 * int(count)], "<i4")
    require(len(lengths) == count, f"{path} is cut off: it has {len(lengths)} of {count} lengths.")
    return MEGATRON_DTYPES[code], int(lengths.sum(dtype=np.int64))


def convert_parquet(path: Path, field: str, tokenizer: Tokenizer, target: Path) -> TokenFile:
    """Copy a column of token ids to a ``.bin`` file once, with an end of text after each document.

    Args:
        path: Parquet file.
        field: The column, of lists of integers.
        tokenizer: Its vocabulary size selects 16 or 32 bits per token.
        target: File to write.

    Returns:
        The description.

    Raises:
        ValueError: There is no such column, or an id is not in the vocabulary.
        ImportError: ``pyarrow`` is not installed.
    """
    dtype = smallest_unsigned_dtype(tokenizer.vocab_size)
    if target.exists():
        return TokenFile(target, dtype.str)
    table = import_extra("pyarrow.parquet").ParquetFile(path)
    if field not in (names := table.schema_arrow.names):
        raise ValueError(f"{path} has no column {field!r}; it has {', '.join(names)}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with open(partial, "wb") as file:
        for batch in table.iter_batches(1024, columns=[field]):
            for row in batch.column(0):
                ids = np.asarray(row.values, np.int64)
                _check_largest(path, ids, tokenizer)
                if not len(ids) or ids[-1] != tokenizer.end_of_text:
                    ids = np.append(ids, tokenizer.end_of_text)
                file.write(ids.astype(dtype).data)
    partial.replace(target)
    return TokenFile(target, dtype.str)


def _check_largest(path: Path, ids: np.ndarray, tokenizer: Tokenizer) -> None:
    if len(ids) and not 0 <= ids.min() <= (largest := ids.max()) < tokenizer.vocab_size:
        raise ValueError(
            f"{path} has the id {largest if ids.min() >= 0 else ids.min()}, but the tokenizer has "
            f"{tokenizer.vocab_size} tokens: it is of another vocabulary."
        )


def open_token_file(file: TokenFile, sha256: str, tokenizer: Tokenizer, cache: Path) -> PackedRows:
    """Open a token file as rows of one token; its index is made once.

    Args:
        file: The file.
        sha256: Its SHA-256, which names the index.
        tokenizer: The tokenizer of its text.
        cache: Folder of caches.

    Returns:
        The rows. Bytes of their documents are not known: 0.

    Raises:
        ValueError: An id is not in the vocabulary.
    """
    identity = [sha256, file.dtype, file.offset, tokenizer.end_of_text, tokenizer.vocab_size]
    path = cache / "token_files" / f"{json_digest(identity)[:32]}.npz"
    index = cached_arrays(path, ("starts", "digests"), lambda: _index(file, tokenizer))
    starts, digests = index["starts"], index["digests"].tobytes()
    tokens = CheckedFile(file.path, file.dtype, digests, offset=file.offset)
    return PackedRows(
        tokens=tokens,
        starts=starts,
        document_bytes=np.zeros(len(starts), np.int64),
        num_inputs=len(tokens) - 1,
        row_length=1,
        end_of_text=tokenizer.end_of_text,
        num_documents=len(starts),
        num_bytes=0,
        num_targets=len(tokens) - 1,
        digest=json_digest(identity),
        tokenizer_digest=json_digest(tokenizer.to_json()),
        bos_token_id=bos_token_id(tokenizer),
    )


def _index(file: TokenFile, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Where documents start, and the digests of the blocks."""
    numbers = np.memmap(file.path, file.dtype, mode="r", offset=file.offset)
    starts = [np.zeros(int(numbers[0] != tokenizer.end_of_text), np.int64)]
    for first in range(0, len(numbers), TOKENS_PER_BLOCK):
        ids = np.asarray(numbers[first : first + TOKENS_PER_BLOCK])
        _check_largest(file.path, ids, tokenizer)
        starts.append(first + np.flatnonzero(ids == tokenizer.end_of_text))
    places = np.concatenate(starts)
    digests = np.frombuffer(block_digests(file.path, offset=file.offset), np.uint8)
    return {"starts": places[places < len(numbers) - 1], "digests": digests}
