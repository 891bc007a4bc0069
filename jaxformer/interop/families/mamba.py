"""Mamba 2 alone, and Bamba, which has attention in a few layers; and how a file has their layer."""

import math
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
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mixers import (
    Everywhere,
    LayerNumbers,
    Mixer,
    linear_attention,
    of_kind,
)
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.interop.transforms import DEPTHWISE, FLAT
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.mamba import MAMBA_2

PROJECTIONS = ("gate", "value", "key", "query", "step")  # z, x, B, C and dt
CONVOLUTIONS = ("value", "key", "query")
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
MAMBA2_LAYER = linear_attention(
    decay=c.StepDecay(),
    delta_rule=False,
    beta="step",
    unit_vectors=False,
    scale=1.0,
    skip=True,
    output=c.GatedNorm(norm=c.RMSNorm(), over="group", placement="before_norm"),
)


def mamba2_rules(prefix: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a Mamba 2 layer."""
    convolved = tuple(f"{name}_convolution" for name in CONVOLUTIONS)
    return of_kind(
        c.LinearAttention,
        *m.fused_rules(f"{prefix}.in_proj", "attention", PROJECTIONS),
        *m.fused_rules(f"{prefix}.conv1d", "attention", convolved, DEPTHWISE),
        m.MappingRule(f"{prefix}.dt_bias", "attention/step_bias/bias"),
        m.MappingRule(f"{prefix}.A_log", "attention/rate/bias"),
        m.MappingRule(f"{prefix}.D", "attention/skip/bias"),
        m.MappingRule(f"{prefix}.norm.weight", "attention/norm/scale", FLAT),
        *m.linear_rules(f"{prefix}.out_proj", "attention/out", input_axes=2),
    )


class StepLimits:
    """``time_step_limit``, the smallest and the largest step of the decay; by default no limits."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        limits = reader.get("time_step_limit")
        numbers = [0.0, math.inf] if limits is None else limits
        if isinstance(numbers, list):
            numbers = [math.inf if x == INFINITY else x for x in numbers]
        is_pair = isinstance(numbers, list) and len(numbers) == 2
        are_numbers = is_pair and all(type(x) in (int, float) for x in numbers)
        if not (are_numbers and math.isfinite(numbers[0])):
            reader.add_problem("time_step_limit", "expected the smallest and the largest step.")
            numbers = [0.0, math.inf]
        smallest, largest = map(float, numbers)
        largest_step = None if largest == math.inf else largest
        return {"decay": c.StepDecay(min_step=smallest, max_step=largest_step)}

    def write(self, model: c.LinearAttention) -> Options:
        """The limits, unless they are the default."""
        decay = model.steps
        if decay is None or (decay.min_step == 0 and decay.max_step is None):
            return {}
        largest = INFINITY if decay.max_step is None else decay.max_step
        return {"time_step_limit": [decay.min_step, largest]}


@dataclass(frozen=True, kw_only=True)
class Mamba2Fields:
    """The fields that describe a Mamba 2 layer: their names, and defaults.

    Attributes:
        fields: Fields that set its options, but for the width of heads.
        head_dim: Field of this width.
        activation: Field of the activation after the convolution.
        inner_width: Field of the width of all heads, 1024 by default; null follows from `expand`.
            None has no such field.
        expand: Field of the ratio of the width of all heads to the model's width, 2 by default;
            None if heads may have any width.
        default_head_dim: Default of the width of a head; None follows from `expand`.
        kind: The layer, with any sizes.
    """

    fields: Fields
    head_dim: str
    activation: str = "hidden_act"
    inner_width: str | None = None
    expand: str | None = "expand"
    default_head_dim: int | None = None
    kind: c.LinearAttention = MAMBA2_LAYER

    def read(self, reader: ConfigReader, options: Options) -> c.LinearAttention:
        reader.require_value(self.activation, "silu", "swish")
        own = read_options(reader, self.fields, options)
        width = self._read_head_dim(reader, own["num_heads"])
        return with_options(self.kind, {**own, "value_dim": width})

    def _read_head_dim(self, reader: ConfigReader, heads: int) -> int:
        if self.expand is None:
            return reader.integer(self.head_dim, self.default_head_dim)
        name, total = f"{self.expand} * hidden_size", None
        expanded = reader.integer(self.expand, 2) * reader.integer("hidden_size")
        if self.inner_width is not None:
            total = reader.optional_integer(self.inner_width, 1024)
            name = name if total is None else self.inner_width
        total = expanded if total is None else total
        width = max(1, total // max(1, heads))
        if reader.get(self.head_dim) != "auto":
            width = reader.integer(self.head_dim, self.default_head_dim or width)
        if heads * width != total:
            reader.add_problem(
                self.head_dim,
                f"{heads} heads of {width} make {heads * width} features, but {name} is {total}.",
            )
        return width

    def write(self, model: c.TransformerConfig, kind: Any) -> Options | None:
        entries = write_options(kind, self.fields)
        if entries is None:
            return None
        entries[self.head_dim] = kind.value_dim
        if self.inner_width is not None:
            entries[self.inner_width] = kind.heads_width
        elif self.expand is not None:
            entries[self.expand] = kind.heads_width // model.model_dim
        return entries


GROUPS_AND_CONVOLUTION: Fields = (
    Field("n_groups", "num_key_heads", 8),
    Field("conv_kernel", "convolution_width", 4),
    BiasesField("use_bias", "biases", layers=("in", "out")),
    BiasesField("use_conv_bias", "biases", True, layers=("convolution",)),
)
MAMBA2 = Mamba2Fields(
    fields=(
        Field("num_heads", "num_heads", 128),
        Field("state_size", "key_dim", 128),
        *(*GROUPS_AND_CONVOLUTION, StepLimits()),
        NotWritten(Field("layer_norm_epsilon", "output.norm.eps", 1e-5)),
    ),
    head_dim="head_dim",
    default_head_dim=64,
)
BAMBA_SIZES: Fields = (
    Field("mamba_n_heads", "num_heads", 128),
    Field("mamba_n_groups", "num_key_heads", 1),
    Field("mamba_d_state", "key_dim", 256),
    Field("mamba_d_conv", "convolution_width", 4),
    BiasesField("mamba_conv_bias", "biases", True, layers=("convolution",)),
)
BAMBA_UNUSED = Unused("mamba_chunk_size", "num_logits_to_keep")


def bamba_fields(eps: float) -> Mamba2Fields:
    """The fields of Bamba's Mamba 2, with the default of the eps of its norm."""
    return Mamba2Fields(
        fields=(
            BiasesField("mamba_proj_bias", "biases", layers=("in", "out")),
            *(*BAMBA_SIZES, StepLimits(), BAMBA_UNUSED),
            NotWritten(Field("rms_norm_eps", "output.norm.eps", eps)),
        ),
        head_dim="mamba_d_head",
        expand="mamba_expand",
    )


@dataclass(frozen=True, kw_only=True)
class HalfRope(RopeField):
    """RoPE of half a head, which is written even of a model without attention."""

    def write(self, model: c.TransformerConfig) -> dict[str, Any]:
        return self.write_rope(first_rope(model) or c.Rope(fraction=0.5))


BACKBONE_TOP_LEVEL = m.top_level_rules("backbone.embeddings", "backbone.norm_f")
BAMBA_TOP_LEVEL = m.top_level_rules("model.embed_tokens", "model.final_layernorm")
BAMBA_LAYER = (
    *m.layer_norm_rules(
        p.LAYER_PREFIX,
        pre_attention_norm="input_layernorm",
        pre_feed_forward_norm="pre_ff_layernorm",
    ),
    *mamba2_rules(f"{p.LAYER_PREFIX}.mamba"),
    *of_kind(c.MultiHead, *p.ATTENTION),
    *m.glu_rules(f"{p.LAYER_PREFIX}.feed_forward"),
)
FAMILIES = (
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        MAMBA_2,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            *(p.UNTIED, Everywhere(MAMBA2)),
            # Initial values, and the forms of a computation.
            Unused("chunk_size", "time_step_rank", "time_step_min", "time_step_max"),
            Unused("time_step_floor", "rescale_prenorm_residual", "residual_in_fp32"),
        ),
        m.decoder_mapping(
            *BACKBONE_TOP_LEVEL,
            *m.norm_rules("backbone.layers.{layer}.norm", "pre_attention_norm"),
            *mamba2_rules("backbone.layers.{layer}.mixer"),
        ),
        attention_types=(c.LinearAttention,),
    ),
    # As Llama, except: Mamba 2 in place of most attention, half of a head turned.
    Family(
        "bamba",
        "BambaForCausalLM",
        LLAMA,
        (
            *(*p.decoder(heads=32, kv_heads=8, eps=1e-5), *p.glu(14_336)),
            *(p.ATTENTION_BIAS, p.MLP_BIAS),
            *(HalfRope(fraction=0.5, max_length=262_144), *fixed(partial_rotary_factor=0.5)),
            Mixer(
                kind=bamba_fields(1e-5),
                types=LayerNumbers("attn_layer_indices"),
                may_lack_kinds=True,
            ),
        ),
        m.decoder_mapping(*BAMBA_TOP_LEVEL, *BAMBA_LAYER),
        attention_types=(c.LinearAttention, c.MultiHead),
    ),
)
