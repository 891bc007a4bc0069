"""A family as Llama with other defaults, biases, windows, norms or feed-forward networks."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import DeepSeekMoE, has_feed_forward_biases
from jaxformer.interop.families.llama_like_options import (
    NORM_RULES,
    Branch,
    Dense,
    OneRope,
    Windows,
)
from jaxformer.interop.families.option_fields import (
    Field,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping

FEED_FORWARD_BIAS = ("feed_forward",)
HEAD_BIAS = ("head",)


@dataclass(frozen=True)
class BiasField:
    """A field of config.json that says whether some linear layers have biases.

    Attributes:
        name: The field.
        layers: Projections of the attention, `FEED_FORWARD_BIAS` or `HEAD_BIAS`.
        default: Its value if the file lacks it.
    """

    name: str
    layers: tuple[str, ...]
    default: bool = False


@dataclass(frozen=True)
class LlamaLike:
    """A decoder with rotary positions and grouped queries; by default it is Llama.

    Attributes:
        model_type: As in `Family`.
        architecture: As in `Family`.
        sizes: Defaults of the sizes, which other files have.
        kv_heads: Default of the number of KV heads; None is all heads.
        head_dim: Default of the width of a head; None is model_dim / num_heads.
        norm: The norm, with the default of its eps.
        norm_field: Field of the eps; None has none.
        tied: Default of ``tie_word_embeddings``.
        biases: Fields that say which linear layers have biases.
        constant_biases: Projections that always have biases.
        qk_norm: Norms of queries and keys, with the eps of `norm`; None has none.
        qk_norm_rules: Their mapping rules.
        qk_norm_field: Field that says whether there are such norms; None always has them.
        norm_placement: Where the norms of the branches are; a key of `NORM_RULES`.
        norm_rules: Mapping rules of these norms; None are those of `NORM_RULES`.
        embedding_norm: Whether the embedding has the norm too.
        block: How the branches are joined.
        attention_rules: Mapping rules of the projections.
        top_level: Mapping rules outside the layers.
        sinks: Whether each head has a sink.
        output_gate: Gate on the outputs of the heads.
        windows: Sliding windows.
        positions: RoPE of the layers.
        branch: Feed-forward networks.
        fields: Fields that say other options.
        constants: Fields that must be absent, null, or this value.
        unused: Fields without effect.
        not_written: Fields of other families that this one does not have.
        heads_divide_width: Whether transformers requires that num_heads divides model_dim.
        ignored_tensors: Patterns of tensors that are not parameters, as in `Family`.
        in_transformers: As in `Family`.
    """

    model_type: str
    architecture: str
    _: KW_ONLY
    sizes: Mapping[str, int] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    norm: c.Norm = c.RMSNorm()
    norm_field: str | None = "rms_norm_eps"
    tied: bool = False
    biases: tuple[BiasField, ...] = ()
    constant_biases: tuple[str, ...] = ()
    qk_norm: c.QKNorm | None = None
    qk_norm_rules: tuple[MappingRule, ...] = p.QK_NORMS
    qk_norm_field: str | None = None
    norm_placement: Any = "pre"
    norm_rules: tuple[MappingRule, ...] | None = None
    embedding_norm: bool = False
    block: Any = "serial"
    attention_rules: tuple[MappingRule, ...] = p.ATTENTION
    top_level: tuple[MappingRule, ...] = p.TOP_LEVEL
    sinks: bool = False
    output_gate: c.OutputGate | None = None
    windows: Windows = Windows()
    positions: OneRope = OneRope()
    branch: Branch = Dense()
    fields: tuple[Field, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    not_written: tuple[str, ...] = ()
    heads_divide_width: bool = False
    ignored_tensors: tuple[str, ...] = ()
    in_transformers: bool = True

    def family(self) -> Family:
        """The family."""
        return Family(
            self.model_type,
            self.architecture,
            self.read,
            self.write,
            decoder_mapping(self.top_level, *self.layer_rules()),
            ignored_tensors=(*INV_FREQ_PATTERNS, *self.ignored_tensors),
            predicts_further_tokens=isinstance(self.branch, DeepSeekMoE),
            in_transformers=self.in_transformers,
        )

    def all_norm_rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of the norms of the branches."""
        return NORM_RULES[self.norm_placement] if self.norm_rules is None else self.norm_rules

    def layer_rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        attention = (*self.attention_rules, *self.qk_norm_rules)
        return (*self.all_norm_rules(), *attention, *self.branch.rules)

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        for name, value in self.constants.items():
            reader.require_value(name, value)
        for name in self.unused:
            reader.get(name)
        biased = self.read_biased(reader)
        sizes, options = p.read_sizes(reader, **self.sizes), read_options(reader, self.fields)
        windows = self.windows.read(reader, sizes["num_layers"])
        norm, qk_norm = self.read_norms(reader)
        heads: dict[str, Any] = dict(
            **p.read_heads(
                reader,
                heads=self.sizes.get("num_attention_heads"),
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
            ),
            positions=self.positions.read(reader, windows),
            windows=windows,
            qk_norm=qk_norm,
            sinks=self.sinks,
            output_gate=self.output_gate,
            query_scaling=self.positions.read_query_scaling(reader),
            biases=tuple(name for name in p.ALL_BIASES if name in biased),
        )
        branches = self.branch.read(reader, bias={*FEED_FORWARD_BIAS} <= biased)
        config = c.TransformerConfig(
            **sizes,
            attention=c.MultiHead(**heads),
            feed_forward=branches,
            norm=norm,
            norm_placement=self.norm_placement,
            block=self.block,
            embedding=c.Embedding(norm=norm if self.embedding_norm else None),
            head=c.LMHead(
                tied=reader.boolean("tie_word_embeddings", self.tied), bias={*HEAD_BIAS} <= biased
            ),
        )
        return with_options(config, options)

    def read_biased(self, reader: ConfigReader) -> set[str]:
        """Names of the linear layers with biases."""
        biased = set(self.constant_biases)
        for bias in self.biases:
            if reader.boolean(bias.name, bias.default):
                biased |= {*bias.layers}
        return biased

    def read_norms(self, reader: ConfigReader) -> tuple[c.Norm, c.QKNorm | None]:
        """The norm, and that of queries and keys."""
        norm, qk_norm = self.norm, self.qk_norm
        if self.norm_field is not None:
            norm = replace(norm, eps=reader.number(self.norm_field, norm.eps))
        if self.qk_norm_field is not None and not reader.boolean(self.qk_norm_field, False):
            qk_norm = None
        return norm, qk_norm and replace(qk_norm, norm=replace(qk_norm.norm, eps=norm.eps))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        if not isinstance(config.topology, c.Decoder):
            return None
        positions, branch = self.positions.write(config), self.branch.write(config)
        if positions is None or branch is None:
            return None
        if self.heads_divide_width and config.model_dim % p.heads_of(config).num_heads:
            return None
        biased = set[str](p.heads_of(config).biases)
        if has_feed_forward_biases(config):
            biased |= {*FEED_FORWARD_BIAS}
        if config.head.bias:
            biased |= {*HEAD_BIAS}
        has_qk_norm = p.heads_of(config).qk_norm is not None
        fields = {
            **p.write_sizes(config),
            **({} if self.norm_field is None else {self.norm_field: config.norm.eps}),
            **positions,
            **{bias.name: {*bias.layers} <= biased for bias in self.biases},
            **({} if self.qk_norm_field is None else {self.qk_norm_field: has_qk_norm}),
            **self.windows.write(config),
            **write_options(config, self.fields),
            **branch,
        }
        return {name: value for name, value in fields.items() if name not in self.not_written}
