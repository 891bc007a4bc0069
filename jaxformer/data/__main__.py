"""Tokenize a corpus once, for any number of runs.

    jaxformer data my/texts --tokenizer 'BPE(vocab_size=32768)' --output tokens
    jaxformer data my/texts --tokenizer path/to/folder --output tokens --part 3/8
    jaxformer data 'hf://datasets/NAME/*.parquet' --tokenizer FOLDER --output gs://bucket/tokens
    jaxformer pretrain small --corpus 'Packed(path="tokens")'

Killed and started again, it goes on where it was. Several processes or hosts share the work, each
with its part; the parts are one corpus.
"""

import argparse
import os
import re
import shutil
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from jaxformer.checks import require
from jaxformer.config import from_python
from jaxformer.data.corpus import Documents, NoTextError, StandardLibrary, TextFiles, corpus_size
from jaxformer.data.corpus_cache import cached_tokenizer
from jaxformer.data.opened_corpus import Corpus
from jaxformer.data.packing import METADATA, open_packed, write_packed
from jaxformer.data.shard_files import part_name
from jaxformer.data.stores import fetch_files, is_store, store_has, upload
from jaxformer.data.tokenization import TokenizationProgress
from jaxformer.data.tokenizer_loading import TOKENIZER_FILES
from jaxformer.data.tokenizers import BPE, ByteLevel, Characters, PretrainedTokenizer, Tokenizer
from jaxformer.errors import described, own_command, readable_errors
from jaxformer.json_files import json_digest, read_json_with_checksum, write_json_with_checksum

IDENTITY_FILE = "corpus.json"  # of the text and the tokenizer
CHANGED = {"text": "text", "tokenizer": "tokenizer", "parts": "number of parts"}


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and tokenize one part."""
    plain = argparse.RawDescriptionHelpFormatter
    text = described(str(__doc__), "data")
    parser = argparse.ArgumentParser(own_command("data"), description=text, formatter_class=plain)
    parser.add_argument("corpus", help="file, folder, address, or TextFiles(path=..., field=...)")
    parser.add_argument("--tokenizer", required=True, help="file, folder, or BPE(vocab_size=...)")
    parser.add_argument("--output", required=True, help="folder of the tokens, or gs://...")
    parser.add_argument("--part", default="1/1", help="the part of this process, such as 3/8")
    options = parser.parse_args(arguments)
    with readable_errors():
        tokenize(
            parse_option(options.corpus, TextFiles, StandardLibrary),
            parse_option(options.tokenizer, PretrainedTokenizer, BPE, ByteLevel, Characters),
            options.output,
            *parse_part(options.part),
        )


def parse_option(text: str, path_option: Any, *options: type) -> Any:
    """An option written as Python, or a path, which stands for `path_option`.

    Raises:
        ValueError: The text is neither.
    """
    if not re.match(r"\w+\(", text):
        return path_option(path=text)
    return from_python(text, {kind.__name__: kind for kind in (path_option, *options)})


def parse_part(text: str) -> tuple[int, int]:
    """Number and count of the parts.

    Raises:
        ValueError: It is not as 3/8.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--part must be NUMBER/COUNT, such as 3/8, counted from 1; got {text!r}.")
    return int(match[1]), int(match[2])


def tokenize(corpus: Any, tokenizer: Any, output: str, number: int = 1, count: int = 1) -> None:
    """Tokenize one part of a corpus into a folder.

    Every document with an index of `number` - 1 modulo `count` belongs to the part; of a corpus in
    a store every shard, each of which becomes a part: a file, or several small ones.

    Args:
        corpus: `TextFiles` or `StandardLibrary`.
        tokenizer: Tokenizer configuration.
        output: Folder of the tokens, or an address in a store.
        number: Number of the part, from 1.
        count: Number of parts.

    Raises:
        ValueError: The folder has another text or tokenizer, the part has no document, or a store
            cannot be read or written.
        OSError: The disk is full.
    """
    output = output if is_store(output) else os.path.expanduser(output)
    cache = Path("runs/cache") if is_store(output) else Path(output, ".cache")
    opened, num_parts = Corpus(corpus, folder=cache), count
    shards = [*opened.shards.values()]
    if opened.is_streamed:
        num_parts = len(shards)
        numbers = range(number, num_parts + 1, count)
        parts = {i: shards[i - 1].documents(None) for i in numbers}
        print(f"{num_parts} shards, of which this process tokenizes {len(parts)}.", flush=True)
    else:
        documents = shards[0].documents(None)
        parts = {number: Documents(lambda: islice(iter(documents), number - 1, None, count))}
    text_key = json_digest([shard.key for shard in shards])

    def on_train(size: int) -> None:
        print(f"  training the tokenizer on {size:,} bytes", flush=True)

    built = cached_tokenizer(tokenizer, [opened], cache, on_train=on_train)
    digest = json_digest(built.to_json())
    identity = {"text": text_key, "tokenizer": digest, "parts": num_parts}
    folder = Path(output)
    if is_store(output):  # parts are written here before they are uploaded
        folder = cache / "tokens" / json_digest([output, identity])[:32]
    write_identity(folder, output, built, identity)
    for part, part_documents in parts.items():
        tokenize_part(part_documents, built, folder, output, part_name(part, num_parts))


def write_identity(
    folder: Path, output: str, tokenizer: Tokenizer, identity: dict[str, Any]
) -> None:
    """Save the tokenizer and what the parts are made of, or compare with what is there.

    Raises:
        ValueError: The folder has another text or tokenizer.
    """
    if is_store(output):
        fetch_files(output, (IDENTITY_FILE, *TOKENIZER_FILES), folder)
    known = read_json_with_checksum(folder / IDENTITY_FILE)
    if known is None:
        tokenizer.save(folder)
        write_json_with_checksum(folder / IDENTITY_FILE, identity)
        if is_store(output):
            names = (*TOKENIZER_FILES, IDENTITY_FILE)
            upload([folder / name for name in names if (folder / name).exists()], output)
    elif changed := [name for name in identity if identity[name] != known.get(name)]:
        differences = " and another ".join(CHANGED[name] for name in changed)
        raise ValueError(
            f"{output} has another {differences}; pass another --output, or remove it."
        )


def tokenize_part(
    documents: Documents, tokenizer: Tokenizer, folder: Path, output: str, name: str
) -> None:
    """Tokenize a part, unless it is complete; in a store it is complete when it has its metadata.

    Raises:
        ValueError: It has no document.
    """
    metadata = f"{output}/{name}/{METADATA}"
    if store_has(metadata) if is_store(output) else Path(metadata).exists():
        print(f"{output}/{name} is complete.")
        return
    if (folder / name).exists():
        rows = open_packed(folder / name)
    else:
        size = corpus_size(documents)
        require(size.num_documents > 0, f"{output}/{name} has no document; use fewer parts.")
        write = partial(
            write_packed,
            tokenizer=tokenizer,
            row_length=1,
            folder=folder / name,
            size=size,
            on_progress=TokenizationProgress(),
        )
        try:
            rows = write(documents)
        except NoTextError:
            rows = write(())
    if is_store(output):
        files = sorted((folder / name).iterdir(), key=lambda path: path.name == METADATA)
        upload(files, f"{output}/{name}")
        shutil.rmtree(folder / name)
    print(
        f"{output}/{name}: {rows.num_targets:,} tokens, {rows.num_documents:,} documents, "
        f"{rows.num_bytes:,} bytes of text.",
        flush=True,
    )


if __name__ == "__main__":
    main()
