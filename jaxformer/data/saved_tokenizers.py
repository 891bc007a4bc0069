"""Tokenizers read back from JSON and from folders."""

import json
from pathlib import Path

from jaxformer.data.extras import import_extra
from jaxformer.data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
)

# Where a tokenizer of another library does not say how its texts end, one of these is it.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


def tokenizer_from_json(text: str) -> Tokenizer:
    """Rebuild the tokenizer that wrote this with its ``to_json``.

    Args:
        text: The JSON.

    Returns:
        The tokenizer.

    Raises:
        ValueError: No tokenizer here writes such JSON.
        ImportError: It needs ``tokenizers``, which is not installed.
    """
    return _from_saved(_parsed(text, where="The text"), where="The text")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a tokenizer that was saved, or one of a Hugging Face folder.

    The end of text is ``eos_token`` of ``tokenizer_config.json``, else the first of `KNOWN_ENDS`
    among the added tokens.

    Args:
        folder: Where ``tokenizer.json`` is.

    Returns:
        The tokenizer.

    Raises:
        ValueError: A file is missing or is no tokenizer, or the end of text cannot be told.
        ImportError: It needs ``tokenizers``, which is not installed.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. An exported folder needs the tokenizer beside its weights: "
            f"copy tokenizer.json, and tokenizer_config.json where there is one, from its origin."
        )
    saved = _parsed(path.read_text(encoding="utf-8"), where=path)
    if "model" not in saved:
        return _from_saved(saved, where=path)
    names = {token["content"] for token in saved.get("added_tokens", ())}
    end = _eos_token(path.with_name("tokenizer_config.json"))
    end = end or next((name for name in KNOWN_ENDS if name in names), None)
    if end is None:
        raise ValueError(
            f"{path} does not tell how a text ends: no eos_token in tokenizer_config.json, and "
            f"none of {list(KNOWN_ENDS)} among its {len(names)} added tokens."
        )
    return _bpe(saved, end, where=path)


def _from_saved(saved: dict, *, where: str | Path) -> Tokenizer:
    match saved:
        case {"type": "ByteTokenizer"}:
            return ByteTokenizer()
        case {"type": "CharacterTokenizer", "alphabet": str(alphabet)}:
            return CharacterTokenizer(alphabet)
        case {"type": "BPETokenizer", "end_of_text": str(end), "tokenizer": dict(backend)}:
            return _bpe(backend, end, where=where)
    raise ValueError(f"{where} is no tokenizer; its keys are {sorted(saved)}.")


def _bpe(saved: dict, end_of_text: str, *, where: str | Path) -> BPETokenizer:
    read = import_extra("tokenizers").Tokenizer.from_str
    try:
        backend = read(json.dumps(saved))
    except Exception as error:  # The library raises no narrower type.
        raise ValueError(f"{where} is no tokenizer: {error}.") from error
    return BPETokenizer(backend, end_of_text=end_of_text)


def _eos_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    token = _parsed(path.read_text(encoding="utf-8"), where=path).get("eos_token")
    return token["content"] if isinstance(token, dict) else token


def _parsed(text: str, *, where: str | Path) -> dict:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg} at line {error.lineno}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is a {type(found).__name__}, not an object.")
    return found
