"""Reader of config.json that records which attributes were read, and rejects unknown ones.

A family reads the attributes that it supports. All others must be known to be harmless: an ignored
attribute that changes the model would give wrong outputs without an error.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxformer.checks import FLOAT32_MAX

T = TypeVar("T")

# Attributes that do not change the logits of a model.
IGNORED_ATTRIBUTES = frozenset(
    "architectures auto_map model_type torch_dtype dtype use_bfloat16 transformers_version "
    "_name_or_path name_or_path _commit_hash use_cache return_dict torchscript is_decoder "
    "tokenizer_class prefix task_specific_params problem_type finetuning_task id2label label2id "
    "num_labels n_ctx gradient_checkpointing chunk_size_feed_forward pretraining_tp "
    "slow_but_exact keys_to_ignore_at_inference attn_implementation _attn_implementation "
    "_attn_implementation_autoset cache_implementation model_max_length unsloth_version "
    "unsloth_fixed is_llama_config transformers.js_config max_position_embeddings "
    "max_sequence_length use_parallel_embedding".split()
    # additional outputs
    + "output_attentions output_hidden_states output_past output_router_logits output_scores "
    "return_dict_in_generate".split()
    # initialisation and training losses
    + "initializer_range initializer_factor initializer_cutoff_factor init_std init_scale "
    "z_loss_coefficient router_aux_loss_coef router_jitter_noise".split()
    # generation
    + "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens".split()
    # dropout
    + "attention_dropout attn_dropout_prob hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
    "dropout dropout_rate activation_dropout classifier_dropout classif_dropout "
    "encoder_layerdrop decoder_layerdrop layerdrop".split()
    # heads of other tasks
    + "summary_type summary_use_proj summary_activation summary_proj_to_labels "
    "summary_first_dropout summary_hidden_size predict_special_tokens".split()
)
IGNORE_HINT = "If an attribute does not change the model's outputs, pass its name in ignore=(...)."
IGNORED_SUFFIXES = ("_token", "_token_id", "_token_ids", "_dropout", "_dropout_prob", "_pdrop")
# Attributes that do not change the model if they have one of these values.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
}


REASONS: Mapping[str, str] = {
    "quantization_config": "quantized weights are not read; convert the folder to bfloat16 first"
}


class ConfigReader:
    """The attributes of config.json, or of an object inside it.

    The methods that read attributes do not raise: they record a missing or invalid value and return
    a placeholder, and `check` raises one error for all problems.

    Args:
        values: The attributes.
        path: Prefix of their names in messages, such as "rope_scaling.".

    Attributes:
        names_read: Names of the attributes that were read.
    """

    def __init__(self, values: Mapping[str, Any], *, path: str = ""):
        self.values = values
        self.path = path
        self.problems: list[str] = []
        self.names_read: set[str] = set()
        self._sections: list[ConfigReader] = []

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or the default; mark it as read."""
        self.names_read.add(name)
        return self.values.get(name, default)

    def mark_read(self) -> None:
        """Mark all attributes as read, of an object without effect."""
        self.names_read |= set(self.values)

    def add_problem(self, name: str, reason: str) -> None:
        """Record that an attribute is not supported."""
        self.names_read.add(name)
        problem = f"{self.path}{name} = {self.values.get(name)!r}: {reason}"
        if problem not in self.problems:
            self.problems.append(problem)

    def require_value(
        self, name: str, *allowed: Any, reason: str = "not supported by jaxformer"
    ) -> None:
        """Record a problem unless the attribute is absent, null or an allowed value."""
        value = self.get(name)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed)
            self.add_problem(name, f"{reason}; it must be {shown}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer; absence and null give the default, or a problem without one."""
        return self._typed(name, default, int, 1)

    def positive_integer(self, name: str, default: int | None = None) -> int:
        """Return an integer that may divide, as `integer` does; below 1 is a problem."""
        value = self.integer(name, default)
        if value < 1:
            self.add_problem(name, "expected 1 or more.")
        return max(1, value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; absence and null give the default, or a problem without one."""
        return self._typed(name, default, float, 1.0)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """Return a boolean; absence gives the default, and so does null, unless that is true.

        Transformers takes a null for false, or refuses it.
        """
        is_null = name in self.values and self.values[name] is None
        return self._typed(name, None if is_null and default else default, bool, False)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; absence and null give the default, or a problem without one."""
        return self._typed(name, default, str, "")

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer or None for null; only absence gives the default."""
        return self.integer(name, default) if self.get(name, default) is not None else None

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number or None for null; only absence gives the default."""
        return self.number(name, default) if self.get(name, default) is not None else None

    def choice(self, name: str, default: str | None, choices: Mapping[str, T]) -> T:
        """Look up the attribute in `choices`; absent and null give the default."""
        word = self.get(name)
        word = default if word is None else word
        if isinstance(word, str) and word in choices:
            return choices[word]
        known = ", ".join(choices)
        self.add_problem(name, f"expected one of {known}.")
        return next(iter(choices.values()))

    def sequence(self, name: str, kind: type[T]) -> tuple[T, ...] | None:
        """Return a list of values of one type, or None if it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, list) and all(_has_json_type(item, kind) for item in value):
            return tuple(kind(item) for item in value)  # type: ignore[call-arg]
        self.add_problem(name, f"expected a list of {kind.__name__}.")
        return None

    def section(self, name: str) -> "ConfigReader | None":
        """Return a reader of the object under a name, or None if it is absent or empty."""
        inner = self.part(name)
        return inner if inner.values else None

    def part(self, name: str) -> "ConfigReader":
        """Return a reader of the object under a name, of no attributes if it is absent."""
        value, path = self.get(name), f"{self.path}{name}."
        if not isinstance(value, dict | None):
            self.add_problem(name, "expected an object.")
        for known in self._sections:
            if known.path == path:
                return known
        inner = ConfigReader(value if isinstance(value, dict) else {}, path=path)
        self._sections.append(inner)
        return inner

    def unsupported(self, ignore: Collection[str] = (), *, unread: bool = True) -> list[str]:
        """Return all recorded problems, and attributes that were never read.

        Args:
            ignore: Attributes that, according to the user, do not change the model.
            unread: Whether to include attributes that were not read.
        """
        unsupported_lines = [p for p in self.problems if p.split(" = ")[0] not in ignore]
        for name, value in self.values.items() if unread else ():
            path = f"{self.path}{name}"
            harmless = (
                name in IGNORED_ATTRIBUTES or name.endswith(IGNORED_SUFFIXES) or value is None
            )
            neutral = name in NEUTRAL_VALUES and value in NEUTRAL_VALUES[name]
            if not (name in self.names_read or harmless or neutral or path in ignore):
                reason = REASONS.get(name, "unknown attribute, which may change the model")
                unsupported_lines.append(f"{path} = {value!r}: {reason}.")
        for inner in self._sections:
            unsupported_lines += inner.unsupported(ignore, unread=unread)
        return unsupported_lines

    def check(
        self,
        where: str,
        ignore: Collection[str] = (),
        *,
        unread: bool = True,
        hint: str = IGNORE_HINT,
    ) -> None:
        """Raise if any attribute is not supported.

        Args:
            where: Name of the file in the message.
            ignore: Attributes that, according to the user, do not change the model.
            unread: As for `unsupported`.
            hint: Advice at the end of the message.

        Raises:
            ValueError: Attributes are not supported; the message lists all, with their values.
        """
        names = (ignore,) if isinstance(ignore, str) else ignore
        unsupported_lines = self.unsupported(names, unread=unread)
        if unsupported_lines:
            lines = "\n".join(f"  {line}" for line in unsupported_lines)
            raise ValueError(
                f"{where}: {len(unsupported_lines)} attributes are not supported:\n{lines}\n{hint}"
            )

    def attributes_with_number(self, complaint: str) -> list[str]:
        """Return attributes that were read and whose number occurs in an error message."""
        number_texts = re.findall(r"-?\d[\d.]*(?:e[+-]?\d+)?", complaint.partition("got ")[2])
        refused = {float(text.rstrip(".")) for text in number_texts}
        attributes = [
            f"{self.path}{name} = {value!r}"
            for name, value in self.values.items()
            if name in self.names_read and _has_json_type(value, float) and value in refused
        ]
        return attributes + [
            attribute
            for inner in self._sections
            for attribute in inner.attributes_with_number(complaint)
        ]

    def _typed(self, name: str, default: Any, kind: type, stand_in: Any) -> Any:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if _has_json_type(value, kind):
            return kind(value)
        self.add_problem(name, f"expected a value of type {kind.__name__}.")
        return stand_in


def _has_json_type(value: Any, kind: type) -> bool:
    """Whether a JSON value has this type; an integer may be written 4.0."""
    if isinstance(value, bool) or kind in (bool, str):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if kind is int and isinstance(value, float) and not value.is_integer():
        return False
    return isinstance(value, int | float) and abs(value) <= FLOAT32_MAX
