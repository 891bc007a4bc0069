"""One Hugging Face model family: config reader and writer, and tensor mapping."""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from jaxformer import config as c
from jaxformer.interop.config_fields import ConfigField, Field, nested, read_options, with_options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.param_mapping import ParamMapping

FURTHER_LAYER_FIELDS = "num_nextn_predict_layers", "num_mtp_layers"  # 1 by default
# Of layers that read others' keys, in released files, and without effect
UNREAD_KEYS = r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\..*"
INV_FREQ_PATTERNS = (r".*\.rotary_emb\.inv_freq",)  # RoPE frequencies in many checkpoints


@dataclass(frozen=True)
class Family:
    """How to read and write one model_type.

    Attributes:
        model_type: `model_type` in config.json.
        architecture: The transformers class for `architectures` in config.json.
        template: A configuration of the family, with any sizes.
        fields: What config.json says, in the order in which it is read. What no field reads is not
            supported.
        mapping: Mapping of tensors to parameters.
        ignored_tensors: Patterns (of the whole name) of tensors that are not parameters, such as
            masks and frequencies.
        key_renames: Pairs of pattern and replacement, applied in order to every tensor name, for
            other spellings of the names in `mapping`.
        cut_together: Names of a layer's tensors, with "{layer}", among which a file may have cut a
            matrix at any rows: they are joined, and cut as the parameters are.
        constant_tensors: Function from config.json to tensors that are not parameters but that
            transformers expects, by name.
        weight_factors: Function from config.json to multipliers of activations, which the weights
            absorb: by name of a layer's tensor, one for each of its parameters. In what is written
            they are 1, unless `extra` has others.
        predicts_further_tokens: Whether a file may have layers after the last one, which predict
            tokens after the next and have no part in the logits (DeepSeek V3).
        lm_head_optional: Whether an untied head without a tensor uses the embedding.
        attention_types: Attention kinds that the layers may have; with one, all layers are alike.
        length_name: The field of the context length, where no position depends on it.
        in_transformers: Whether transformers includes the class; False for remote code.
    """

    model_type: str
    architecture: str
    template: c.TransformerConfig
    fields: tuple[ConfigField, ...]
    mapping: ParamMapping
    _: KW_ONLY
    ignored_tensors: tuple[str, ...] = INV_FREQ_PATTERNS
    key_renames: tuple[tuple[str, str], ...] = ()
    cut_together: tuple[str, ...] = ()
    constant_tensors: Callable[[Mapping[str, Any]], Mapping[str, np.ndarray]] | None = None
    weight_factors: Callable[[ConfigReader], Mapping[str, tuple[float, ...]]] | None = None
    predicts_further_tokens: bool = False
    lm_head_optional: bool = False
    attention_types: tuple[type, ...] = (c.MultiHead,)
    length_name: str = "max_position_embeddings"
    in_transformers: bool = True

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json; attributes that are not supported stay unread."""
        return with_options(self.template, read_options(reader, self.fields))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The most similar config.json, or None if there is none.

        The caller reads the result back to check that it is equal.
        """
        if type(config.topology) is not type(self.template.topology):
            return None
        plain = self._with_template_kinds(config)
        entries = dict[str, Any]()
        for row in self.fields:
            written = row.write(plain if isinstance(row, Field) else config)
            if written is None:
                return None
            entries |= written
        return nested(entries)

    def _with_template_kinds(self, config: c.TransformerConfig) -> c.TransformerConfig:
        """The model as if all layers had its first attention and network of the template's kind."""
        kind, network = type(self.template.attention), type(self.template.feed_forward[0])
        if type(config.attention) is kind and type(config.feed_forward[0]) is network:
            return config
        attentions = (part for layer in config.layers for part in layer.attention.parts)
        networks = (branch for branch in config.feed_forward if type(branch) is network)
        width = config.model_dim
        lacking = c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=width, positions=(None,))
        return replace(
            config,
            attention=next((x for x in attentions if type(x) is kind), lacking),
            feed_forward=(next(networks, config.feed_forward[0]),),
        )

    def mapping_for(self, values: Mapping[str, Any]) -> ParamMapping:
        """The mapping under this config.json."""
        if self.weight_factors is None:
            return self.mapping
        return self.mapping.with_factors(self.weight_factors(ConfigReader(values)))

    def absorbed_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json that are in the weights here, and not in the configuration."""
        reader = ConfigReader(values)
        if self.weight_factors is not None:
            self.weight_factors(reader)
        return {name: value for name, value in values.items() if name in reader.names_read}

    def rename_key(self, name: str) -> str:
        """Rename a tensor key to the name that the mapping uses."""
        for pattern, replacement in self.key_renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_ignored(self, name: str, config: c.TransformerConfig, values: Mapping[str, Any]) -> bool:
        """Whether a tensor is not a parameter of a model.

        Args:
            name: The tensor.
            config: The model.
            values: The config.json, which counts the layers that predict further tokens.
        """
        names, count = self.mapping.multi_token, config.num_layers
        if config.multi_token_prediction and names is not None:
            if name.startswith(names.prefix.replace("{layer}", str(count))):
                return name in names.copies_at(count)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if self.predicts_further_tokens and layer:
            counts = (values.get(field) for field in FURTHER_LAYER_FIELDS)
            further = next((count for count in counts if isinstance(count, int)), 1)
            if count <= int(layer[1]) < count + further:
                return True
        if layer and int(layer[1]) < count and re.fullmatch(UNREAD_KEYS, name):
            if config.layers[int(layer[1])].attention.cross_layer_kv:
                return True
        return any(re.fullmatch(pattern, name) for pattern in self.ignored_tensors)
