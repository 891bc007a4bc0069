"""A family as Llama with other defaults, biases, windows, norms or feed-forward networks."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    DeepSeekMoE,
    has_feed_forward_biases,
    with_branches,
)
from jaxformer.interop.families.llama_like_options import (
    NORM_RULES,
    Branch,
    LlamaGLU,
    NoWindows,
    OneRope,
    Windows,
    read_multipliers,
    write_multipliers,
)
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping

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
    """A pre-norm decoder with RMSNorm, rotary positions and grouped queries.

    Attributes:
        model_type: As in `Family`.
        architecture: As in `Family`.
        kv_heads: Default of the number of KV heads; None is all heads.
        head_dim: Default of the width of a head; None is model_dim / num_heads.
        eps: Default of the RMSNorm's eps.
        tied: Default of ``tie_word_embeddings``.
        biases: Fields that say which linear layers have biases.
        constant_biases: Projections that always have biases.
        qk_norm: What the norms of queries and keys are over; None has none.
        qk_norm_placement: Whether these norms come before or after RoPE.
        qk_norm_rules: Their mapping rules.
        qk_norm_field: Field that says whether there are such norms; None always has them.
        norm_placement: Where the norms of the branches are; a key of `NORM_RULES`.
        norm_rules: Mapping rules of these norms; None are those of `NORM_RULES`.
        sinks: Whether each head has a sink.
        output_gate: Gate on the outputs of the heads.
        windows: Sliding windows.
        positions: RoPE of the layers.
        branch: Feed-forward networks.
        unsupported: Fields that must be absent or null.
        heads_divide_width: Whether transformers requires that num_heads divides model_dim.
        has_multipliers: Whether embedding, scores, branches and logits have multipliers.
        ignored_tensors: Patterns of tensors that are not parameters, as in `Family`.
    """

    model_type: str
    architecture: str
    _: KW_ONLY
    kv_heads: int | None = None
    head_dim: int | None = None
    eps: float = 1e-6
    tied: bool = False
    biases: tuple[BiasField, ...] = ()
    constant_biases: tuple[str, ...] = ()
    qk_norm: Any = None
    qk_norm_placement: Any = "before_rope"
    qk_norm_rules: tuple[MappingRule, ...] = p.QK_NORMS
    qk_norm_field: str | None = None
    norm_placement: Any = "pre"
    norm_rules: tuple[MappingRule, ...] | None = None
    sinks: bool = False
    output_gate: c.OutputGate | None = None
    windows: Windows = NoWindows()
    positions: OneRope = OneRope()
    branch: Branch = LlamaGLU()
    unsupported: tuple[str, ...] = ()
    heads_divide_width: bool = False
    has_multipliers: bool = False
    ignored_tensors: tuple[str, ...] = ()

    def family(self) -> Family:
        """The family."""
        norm_rules = self.norm_rules or NORM_RULES[self.norm_placement]
        rules = (*norm_rules, *p.ATTENTION, *self.qk_norm_rules, *self.branch.rules)
        top_level = (*p.TOP_LEVEL, MappingRule("lm_head.bias", "head/bias"))
        mapping = ParamMapping(top_level=top_level, stacks={"decoder": rules})
        return Family(
            self.model_type,
            self.architecture,
            self.read,
            self.write,
            mapping,
            ignored_tensors=(*INV_FREQ_PATTERNS, *self.ignored_tensors),
            predicts_further_tokens=isinstance(self.branch, DeepSeekMoE),
        )

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        for name in self.unsupported:
            reader.require_value(name, None)
        biased = set(self.constant_biases)
        for field in self.biases:
            if reader.boolean(field.name, field.default):
                biased |= {*field.layers}
        norm = c.RMSNorm(eps=reader.number("rms_norm_eps", self.eps))
        windows, has_qk_norm = self.windows.read(reader), self.qk_norm is not None
        if self.qk_norm_field is not None:
            has_qk_norm = reader.boolean(self.qk_norm_field, False)
        qk_norm = None
        if has_qk_norm:
            qk_norm = c.QKNorm(norm=norm, over=self.qk_norm, placement=self.qk_norm_placement)
        heads: dict[str, Any] = dict(
            **p.read_heads(reader, kv_heads=self.kv_heads, head_dim=self.head_dim),
            positions=self.positions.read(reader, windows),
            windows=windows,
            qk_norm=qk_norm,
            sinks=self.sinks,
            output_gate=self.output_gate,
            query_scaling=self.positions.read_query_scaling(reader),
            biases=tuple(name for name in p.ALL_BIASES if name in biased),
        )
        has_bias = {*FEED_FORWARD_BIAS} <= biased
        branches = self.branch.read(reader, bias=has_bias)
        config = c.TransformerConfig(
            **p.read_sizes(reader),
            attention=c.MultiHead(**heads),
            feed_forward=branches[-1:],
            norm=norm,
            norm_placement=self.norm_placement,
            head=c.LMHead(
                tied=reader.boolean("tie_word_embeddings", self.tied), bias={*HEAD_BIAS} <= biased
            ),
        )
        if self.has_multipliers:
            config = read_multipliers(reader, config)
        return with_branches(config, branches)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        has_rope = any(isinstance(x, c.Rope) for x in config.attention.positions)
        if not isinstance(config.topology, c.Decoder) or not has_rope:
            return None
        branch = self.branch.write(config)
        if branch is None:
            return None
        if self.heads_divide_width and config.model_dim % config.multi_head.num_heads:
            return None
        biased = set[str](config.multi_head.biases)
        if has_feed_forward_biases(config):
            biased |= {*FEED_FORWARD_BIAS}
        if config.head.bias:
            biased |= {*HEAD_BIAS}
        has_qk_norm = config.multi_head.qk_norm is not None
        biases = {field.name: {*field.layers} <= biased for field in self.biases}
        return {
            **p.write_sizes(config),
            "rms_norm_eps": config.norm.eps,
            **self.positions.write(config),
            **biases,
            **({} if self.qk_norm_field is None else {self.qk_norm_field: has_qk_norm}),
            **self.windows.write(config),
            **(write_multipliers(config) if self.has_multipliers else {}),
            **branch,
        }
