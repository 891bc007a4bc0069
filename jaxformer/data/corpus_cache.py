"""Caches the tokenizer that is trained on a corpus, and gzip's bits per byte."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from jaxformer.data.cached_files import cached_json
from jaxformer.data.corpus import Document, corpus_size
from jaxformer.data.opened_corpus import Corpus
from jaxformer.data.splits import gzip_bits_per_byte, sample_texts
from jaxformer.data.tokenization import loss_text
from jaxformer.data.tokenizer_loading import build_tokenizer, tokenizer_from_json
from jaxformer.data.tokenizers import BPE, Characters, Tokenizer, TokenizerConfig


def cached_tokenizer(
    config: TokenizerConfig,
    corpora: Sequence[Corpus],
    folder: Path,
    *,
    on_train: Callable[[int], None] | None = None,
) -> Tokenizer:
    """Build the tokenizer of a configuration; one that is trained is cached.

    Args:
        config: Tokenizer configuration.
        corpora: Corpora with the training text.
        folder: Folder of caches.
        on_train: Called before it is trained, with the bytes of text that it is trained on.

    Returns:
        The tokenizer.
    """
    if not isinstance(config, BPE | Characters):
        return build_tokenizer(config, ())
    parts = [corpus.documents("train") for corpus in corpora]

    def train() -> str:
        num_bytes = sum(corpus_size(part).num_bytes for part in parts)
        texts: Iterable[str] = (document.text for document in chain.from_iterable(parts))
        if isinstance(config, BPE):
            num_bytes = min(num_bytes, config.sample_bytes)
            texts = sample_texts(parts, config.sample_bytes)
        if on_train is not None:
            on_train(num_bytes)
        return build_tokenizer(config, texts).to_json()

    key = [type(config).__name__, asdict(config), *(corpus.key for corpus in corpora)]
    return tokenizer_from_json(cached_json(folder / "tokenizers", key, train))


def cached_gzip_bits_per_byte(
    corpora: Sequence[Corpus], tokenizer: Tokenizer, folder: Path
) -> float:
    """Bits per byte of gzip on the held-out text with loss; see `gzip_bits_per_byte`.

    Args:
        corpora: Corpora with the text.
        tokenizer: Tokenizer, which decides what text of instructions has loss.
        folder: Folder of caches.

    Returns:
        Bits per byte.
    """
    held_out: Iterable[Any] = chain.from_iterable(
        corpus.documents("held_out") for corpus in corpora
    )
    key = [tokenizer.to_json(), *(corpus.key for corpus in corpora)]
    texts = (Document(x.name, loss_text(x, tokenizer)) for x in held_out)
    return cached_json(folder / "gzip", key, lambda: gzip_bits_per_byte(texts))
