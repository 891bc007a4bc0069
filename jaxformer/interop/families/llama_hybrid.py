"""Families like Llama with a mixer, such as linear attention, in place of most attention layers."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_family import LlamaLike
from jaxformer.interop.families.option_fields import (
    Field,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule


def one_of_each(
    config: c.TransformerConfig, mixer: type = c.LinearAttention, *, may_lack_kinds: bool = True
) -> tuple[Any, c.MultiHead] | None:
    """Return the options of the mixer and of attention, of which a model has one each.

    Of layers that the model lacks, an option that config.json can express is returned. None for
    models with further kinds of layers.
    """
    layers = {layer.attention for layer in config.layers} - {c.NoAttention()}
    mixers = [x for x in layers if isinstance(x, mixer)]
    attentions = [x for x in layers if isinstance(x, c.MultiHead)]
    counts = len(mixers), len(attentions)
    if max(counts) > 1 or sum(counts) < len(layers) or (0 in counts and not may_lack_kinds):
        return None
    width = config.model_dim
    no_mixer = c.LinearAttention(num_heads=1, num_key_heads=1, key_dim=1, value_dim=2 * width)
    no_attention = c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=width, positions=(None,))
    return next(iter(mixers), no_mixer), next(iter(attentions), no_attention)


@dataclass(frozen=True)
class LlamaHybrid(LlamaLike):
    """A decoder with a mixer in place of attention in some layers.

    Attributes:
        mixer: The option of the mixer, with any sizes.
        mixer_name: Its name in ``layer_types``.
        mixer_fields: Fields that set its options; their defaults may depend on "model_dim" and
            "attention_heads" of the model.
        mixer_rules: Mapping rules of its layers.
        may_lack_kinds: Whether all layers may be of one kind.
    """

    _: KW_ONLY
    mixer: Any = c.LinearAttention(num_heads=1, num_key_heads=1, key_dim=1, value_dim=1)
    mixer_name: str = "linear_attention"
    mixer_fields: tuple[Field, ...] = ()
    mixer_rules: tuple[MappingRule, ...] = ()
    may_lack_kinds: bool = False

    def family(self) -> Family:
        """The family."""
        return replace(super().family(), attention_types=(type(self.mixer), c.MultiHead))

    def layer_rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        attention = (*self.attention_rules, *self.qk_norm_rules)
        return (
            *self.all_norm_rules(),
            *(replace(rule, kind=type(self.mixer)) for rule in self.mixer_rules),
            *(replace(rule, kind=c.MultiHead) for rule in attention),
            *self.branch.rules,
        )

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config = super().read(reader)
        mixer, attention = self.read_mixer(reader, config), p.heads_of(config)
        is_full = self.read_layer_types(reader, config.num_layers)
        if all(is_full) and not self.may_lack_kinds:
            return config
        return replace(config, attention=tuple(attention if full else mixer for full in is_full))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        kinds = one_of_each(config, type(self.mixer), may_lack_kinds=self.may_lack_kinds)
        if kinds is None:
            return None
        mixer, attention = kinds
        model = replace(config, attention=attention)
        is_full = [isinstance(layer.attention, c.MultiHead) for layer in config.layers]
        fields = super().write(model)
        return fields and {
            **fields,
            **self.write_mixer(model, mixer),
            **self.write_layer_types(is_full),
        }

    def read_mixer(self, reader: ConfigReader, config: c.TransformerConfig) -> Any:
        """Read the mixer of a model whose remaining options are those of `config`."""
        context = {"attention_heads": p.heads_of(config).num_heads, "model_dim": config.model_dim}
        return with_options(self.mixer, read_options(reader, self.mixer_fields, context))

    def write_mixer(self, config: c.TransformerConfig, mixer: Any) -> dict[str, Any]:
        """Return the fields of the mixer."""
        return write_options(mixer, self.mixer_fields)

    def default_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Which layers have attention where ``layer_types`` is absent."""
        return tuple(i % 4 == 3 for i in range(num_layers))

    def read_layer_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Which layers have attention."""
        names, types = (self.mixer_name, "full_attention"), reader.sequence("layer_types", str)
        is_full = self.default_types(reader, num_layers)
        types = tuple(names[full] for full in is_full) if types is None else types
        if len(types) != num_layers or set(types) != set(names):
            expected = f"expected {names[0]} and {names[1]} for {num_layers} layers."
            reader.add_problem("layer_types", expected)
            return (True,) * num_layers
        return tuple(name == names[1] for name in types)

    def write_layer_types(self, is_full: list[bool]) -> dict[str, Any]:
        """The field of `read_layer_types`."""
        names = self.mixer_name, "full_attention"
        return {"layer_types": [names[full] for full in is_full]}
