"""The text part of a folder whose model also reads images or sound: one rule for all of them."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Options, read_options
from jaxformer.interop.config_reader import NEUTRAL_VALUES, ConfigReader
from jaxformer.interop.family import Family

SECTIONS = "text_config", "language_config", "llm_config"
# Types of text parts that are another family.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "emu3_text_model": "llama",
        "exaone4_5_text": "exaone4",
        "glm4v_moe_text": "glm4_moe",
        "glm4v_text": "glm4",
        "granite4_vision_text": "granite",
        "granite_docling_text": "granite",
        "kimi_k2": "deepseek_v3",
        "paddleocr_vl_text": "ernie4_5",
        "qwen2_5_vl_text": "qwen2",
        "qwen2_vl_text": "qwen2",
        "qwen3_vl_moe_text": "qwen3_moe",
        "qwen3_vl_text": "qwen3",
    }
)
# Defaults in transformers that differ from the family's, or that the family lacks.
LLAMA_SIZES = {
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"intermediate_size": 11_008, "vocab_size": 32_000},
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4v_text": {"head_dim": lambda x: x["hidden_size"] // x["num_attention_heads"]},
        "llama": LLAMA_SIZES,
        "mistral": {**LLAMA_SIZES, "intermediate_size": 14_336},
        "qwen2": {**LLAMA_SIZES, "intermediate_size": 22_016, "vocab_size": 151_936},
    }
)
# Folders that have the fields of the text beside the fields of the images.
FLAT: Mapping[str, str] = MappingProxyType({"qwen2_5_vl": "qwen2", "qwen2_vl": "qwen2"})
KEY_RENAMES = (
    (r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head)", "model."),
    (r"^(model\.)?(language_model|text_model)\.lm_head\.", "lm_head."),
    (r"^model\.blocks\.(\d+)\.", r"model.layers.\1."),  # Kimi K2.5, as transformers 5 writes it
)
# Positions in pictures, which are equal in text.
IMAGE_POSITIONS = "mrope_section", "mrope_interleaved"
# Fields of the whole model that may change what the text part computes.
OUTER_FIELDS = frozenset({*NEUTRAL_VALUES, "quantization_config", "tie_word_embeddings"})


def without_multiplier(options: Options) -> Options:
    """The class of the whole model does not multiply the logits; the class of the text does."""
    return {**options, "head.multiplier": 1.0}


def by_halves(options: Options) -> Options:
    """RoPE turns the halves of a head, where the family of the text turns neighbours."""
    (rope,) = options["attention.positions"]
    return {**options, "attention.positions": (replace(rope, pairing="halves"),)}


# Fields of the text part that do not matter for text alone, by the type of the whole model.
UNUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"paligemma": ("num_image_tokens", "use_bidirectional_attention")}
)
# What differs in the class of the whole model, by its type.
DIFFERENCES: Mapping[str, Callable[[Options], Options]] = MappingProxyType(
    {
        "aya_vision": without_multiplier,
        "cohere2_vision": without_multiplier,
        "paddleocr_vl": by_halves,
    }
)


@dataclass(frozen=True)
class TextPart:
    """The text model inside a config.json, which is written alone.

    Attributes:
        text: Its family.
        section: The object that describes it; None is the whole file.
    """

    text: Family
    section: str | None

    def read(self, reader: ConfigReader, options: Options) -> Options:
        part = reader
        if self.section is not None:
            part = reader.part(self.section)
            for name in reader.values.keys() - OUTER_FIELDS:
                reader.get(name)
        reader.get("vision_config")
        whole, tied = str(reader.values.get("model_type")), "tie_word_embeddings"
        for name in UNUSED.get(whole, ()):
            part.get(name)
        for name, value in DEFAULTS.get(str(part.values.get("model_type")), {}).items():
            if name not in part:
                part.values = {
                    **part.values,
                    name: value(part.values) if callable(value) else value,
                }
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(part.values.get(name), dict):
                for position in IMAGE_POSITIONS:
                    part.part(name).get(position)
        read = {**read_options(part, self.text.fields), "model_type": self.text.model_type}
        if tied in reader:  # the whole model's field takes precedence over the text's
            read["head.tied"] = reader.boolean(tied, False)
        difference = DIFFERENCES.get(whole)
        return read if difference is None else {**difference(read), "model_type": None}

    def write(self, model: c.TransformerConfig) -> None:
        """None: the family of the text writes it."""


def described_parts(values: Mapping[str, Any]) -> list[str]:
    """Names of the objects of a config.json that describe a text model."""
    return [name for name in SECTIONS if isinstance(values.get(name), dict)]


def text_family(
    values: Mapping[str, Any], families: Mapping[str, Family], usual_type: str | None
) -> Family | None:
    """The family of the text part of a config.json; None if there is none that is read.

    Args:
        values: The config.json.
        families: All families by type.
        usual_type: Type of the text part where the file does not say it.

    Returns:
        A family that reads the text part and leaves all other tensors out.

    Raises:
        ValueError: The file describes two text parts.
    """
    kind = str(values.get("model_type"))
    sections = described_parts(values)
    if len(sections) > 1:
        raise ValueError(f"the file describes two text models, as {' and '.join(sections)}.")
    section = sections[0] if sections else None
    text_type = FLAT.get(kind, "")
    if section is not None:
        text_type = str(values[section].get("model_type", usual_type))
    text = families.get(ALIASES.get(text_type, text_type))
    if text is None:
        return None
    return replace(
        text,
        model_type=kind,
        fields=(TextPart(text, section),),
        key_renames=(*KEY_RENAMES, *text.key_renames),
        ignored_tensors=(*text.ignored_tensors, _other_modules(text)),
    )


def _other_modules(text: Family) -> str:
    """Pattern of the names of tensors that belong to no module of the text model."""
    rules = [*text.mapping.top_level, *itertools.chain(*text.mapping.stacks.values())]
    names = {rule.hf_name.removesuffix(".weight").removesuffix(".bias") for rule in rules}
    modules = {".".join(name.split(".")[:2]) for name in names}
    return rf"(?!({'|'.join(map(re.escape, sorted(modules)))})(\.|$)).*"
