"""Mamba 2 alone, and Bamba, which has attention in a few layers; and how a file has their layer."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import LlamaHybrid
from jaxformer.interop.families.llama_like_family import FEED_FORWARD_BIAS, BiasField
from jaxformer.interop.families.llama_like_options import Dense, OneRope
from jaxformer.interop.families.option_fields import BiasesField, Field, read_options, write_options
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import ConvolutionKernel, Flatten, Fused

PROJECTIONS = ("gate", "value", "key", "query", "step")  # z, x, B, C and dt
CONVOLUTIONS = ("value", "key", "query")
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def mamba2_rules(prefix: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a Mamba 2 layer."""
    convolved = tuple(f"{name}_convolution" for name in CONVOLUTIONS)
    kernels = Fused(part=ConvolutionKernel())
    rules = (
        *m.fused_rules(f"{prefix}.in_proj", "attention", PROJECTIONS),
        *m.fused_rules(f"{prefix}.conv1d", "attention", convolved, kernels),
        m.MappingRule(f"{prefix}.dt_bias", "attention/step_bias/bias"),
        m.MappingRule(f"{prefix}.A_log", "attention/rate/bias"),
        m.MappingRule(f"{prefix}.D", "attention/skip/bias"),
        m.MappingRule(f"{prefix}.norm.weight", "attention/norm/scale", Flatten()),
        *m.linear_rules(f"{prefix}.out_proj", "attention/out", input_axes=2),
    )
    return tuple(replace(rule, kind=c.LinearAttention) for rule in rules)


@dataclass(frozen=True, kw_only=True)
class Mamba2Fields:
    """The fields of config.json that describe a Mamba 2 layer: their names, and defaults.

    Attributes:
        fields: Fields that set its options, but for the width of heads.
        head_dim: Field of this width.
        activation: Field of the activation after the convolution.
        unused: Fields without effect.
        inner_width: Field of the width of all heads, 1024 by default; null follows from `expand`.
            None has no such field.
        expand: Field of the width of all heads over that of the model, 2 by default; None if heads
            may have any width.
        default_head_dim: Default of the width of a head; None follows from `expand`.
    """

    fields: tuple[Field, ...]
    head_dim: str
    activation: str = "hidden_act"
    unused: tuple[str, ...]
    inner_width: str | None = None
    expand: str | None = "expand"
    default_head_dim: int | None = None

    def read(
        self, reader: ConfigReader, norm: c.Norm, *, min_step: float, max_step: float | None
    ) -> c.LinearAttention:
        """The layer.

        Args:
            reader: The whole config.json.
            norm: Norm after the gate.
            min_step: Smallest step of the decay.
            max_step: Largest step; None is no limit.
        """
        for name in self.unused:
            reader.get(name)
        reader.require_value(self.activation, "silu", "swish")
        options = read_options(reader, self.fields)
        return c.LinearAttention(
            **options,
            value_dim=self._read_head_dim(reader, options["num_heads"]),
            decay=c.StepDecay(min_step=min_step, max_step=max_step),
            delta_rule=False,
            beta="step",
            unit_vectors=False,
            scale=1.0,
            skip=True,
            output=c.GatedNorm(norm=norm, over="group", placement="before_norm"),
        )

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

    def write(self, config: c.TransformerConfig, layer: c.LinearAttention) -> dict[str, Any]:
        """Fields of the layer, without the limits of its steps."""
        fields = {**write_options(layer, self.fields), self.head_dim: layer.value_dim}
        if self.inner_width is not None:
            fields[self.inner_width] = layer.heads_width
        elif self.expand is not None:
            fields[self.expand] = layer.heads_width // config.model_dim
        return fields


def read_step_limits(reader: ConfigReader) -> dict[str, Any]:
    """``time_step_limit``, the smallest and the largest step, as arguments of `read`."""
    limits = reader.get("time_step_limit")
    numbers = [0.0, math.inf] if limits is None else limits
    if isinstance(numbers, list):
        numbers = [math.inf if x == INFINITY else x for x in numbers]
    is_pair = isinstance(numbers, list) and len(numbers) == 2
    if not (is_pair and all(type(x) in (int, float) for x in numbers)):
        reader.add_problem("time_step_limit", "expected the smallest and the largest step.")
        numbers = [0.0, math.inf]
    smallest, largest = map(float, numbers)
    return {"min_step": smallest, "max_step": None if largest == math.inf else largest}


def write_step_limits(layer: c.LinearAttention) -> dict[str, Any]:
    """``time_step_limit``, unless it is the default."""
    decay = layer.steps
    if decay is None or (decay.min_step == 0 and decay.max_step is None):
        return {}
    largest = INFINITY if decay.max_step is None else decay.max_step
    return {"time_step_limit": [decay.min_step, largest]}


GROUPS_AND_CONVOLUTION = (
    Field("n_groups", "num_key_heads", 8),
    Field("conv_kernel", "convolution_width", 4),
    BiasesField("use_bias", "biases", False, layers=("in", "out")),
    BiasesField("use_conv_bias", "biases", True, layers=("convolution",)),
)
MAMBA2 = Mamba2Fields(
    fields=(
        Field("num_heads", "num_heads", 128),
        Field("state_size", "key_dim", 128),
        *GROUPS_AND_CONVOLUTION,
    ),
    head_dim="head_dim",
    default_head_dim=64,
    # Initial values, and the forms of a computation.
    unused=(
        *("chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        *("rescale_prenorm_residual", "residual_in_fp32"),
    ),
)
BAMBA_SIZES = (
    Field("mamba_n_heads", "num_heads", 128),
    Field("mamba_n_groups", "num_key_heads", 1),
    Field("mamba_d_state", "key_dim", 256),
    Field("mamba_d_conv", "convolution_width", 4),
)
BAMBA_CONVOLUTION = BiasesField("mamba_conv_bias", "biases", True, layers=("convolution",))
BAMBA = Mamba2Fields(
    fields=(
        *BAMBA_SIZES,
        BiasesField("mamba_proj_bias", "biases", False, layers=("in", "out")),
        BAMBA_CONVOLUTION,
    ),
    head_dim="mamba_d_head",
    expand="mamba_expand",
    unused=("mamba_chunk_size", "num_logits_to_keep"),
)
BACKBONE_TOP_LEVEL = m.top_level_rules("backbone.embeddings", "backbone.norm_f")
MAMBA2_TABLE = m.decoder_mapping(
    BACKBONE_TOP_LEVEL,
    *m.norm_rules("backbone.layers.{layer}.norm", "pre_attention_norm"),
    *mamba2_rules("backbone.layers.{layer}.mixer"),
)


def read_mamba2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a mamba2 model."""
    norm = c.RMSNorm(eps=reader.number("layer_norm_epsilon", 1e-5))
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=MAMBA2.read(reader, norm, **read_step_limits(reader)),
        feed_forward=(c.NoFeedForward(),),
        norm=norm,
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def write_mamba2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    layer = config.attention
    if not isinstance(layer, c.LinearAttention):
        return None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
        **MAMBA2.write(config, layer),
        **write_step_limits(layer),
    }


@dataclass(frozen=True)
class BambaLike(LlamaHybrid):
    """Mamba 2 in most layers, under Bamba's names, with the norm of the model."""

    def read_mixer(self, reader: ConfigReader, config: c.TransformerConfig) -> c.LinearAttention:
        """Mamba 2."""
        return BAMBA.read(reader, config.norm, **read_step_limits(reader))

    def write_mixer(self, config: c.TransformerConfig, mixer: Any) -> dict[str, Any]:
        """Fields of Mamba 2."""
        return {**BAMBA.write(config, mixer), **write_step_limits(mixer)}


@dataclass(frozen=True)
class Bamba(BambaLike):
    """Attention in the layers that a list numbers."""

    def read_layer_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Which layers have attention."""
        full = reader.sequence("attn_layer_indices", int) or ()
        return tuple(i in full for i in range(num_layers))

    def write_layer_types(self, is_full: list[bool]) -> dict[str, Any]:
        """The numbers of the layers with attention."""
        return {"attn_layer_indices": [i for i, full in enumerate(is_full) if full]}


@dataclass(frozen=True, kw_only=True)
class HalfRope(OneRope):
    """RoPE of half a head, which is written even of a model without attention."""

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        rope = config.layers[0].positions or c.Rope(fraction=0.5)
        return super().write(config.with_positions(rope))


BAMBA_ROW = Bamba(
    "bamba",
    "BambaForCausalLM",
    sizes={"num_attention_heads": 32},
    kv_heads=8,
    norm=c.RMSNorm(eps=1e-5),
    norm_rules=m.layer_norm_rules(
        p.LAYER_PREFIX,
        pre_attention_norm="input_layernorm",
        pre_feed_forward_norm="pre_ff_layernorm",
    ),
    qk_norm_rules=(),
    top_level=m.top_level_rules("model.embed_tokens", "model.final_layernorm"),
    positions=HalfRope(fraction=0.5, max_length=262_144),
    branch=Dense(hidden_dim=14_336, rules=m.glu_rules(f"{p.LAYER_PREFIX}.feed_forward")),
    biases=(BiasField("attention_bias", p.ALL_BIASES), BiasField("mlp_bias", FEED_FORWARD_BIAS)),
    mixer_rules=mamba2_rules(f"{p.LAYER_PREFIX}.mamba"),
    may_lack_kinds=True,
    constants={"partial_rotary_factor": 0.5},
)
FAMILIES = (
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        read_mamba2,
        write_mamba2,
        MAMBA2_TABLE,
        attention_types=(c.LinearAttention,),
    ),
    BAMBA_ROW.family(),
)
