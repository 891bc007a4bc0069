"""Mamba and Falcon Mamba alone; Jamba, with attention and experts in some layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    BiasesField,
    Field,
    Fields,
    NotWritten,
    Options,
    Unused,
    fixed,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mamba import BACKBONE_TOP_LEVEL, BAMBA_TOP_LEVEL
from jaxformer.interop.families.mixers import Everywhere, Mixer, of_kind
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import DEPTHWISE, FLAT, LINEAR, LINEAR_OF_HEADS
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

LAYER = c.SelectiveScan(width=1, step_rank=1)
FALCON_LAYER = c.SelectiveScan(width=1, step_rank=1, norm=c.RMSNorm(parameters="none"))
JAMBA_LAYER = c.SelectiveScan(width=1, step_rank=1, norm=c.RMSNorm())


def selective_scan_rules(prefix: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a Mamba layer; Jamba's has norms."""
    names = {"step": "dt_layernorm", "write": "b_layernorm", "read": "c_layernorm"}
    norms = {f"attention/{ours}_norm": name for ours, name in names.items()}
    return of_kind(
        c.SelectiveScan,
        *m.fused_rules(f"{prefix}.in_proj", "attention", ("value", "gate")),
        m.MappingRule(f"{prefix}.conv1d.weight", "attention/convolution/kernel", DEPTHWISE),
        m.MappingRule(f"{prefix}.conv1d.bias", "attention/convolution/bias", FLAT),
        m.MappingRule(f"{prefix}.x_proj.weight", "attention/selection/kernel", LINEAR_OF_HEADS),
        m.MappingRule(f"{prefix}.dt_proj.weight", "attention/step/kernel", LINEAR),
        m.MappingRule(f"{prefix}.dt_proj.bias", "attention/step_bias/bias"),
        m.MappingRule(f"{prefix}.A_log", "attention/rate/bias"),
        m.MappingRule(f"{prefix}.D", "attention/skip/bias"),
        *m.layer_norm_rules(prefix, **norms),
        *m.linear_rules(f"{prefix}.out_proj", "attention/out", input_axes=2),
    )


def sixteenth(options: Options) -> int:
    """A sixteenth of the width of the model, rounded up."""
    return math.ceil(options["model_dim"] / 16)


def read_rank(reader: ConfigReader, name: str, default: int | None) -> int:
    """The rank of the steps; "auto" is the default."""
    if reader.get(name) == "auto":
        return default or 1
    return reader.integer(name, default)


@dataclass(frozen=True, kw_only=True)
class ScanFields:
    """The fields that describe a Mamba layer.

    Attributes:
        kind: The layer, with any sizes.
        fields: Fields that set its options, but for its width.
        expand: Field of its width over that of the model, 2 by default.
        width: Field of its width, which takes precedence; None has no such field.
    """

    kind: c.SelectiveScan
    fields: Fields
    expand: str = "expand"
    width: str | None = "intermediate_size"

    def read(self, reader: ConfigReader, options: Options) -> c.SelectiveScan:
        """Read the layer."""
        reader.require_value("hidden_act", "silu", "swish")
        width = reader.integer(self.expand, 2) * options["model_dim"]
        if self.width is not None:
            width = reader.integer(self.width, width)
        own = read_options(reader, self.fields, options)
        return with_options(self.kind, {**own, "width": width})

    def write(self, model: c.TransformerConfig, kind: Any) -> Options | None:
        """Return the fields of the layer."""
        entries = write_options(kind, self.fields)
        if entries is None:
            return None
        entries[self.expand] = max(1, kind.width // model.model_dim)
        if self.width is not None:
            entries[self.width] = kind.width
        return entries


@dataclass(frozen=True)
class EveryNth:
    """The layers from an offset on, one in each period.

    Attributes:
        name: First word of the fields of the period and the offset.
        period: Default of the period.
        offset: Default of the offset.
    """

    name: str
    period: int
    offset: int

    def read(self, reader: ConfigReader, num_layers: int, default: Any = None) -> list[bool]:
        """Whether each layer is one of them."""
        period = reader.positive_integer(f"{self.name}_layer_period", self.period)
        offset = reader.integer(f"{self.name}_layer_offset", self.offset)
        if not 0 <= offset < period:
            reader.add_problem(f"{self.name}_layer_offset", f"expected 0 to {period - 1}.")
        return [i % period == offset for i in range(num_layers)]

    def write(self, layers: Sequence[bool]) -> Options | None:
        """The period and the offset."""
        first, *later = [i for i, is_one in enumerate(layers) if is_one] or [len(layers)]
        period = later[0] - first if later else len(layers) + 1
        if first >= period or [i % period == first for i in range(len(layers))] != [*layers]:
            return None
        return {f"{self.name}_layer_period": period, f"{self.name}_layer_offset": first}


class JambaLayers(EveryNth):
    """Experts in these layers, if there is more than one."""

    def read(self, reader: ConfigReader, num_layers: int, default: Any = None) -> list[bool]:
        """Whether each layer has experts."""
        have_experts = super().read(reader, num_layers)
        return have_experts if reader.integer("num_experts", 16) > 1 else [False] * num_layers


SIZES: Fields = (
    Field("state_size", "state_dim", 16),
    Field("time_step_rank", "step_rank", sixteenth, read_rank),
    Field("conv_kernel", "convolution_width", 4),
    BiasesField("use_bias", "biases", layers=("in", "out")),
    BiasesField("use_conv_bias", "biases", True, layers=("convolution",)),
)
JAMBA_SIZES: Fields = (
    Field("mamba_d_state", "state_dim", 16),
    Field("mamba_dt_rank", "step_rank", sixteenth, read_rank),
    Field("mamba_d_conv", "convolution_width", 4),
    BiasesField("mamba_proj_bias", "biases", layers=("in", "out")),
    BiasesField("mamba_conv_bias", "biases", True, layers=("convolution",)),
    NotWritten(Field("rms_norm_eps", "norm.eps", 1e-6)),
)
EXPERTS = e.Experts(
    moe=c.MoE(expert=c.GLU(hidden_dim=1), num_experts=2, router=c.Router(renormalise=False)),
    fields=(
        *(Field("intermediate_size", "expert.hidden_dim", 14_336), e.ACTIVATION),
        Field("num_experts", "num_experts", 16, alias="num_local_experts"),
        Field("num_experts_per_tok", "top_k", 2),
    ),
    layers=JambaLayers("expert", 2, 1),
    dense=e.dense_fields(14_336),
)
# Initial values, and forms of a computation.
UNUSED = Unused(
    *("time_step_scale", "time_step_min", "time_step_max", "time_step_init_scheme"),
    *("time_step_floor", "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy"),
    *("use_associative_scan", "use_falcon_mambapy", "fused_add_norm", "pad_vocab_size_multiple"),
    *("d_inner", "d_model", "n_layer", "rms_norm", "ssm_cfg", "dt_rank"),
)


def mamba(model_type: str, architecture: str, layer: ScanFields) -> Family:
    """A model of Mamba layers alone, without feed-forward networks."""
    return Family(
        model_type,
        architecture,
        like(LLAMA, attention=layer.kind, feed_forward=(c.NoFeedForward(),)),
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            Field("tie_word_embeddings", "head.tied", True),
            *(Everywhere(layer), UNUSED),
        ),
        m.decoder_mapping(
            *BACKBONE_TOP_LEVEL,
            *m.norm_rules("backbone.layers.{layer}.norm", "pre_attention_norm"),
            *selective_scan_rules("backbone.layers.{layer}.mixer"),
        ),
        attention_types=(c.SelectiveScan,),
    )


FALCON = ScanFields(kind=FALCON_LAYER, fields=(*SIZES, Field("mixer_rms_eps", "norm.eps", 1e-6)))
FEED_FORWARD = f"{p.LAYER_PREFIX}.feed_forward"
FAMILIES = (
    mamba("mamba", "MambaForCausalLM", ScanFields(kind=LAYER, fields=SIZES)),
    # As Mamba, except: what a token selects is normed.
    mamba("falcon_mamba", "FalconMambaForCausalLM", FALCON),
    # As Llama, except: Mamba in place of most attention, which has no positions; experts.
    Family(
        "jamba",
        "JambaForCausalLM",
        like(LLAMA, positions=(None,)),
        (
            *p.decoder(heads=32, kv_heads=8),
            Mixer(
                kind=ScanFields(
                    kind=JAMBA_LAYER, fields=JAMBA_SIZES, expand="mamba_expand", width=None
                ),
                types=EveryNth("attn", 8, 4),
            ),
            *(EXPERTS, Unused("use_mamba_kernels", "use_mambapy", "use_associative_scan")),
            Unused("num_logits_to_keep", "calc_logits_for_entire_prompt"),  # in released files
            *fixed(mamba_inner_layernorms=True),
        ),
        m.decoder_mapping(
            *BAMBA_TOP_LEVEL,
            *m.layer_norm_rules(
                p.LAYER_PREFIX,
                pre_attention_norm="input_layernorm",
                pre_feed_forward_norm="pre_ff_layernorm",
            ),
            *selective_scan_rules(f"{p.LAYER_PREFIX}.mamba"),
            *of_kind(c.MultiHead, *m.attention_rules(p.SELF_ATTENTION)),
            *m.glu_rules(FEED_FORWARD),
            *e.expert_rules(FEED_FORWARD, router="router"),
        ),
        attention_types=(c.SelectiveScan, c.MultiHead),
    ),
)
