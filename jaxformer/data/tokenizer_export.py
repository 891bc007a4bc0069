"""Writes a tokenizer as tokenizer.json and tokenizer_config.json for Hugging Face libraries."""

import json
from pathlib import Path
from typing import Any

from jaxformer.data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
)


def export_tokenizer(
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    add_bos: bool = True,
    split_special_tokens: bool = True,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``tokenizers`` and transformers.

    Transformers' ``AutoTokenizer`` then gives the ids of `Tokenizer.encode` after one end of text,
    as every document in training; ``add_special_tokens=False`` leaves it out. With
    ``split_special_tokens`` a text that contains the characters of the end-of-text token is encoded
    as characters, as here; in ``tokenizers`` itself this needs ``encode_special_tokens = True``.

    Args:
        tokenizer: A `ByteTokenizer`, `CharacterTokenizer` or `BPETokenizer`.
        folder: Output folder, created if missing; `load_tokenizer` reads it too.
        add_bos: Whether to prepend the end of text to texts; not for the texts of an encoder.
        split_special_tokens: Whether special tokens in a text are encoded as characters; not with a
            chat template.

    Raises:
        ValueError: The tokenizer has another type.
    """
    eos_token, end_id = END_OF_TEXT, tokenizer.end_of_text
    match tokenizer:
        case ByteTokenizer():
            tokenizer_json = _tokenizer_json(_byte_level_parts(), eos_token, end_id)
        case CharacterTokenizer(alphabet=alphabet):
            tokenizer_json = _tokenizer_json(_character_parts(alphabet), eos_token, end_id)
        case BPETokenizer():
            saved = json.loads(tokenizer.to_json())
            tokenizer_json, eos_token = saved["tokenizer"], saved["end_of_text"]
        case _:
            raise ValueError(
                f"{type(tokenizer).__name__} cannot be exported to Hugging Face; ByteTokenizer, "
                "CharacterTokenizer and BPETokenizer can."
            )
    if add_bos and tokenizer_json["post_processor"] is None:
        tokenizer_json["post_processor"] = _bos_post_processor(eos_token, end_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eos_token,
        "eos_token": eos_token,
        "split_special_tokens": split_special_tokens,
        "clean_up_tokenization_spaces": False,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", tokenizer_json), ("tokenizer_config.json", settings)):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def bytes_to_unicode() -> list[str]:
    """GPT-2's mapping from bytes to printable characters.

    Printable bytes map to themselves, the others to the characters from 256 on.

    References:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019: its released
        code, ``bytes_to_unicode``.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + unprintable.index(b)) for b in range(256)]


def _byte_level_parts() -> dict[str, Any]:
    """tokenizer.json parts of a byte-level BPE without merges."""
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    level = {"type": "ByteLevel", **options}
    vocab = {character: byte for byte, character in enumerate(bytes_to_unicode())}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"pre_tokenizer": level, "decoder": level, "model": model}


def _character_parts(alphabet: str) -> dict[str, Any]:
    """tokenizer.json parts of a character vocabulary; unknown characters are errors."""
    pattern = {"Regex": r"(?m:.)"}  # the dot includes line ends
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    vocab = {character: i for i, character in enumerate(alphabet)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
    return {"pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}


def _tokenizer_json(parts: dict[str, Any], end: str, end_id: int) -> dict[str, Any]:
    """A complete tokenizer.json."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end_id, "content": end, **special, "special": True}],
        "normalizer": None,
        "post_processor": None,
        **parts,
    }


def _bos_post_processor(end: str, end_id: int) -> dict[str, Any]:
    """Post-processor that prepends the end-of-text token, which acts as BOS."""
    mark = {"SpecialToken": {"id": end, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [end_id], "tokens": [end]}},
    }
