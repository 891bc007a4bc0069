"""Tokenize a corpus once, for any number of runs.

python -m jaxformer.data my/texts --tokenizer 'BPE(vocab_size=32768)' --output tokens
python -m jaxformer.data my/texts --tokenizer path/to/folder --output tokens --part 3/8
python -m experiments.pretrain small --corpus 'Packed(path="tokens")'

Killed and started again, it goes on where it was. Several processes or hosts share the work, each
with its part; the parts are one corpus.
"""

import argparse
import re
from itertools import islice
from pathlib import Path
from typing import Any

from jaxformer.config import from_python
from jaxformer.data.corpus import CorpusSize, Documents, StandardLibrary, TextFiles
from jaxformer.data.corpus_cache import CachedSource, cached_tokenizer
from jaxformer.data.packing import open_packed, write_packed
from jaxformer.data.tokenization import TokenizationProgress
from jaxformer.data.tokenized_source import part_name
from jaxformer.data.tokenizers import BPE, ByteLevel, Characters, PretrainedTokenizer
from jaxformer.errors import readable_errors
from jaxformer.json_files import json_digest, read_checked_json, write_checked_json

IDENTITY_FILE = "corpus.json"  # of the text and the tokenizer


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and tokenize one part."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxformer.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", help="file, folder, or TextFiles(path=..., field=...)")
    parser.add_argument("--tokenizer", required=True, help="file, folder, or BPE(vocab_size=...)")
    parser.add_argument("--output", required=True, type=Path, help="folder of the tokens")
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


def tokenize(corpus: Any, tokenizer: Any, output: Path, number: int = 1, count: int = 1) -> None:
    """Tokenize one part of a corpus into a folder.

    Every document with an index of `number` - 1 modulo `count` belongs to the part.

    Args:
        corpus: `TextFiles` or `StandardLibrary`.
        tokenizer: Tokenizer configuration.
        output: Folder of the tokens.
        number: Number of the part, from 1.
        count: Number of parts.

    Raises:
        ValueError: The folder has another text or tokenizer, or the part has no document.
        OSError: The disk is full.
    """
    source = CachedSource(corpus, folder=output / ".cache")
    built = cached_tokenizer(
        tokenizer,
        [source],
        output / ".cache",
        on_train=lambda size: print(f"  training the tokenizer on {size:,} bytes", flush=True),
    )
    identity = {"text": source.text_key, "tokenizer": json_digest(built.to_json()), "parts": count}
    known = read_checked_json(output / IDENTITY_FILE)
    if known is None:
        built.save(output)
        write_checked_json(output / IDENTITY_FILE, identity)
    elif changed := [name for name in identity if identity[name] != known.get(name)]:
        raise ValueError(
            f"{output} has another {' and another '.join(changed)}; pass another --output, or "
            "remove it."
        )
    folder = output / part_name(number, count)
    if folder.exists():
        rows = open_packed(folder)
        print(f"{folder} is complete: {rows.num_targets:,} tokens.")
        return
    documents = Documents(lambda: islice(iter(source.documents), number - 1, None, count))
    size = CorpusSize(0, False, 0)
    for document in documents:
        size = size.with_document(document, len(document.text.encode()))
    if not size.num_documents:
        raise ValueError(f"Part {number} of {count} has no document; use fewer parts.")
    rows = write_packed(
        documents, built, row_length=1, folder=folder, size=size, on_progress=TokenizationProgress()
    )
    print(
        f"{folder}: {rows.num_targets:,} tokens, {rows.num_documents:,} documents, "
        f"{rows.num_bytes:,} bytes of text."
    )


if __name__ == "__main__":
    main()
