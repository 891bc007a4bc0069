"""Build a tokenizer from a configuration, from our JSON or from a Hugging Face folder."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxformer.data.tokenizers import (
    BPE,
    END_OF_TEXT,
    BPETokenizer,
    ByteLevel,
    ByteTokenizer,
    Characters,
    CharacterTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    TokenizerConfig,
    train_bpe,
)
from jaxformer.extras import import_extra
from jaxformer.json_files import get_field, parse_json_object, read_json

CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", CONFIG)
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# Used if the files of a tokenizer have no eos_token: the first of these that it has.
KNOWN_EOS_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Build the tokenizer of a configuration.

    Args:
        config: Tokenizer configuration.
        texts: Training texts, if it is trained; without held-out text.

    Returns:
        The tokenizer.
    """
    match config:
        case ByteLevel():
            return ByteTokenizer()
        case BPE(vocab_size=vocab_size):
            return train_bpe(texts, vocab_size=vocab_size)
        case Characters():
            return CharacterTokenizer("".join(sorted(set().union(*texts))))
        case PretrainedTokenizer(path=path):
            return load_tokenizer(path)


def max_vocab_size(config: TokenizerConfig) -> int | None:
    """Number of tokens of a tokenizer; None if only the text tells, as for characters.

    Args:
        config: Tokenizer configuration.

    Returns:
        The number; of byte pair encoding, the maximum.
    """
    match config:
        case BPE(vocab_size=vocab_size):
            return vocab_size
        case Characters():
            return None
    return build_tokenizer(config, ()).vocab_size


def tokenizer_from_json(text: str) -> Tokenizer:
    """Rebuild a tokenizer from its ``to_json``.

    Args:
        text: JSON text.

    Returns:
        The tokenizer.

    Raises:
        ValueError: The JSON is not that of a tokenizer.
        ImportError: It needs ``tokenizers``, which is not installed.
    """
    return _tokenizer_from_dict(parse_json_object(text, location="The text"), where="The text")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a tokenizer from tokenizer.json, ours or Hugging Face's.

    The end of text is ``eos_token`` of ``tokenizer_config.json``, else the first of
    `KNOWN_EOS_TOKENS` among the added tokens.

    Args:
        folder: Folder of ``tokenizer.json``, or the file.

    Returns:
        The tokenizer.

    Raises:
        ValueError: A file is missing or invalid, or there is no end-of-text token.
        ImportError: It needs ``tokenizers``, which is not installed.
    """
    path = Path(folder).expanduser()
    path = path if path.suffix == ".json" else path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. An exported folder needs the tokenizer beside its weights: "
            f"copy tokenizer.json, and tokenizer_config.json if it exists, from its origin."
        )
    saved = read_json(path)
    if "model" not in saved:
        return _tokenizer_from_dict(saved, where=path)
    try:
        names = {str(token["content"]) for token in saved.get("added_tokens") or ()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a tokenizer: an added token has no content.") from error
    eos_token = special_tokens(path.parent).get("eos_token")
    eos_token = eos_token or next((name for name in KNOWN_EOS_TOKENS if name in names), None)
    if eos_token is None:
        raise ValueError(
            f"{path} has no end-of-text token: tokenizer_config.json has no eos_token, and none of "
            f"{list(KNOWN_EOS_TOKENS)} is among the {len(names)} added tokens."
        )
    config = path.with_name(CONFIG)
    settings = read_json(config) if config.is_file() else {}
    settings = {"split_special_tokens": False} | settings
    split = get_field(settings, "split_special_tokens", bool, location=config)
    return _bpe_tokenizer(saved, eos_token, where=path, split_special_tokens=split)


def _tokenizer_from_dict(saved: dict, *, where: str | Path) -> Tokenizer:
    match saved:
        case {"type": "ByteTokenizer"}:
            return ByteTokenizer()
        case {"type": "CharacterTokenizer", "alphabet": str(alphabet)}:
            try:
                return CharacterTokenizer(alphabet)
            except ValueError as error:
                raise ValueError(f"{where} is not a tokenizer: {error}") from error
        case {"type": "BPETokenizer", "end_of_text": str(end), "tokenizer": dict(backend)}:
            return _bpe_tokenizer(backend, end, where=where)
    first_keys = ", ".join(repr(key)[:40] for key in sorted(saved)[:8]) or "none"
    raise ValueError(f"{where} is not a tokenizer; its {len(saved)} keys: {first_keys}.")


def _bpe_tokenizer(
    saved: dict, end_of_text: str, *, where: str | Path, **settings: Any
) -> BPETokenizer:
    read = import_extra("tokenizers").Tokenizer.from_str
    try:
        return BPETokenizer(read(json.dumps(saved)), end_of_text=end_of_text, **settings)
    except Exception as error:  # The library raises no narrower type.
        raise ValueError(f"{where} is not a tokenizer: {error}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens in the JSON files of a folder, by the keys of `SPECIAL`.

    Raises:
        ValueError: One is not a string; the message has its file.
    """
    tokens: dict[str, str] = {}
    for path in (folder / CONFIG, folder / "special_tokens_map.json"):
        if not path.is_file():
            continue
        file_tokens = read_json(path)
        for key in SPECIAL:
            token = file_tokens.get(key)
            name = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(name, str):
                raise ValueError(
                    f"{path}: {key} must be a string, null or an object whose content is a string; "
                    f"got {str(token)[:60]}."
                )
            tokens |= {key: name} if name is not None else {}
        if "added_tokens_decoder" in file_tokens:  # transformers then ignores the older file
            break
    return tokens
