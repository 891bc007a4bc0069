"""Qwen 3 Next and Qwen 3.5: three layers of gated DeltaNet for one of gated attention.

Of Qwen 3.5 with images the text model is read.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import LlamaHybrid
from jaxformer.interop.families.llama_like_experts import (
    QWEN_RULES,
    QwenMoE,
    qwen_experts,
    stacked_rules,
)
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.family import with_images
from jaxformer.interop.param_mapping import MappingRule, linear_rules, norm_rules
from jaxformer.interop.transforms import ConvolutionKernel, Fused, FusedPerGroup, Transform

PREFIX = f"{p.LAYER_PREFIX}.linear_attn"
PARTS = ("query", "key", "value")


def kernels(*names: str) -> tuple[str, ...]:
    """Paths of the kernels of an attention layer."""
    return tuple(f"attention/{name}/kernel" for name in names)


def per_key_head(config: c.TransformerConfig) -> Transform:
    """Parts one after another for each key head."""
    layers = (layer.attention for layer in config.layers)
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


STACKED_EXPERTS = stacked_rules(  # as published; transformers writes a tensor per expert
    f"{p.LAYER_PREFIX}.mlp.experts.gate_up_proj",
    f"{p.LAYER_PREFIX}.mlp.experts.down_proj",
    alternative=True,
)


@dataclass(frozen=True, kw_only=True)
class Qwen35MoE(QwenMoE):
    """Renormalised experts and a shared one in every layer."""

    rules: tuple[MappingRule, ...] = (*STACKED_EXPERTS, *QWEN_RULES)

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        for name, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1)):
            reader.require_value(name, value)
        reader.require_value("mlp_only_layers", [])
        return super().read(reader, bias=bias)


@dataclass(frozen=True)
class QwenHybrid(LlamaHybrid):
    """Gated DeltaNet and gated attention, by ``layer_types``; norms multiply by 1 + weight.

    Attributes:
        has_image_positions: Whether ``rope_parameters`` splits features over three positions,
            which are equal in text.
    """

    _: KW_ONLY
    has_image_positions: bool = False

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        section = reader.section("rope_parameters")
        if section is not None and self.has_image_positions:
            for name in ("mrope_section", "mrope_interleaved"):
                section.get(name)
        reader.require_value("output_gate_type", "swish", "silu")
        return super().read(reader)

    def read_mixer(self, reader: ConfigReader, config: c.TransformerConfig) -> c.LinearAttention:
        """Gated DeltaNet."""
        output = c.GatedNorm(norm=replace(config.norm, scale_offset=0.0))
        return replace(super().read_mixer(reader, config), output=output)

    def default_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Attention in the last of every ``full_attention_interval`` layers."""
        interval = max(1, reader.integer("full_attention_interval", 4))
        return tuple((i + 1) % interval == 0 for i in range(num_layers))


OFFSET_NORM = c.RMSNorm(scale_offset=1.0)
ATTENTION: dict[str, Any] = dict(
    head_dim=256,
    positions=OneRope(max_length=32_768, fraction=0.25),
    norm=OFFSET_NORM,
    qk_norm=c.QKNorm(norm=OFFSET_NORM),
    attention_rules=p.GATED_ATTENTION,
    mixer_fields=(
        Field("linear_num_key_heads", "num_key_heads", 16),
        Field("linear_num_value_heads", "num_heads", 32),
        Field("linear_key_head_dim", "key_dim", 128),
        Field("linear_value_head_dim", "value_dim", 128),
        Field("linear_conv_kernel_dim", "convolution_width", 4),
    ),
    constants={"attn_output_gate": True, "attention_bias": False},
    # States are float32; multi-token prediction is left out.
    unused=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    output_gate=c.OutputGate(),
    ignored_tensors=(r"mtp\..*",),  # multi-token prediction, which transformers ignores too
)
EXPERTS: dict[str, Any] = dict(width=512, dense_width=512, shared_width=512, renormalise=True)
TEXT: dict[str, Any] = dict(
    mixer_rules=(*PROJECTIONS, *DELTA_NET), has_image_positions=True, **ATTENTION
)
QWEN_3_5 = (
    QwenHybrid("qwen3_5_text", "Qwen3_5ForCausalLM", kv_heads=4, **TEXT).family(),
    QwenHybrid(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        kv_heads=2,
        branch=Qwen35MoE(**qwen_experts(256, 8, **EXPERTS)),
        not_written=("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
        **TEXT,
    ).family(),
)
FAMILIES = (
    QwenHybrid(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        kv_heads=2,
        mixer_rules=(*FUSED_PROJECTIONS, *DELTA_NET),
        branch=QwenMoE(**qwen_experts(512, 10, **EXPERTS | {"dense_width": 5632})),
        **ATTENTION,
    ).family(),
    *QWEN_3_5,
    *(
        with_images(
            text,
            lambda reader, tied: reader.boolean("tie_word_embeddings", False) or tied,
            unused=("vision_config", "language_model_only"),
            modules=r"model\.visual\..*",
        )
        for text in QWEN_3_5
    ),
)
