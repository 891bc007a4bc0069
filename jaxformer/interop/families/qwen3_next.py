"""Qwen 3 Next and Qwen 3.5: three layers of gated DeltaNet for one of gated attention.

Of Qwen 3.5 with images the text model is read.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import QwenMoE
from jaxformer.interop.families.llama_like_family import LlamaLike
from jaxformer.interop.families.llama_like_options import NORM_RULES, OneRope
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import (
    ConvolutionKernel,
    ExpertKernels,
    Fused,
    FusedPerGroup,
    Transform,
)

PREFIX = f"{p.LAYER_PREFIX}.linear_attn"
PARTS = ("query", "key", "value")
KINDS = {"linear_attention": c.LinearAttention, "full_attention": c.MultiHead}
SIZES = {  # fields of config.json, and their defaults
    "num_key_heads": ("linear_num_key_heads", 16),
    "num_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "convolution_width": ("linear_conv_kernel_dim", 4),
}


def kernels(*names: str) -> tuple[str, ...]:
    """Paths of the kernels of an attention layer."""
    return tuple(f"attention/{name}/kernel" for name in names)


def per_key_head(config: c.TransformerConfig) -> Transform:
    """Parts one after another for each key head."""
    layers = (config.layer(i).attention for i in range(config.num_layers))
    heads = {x.num_key_heads for x in layers if isinstance(x, c.LinearAttention)}
    return FusedPerGroup(groups=max(heads, default=None))


DELTA_NET = (
    MappingRule(
        f"{PREFIX}.conv1d.weight",
        kernels(*(f"{name}_convolution" for name in PARTS)),
        Fused(part=ConvolutionKernel()),
    ),
    MappingRule(f"{PREFIX}.A_log", "attention/rate/bias"),
    MappingRule(f"{PREFIX}.dt_bias", "attention/step_bias/bias"),
    *norm_rules(f"{PREFIX}.norm", "attention/norm"),
    *linear_rules(f"{PREFIX}.out_proj", "attention/out", input_axes=2),
)
FUSED_PROJECTIONS = (
    MappingRule(f"{PREFIX}.in_proj_qkvz.weight", kernels(*PARTS, "gate"), FusedPerGroup()),
    MappingRule(f"{PREFIX}.in_proj_ba.weight", kernels("beta", "step"), per_key_head),
)
PROJECTIONS = (
    MappingRule(f"{PREFIX}.in_proj_qkv.weight", kernels(*PARTS), Fused()),
    *linear_rules(f"{PREFIX}.in_proj_z", "attention/gate"),
    *linear_rules(f"{PREFIX}.in_proj_b", "attention/beta"),
    *linear_rules(f"{PREFIX}.in_proj_a", "attention/step"),
)


EXPERTS_PATH = "feed_forward/experts"
STACKED_EXPERTS = (  # as published; transformers writes a tensor per expert
    MappingRule(
        f"{p.LAYER_PREFIX}.mlp.experts.gate_up_proj",
        (f"{EXPERTS_PATH}/gate/kernel", f"{EXPERTS_PATH}/up/kernel"),
        Fused(part=ExpertKernels(), axis=1),
        alternative=True,
    ),
    MappingRule(
        f"{p.LAYER_PREFIX}.mlp.experts.down_proj",
        f"{EXPERTS_PATH}/down/kernel",
        ExpertKernels(),
        alternative=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Qwen35MoE(QwenMoE):
    """Renormalised experts and a shared one in every layer."""

    rules = (*STACKED_EXPERTS, *QwenMoE.rules)

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        for name, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1)):
            reader.require_value(name, value)
        reader.require_value("mlp_only_layers", [])
        return super().read(reader, bias=bias)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Sizes of the experts."""
        fields = super().write(config)
        unknown = "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "intermediate_size"
        return fields and {name: value for name, value in fields.items() if name not in unknown}


@dataclass(frozen=True)
class QwenHybrid(LlamaLike):
    """Gated DeltaNet and gated attention, by ``layer_types``; norms multiply by 1 + weight.

    Attributes:
        projections: Mapping rules of the projections of gated DeltaNet.
        has_image_positions: Whether ``rope_parameters`` splits features over three positions,
            which are equal in text.
    """

    _: KW_ONLY
    projections: tuple[MappingRule, ...] = FUSED_PROJECTIONS
    has_image_positions: bool = False

    def family(self) -> Family:
        """The family."""
        delta_net = (replace(x, kind=c.LinearAttention) for x in (*self.projections, *DELTA_NET))
        attention = (replace(x, kind=c.MultiHead) for x in (*p.GATED_ATTENTION, *p.QK_NORMS))
        rules = (*NORM_RULES["pre"], *delta_net, *attention, *self.branch.rules)
        mapping = ParamMapping(top_level=p.TOP_LEVEL, stacks={"decoder": rules})
        return replace(super().family(), mapping=mapping, attention_type=c.Hybrid)

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        section = reader.section("rope_parameters")
        if section is not None and self.has_image_positions:
            for name in ("mrope_section", "mrope_interleaved"):
                section.get(name)
        for name in ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
            reader.get(name)  # states are float32; multi-token prediction is left out
        reader.require_value("attn_output_gate", True)
        reader.require_value("output_gate_type", "swish", "silu")
        reader.require_value("attention_bias", False)
        config = super().read(reader)
        norm = replace(config.norm, scale_offset=1.0)
        attention = replace(config.multi_head, qk_norm=c.QKNorm(norm=norm))
        sizes: dict[str, Any] = {name: reader.integer(*field) for name, field in SIZES.items()}
        delta_net = c.LinearAttention(**sizes, output=c.GatedNorm(norm=config.norm))
        kinds: dict[str, Any] = {"linear_attention": delta_net, "full_attention": attention}
        count, interval = config.num_layers, reader.integer("full_attention_interval", 4)
        types = reader.sequence("layer_types", str)
        if types is None:
            names = (*("linear_attention",) * (interval - 1), "full_attention")
            types = tuple(names[i % len(names)] for i in range(count))
        if len(types) != count or set(types) != set(kinds):
            expected = f"expected linear_attention and full_attention for {count} layers."
            reader.add_problem("layer_types", expected)
            return config
        return replace(
            config,
            attention=c.Hybrid(kinds=shortest_cycle(tuple(kinds[name] for name in types))),
            feed_forward=self.branch.read(reader, bias=False),
            first_layers=(),
            norm=norm,
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        layers: list[Any] = [config.layer(i).attention for i in range(config.num_layers)]
        by_type: dict[str, set[Any]] = {
            name: {x for x in layers if isinstance(x, kind)} for name, kind in KINDS.items()
        }
        if [len(kinds) for kinds in by_type.values()] != [1, 1]:
            return None
        delta_net, attention = (next(iter(kinds)) for kinds in by_type.values())
        fields = super().write(replace(config, attention=attention, first_layers=()))
        types = [name for x in layers for name, kind in KINDS.items() if isinstance(x, kind)]
        if fields is None or len(types) != len(layers):
            return None
        sizes = {field: getattr(delta_net, name) for name, (field, _) in SIZES.items()}
        return {**fields, **sizes, "layer_types": types}


def with_images(text: Family) -> Family:
    """The family of models that also read images, of which the text model is read."""

    def read(reader: ConfigReader) -> c.TransformerConfig:
        for name in ("vision_config", "language_model_only"):
            reader.get(name)
        config = text.read(reader.section("text_config") or reader)
        tied = reader.boolean("tie_word_embeddings", False) or config.head.tied
        head = replace(config.head, tied=tied)
        return replace(config, head=head, model_type=text.model_type)

    return replace(
        text,
        model_type=text.model_type.removesuffix("_text"),
        architecture=text.architecture.replace("CausalLM", "ConditionalGeneration"),
        read=read,
        write=lambda config: None,
        ignored_tensors=(*text.ignored_tensors, r"model\.visual\..*"),
        key_renames=((r"^model\.language_model\.", "model."),),
    )


ATTENTION: dict[str, Any] = dict(
    head_dim=256,
    positions=OneRope(max_length=32_768, fraction=0.25),
    qk_norm="head",
    output_gate=c.OutputGate(),
    ignored_tensors=(r"mtp\..*",),  # multi-token prediction, which transformers ignores too
)
EXPERTS: dict[str, Any] = dict(width=512, dense_width=512, shared_width=512, renormalise=True)
TEXT: dict[str, Any] = dict(projections=PROJECTIONS, has_image_positions=True, **ATTENTION)
QWEN_3_5 = (
    QwenHybrid("qwen3_5_text", "Qwen3_5ForCausalLM", kv_heads=4, **TEXT).family(),
    QwenHybrid(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        kv_heads=2,
        branch=Qwen35MoE(num_experts=256, top_k=8, **EXPERTS),
        **TEXT,
    ).family(),
)
FAMILIES = (
    QwenHybrid(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        kv_heads=2,
        branch=QwenMoE(num_experts=512, top_k=10, **EXPERTS | {"dense_width": 5632}),
        **ATTENTION,
    ).family(),
    *QWEN_3_5,
    *map(with_images, QWEN_3_5),
)
