"""One Hugging Face model family: config reader and writer, and tensor mapping."""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.param_mapping import ParamMapping

INV_FREQ_PATTERNS = (r".*\.rotary_emb\.inv_freq",)  # of rotary positions, in many files


@dataclass(frozen=True)
class Family:
    """How one model_type is read and written.

    Attributes:
        model_type: What config.json calls it.
        architecture: The transformers class that reads what we write.
        read: Our configuration from theirs. It may leave whatever it does not honour unread.
        write: The attributes of their config.json for ours, as near as they can be, or None where
            there are none; whether they say the same is checked by reading them back.
        mapping: Which tensor is which parameter.
        ignored_tensors: Patterns (of the whole name) of tensors that hold no parameters: masks,
            tables of frequencies.
        key_renames: Pairs of pattern and replacement that bring other spellings of tensor names to
            the table's, tried in order on every name.
        constant_tensors: Tensors that hold no parameters and that transformers still expects, by
            name, from the config.json they are written beside.
        lm_head_optional: Whether logits come from the embedding where a head that is not tied has
            no tensor.
        attention_type: The kind of attention it has.
        in_transformers: Whether its class is in transformers itself, and not code beside the files.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], c.TransformerConfig]
    write: Callable[[c.TransformerConfig], dict[str, Any] | None]
    mapping: ParamMapping
    _: KW_ONLY
    ignored_tensors: tuple[str, ...] = INV_FREQ_PATTERNS
    key_renames: tuple[tuple[str, str], ...] = ()
    constant_tensors: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None
    lm_head_optional: bool = False
    attention_type: type = c.MultiHead
    in_transformers: bool = True

    def rename_key(self, name: str) -> str:
        """Rename a tensor key to the name that the mapping uses."""
        for pattern, replacement in self.key_renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is not a parameter."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_tensors)
