"""One Hugging Face model family: config reader and writer, and tensor mapping."""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Table

FREQUENCIES = (r".*\.rotary_emb\.inv_freq",)  # of rotary positions, in many files


@dataclass(frozen=True)
class Family:
    """How one model_type is read and written.

    Attributes:
        model_type: What config.json calls it.
        architecture: The transformers class that reads what we write.
        read: Our configuration from theirs. It may leave whatever it does not honour unread.
        write: The attributes of their config.json for ours, as near as they can be, or None where
            there are none; whether they say the same is checked by reading them back.
        table: Which tensor is which parameter.
        ignored: Patterns (of the whole name) of tensors that hold no parameters: masks, tables of
            frequencies.
        spellings: Pairs of pattern and replacement that bring other spellings of tensor names to
            the table's, tried in order on every name.
        constants: Tensors that hold no parameters and that transformers still expects, by name,
            from the config.json they are written beside.
        head_may_be_absent: Whether logits come from the embedding where a head that is not tied has
            no tensor.
        attention: The kind of attention it has.
        in_transformers: Whether its class is in transformers itself, and not code beside the files.
    """

    model_type: str
    architecture: str
    read: Callable[[Settings], c.TransformerConfig]
    write: Callable[[c.TransformerConfig], dict[str, Any] | None]
    table: Table
    _: KW_ONLY
    ignored: tuple[str, ...] = FREQUENCIES
    spellings: tuple[tuple[str, str], ...] = ()
    constants: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None
    head_may_be_absent: bool = False
    attention: type = c.MultiHead
    in_transformers: bool = True

    def spell(self, name: str) -> str:
        """Rename a tensor key to the name that the mapping uses."""
        for pattern, replacement in self.spellings:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a tensor is not a parameter."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)
