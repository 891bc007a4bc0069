"""Mamba 2 alone, and Bamba, which has attention in a few layers; and how a file has their layer."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import ConvolutionKernel, Flatten, Fused, LinearKernel

PROJECTIONS = ("gate", "value", "key", "query", "step")  # z, x, B, C and dt
CONVOLUTIONS = ("value", "key", "query")
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def _parameters(names: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"attention/{name}/{leaf}" for name in names)


def mamba2_rules(prefix: str) -> tuple[MappingRule, ...]:
    """Mapping rules of a Mamba 2 layer."""
    convolved = tuple(f"{name}_convolution" for name in CONVOLUTIONS)
    rules = (
        MappingRule(f"{prefix}.in_proj.weight", _parameters(PROJECTIONS, "kernel"), Fused()),
        MappingRule(
            f"{prefix}.in_proj.bias", _parameters(PROJECTIONS, "bias"), Fused(part=Flatten())
        ),
        MappingRule(
            f"{prefix}.conv1d.weight",
            _parameters(convolved, "kernel"),
            Fused(part=ConvolutionKernel()),
        ),
        MappingRule(f"{prefix}.conv1d.bias", _parameters(convolved, "bias"), Fused(part=Flatten())),
        MappingRule(f"{prefix}.dt_bias", "attention/step_bias/bias"),
        MappingRule(f"{prefix}.A_log", "attention/rate/bias"),
        MappingRule(f"{prefix}.D", "attention/skip/bias"),
        MappingRule(f"{prefix}.norm.weight", "attention/norm/scale", Flatten()),
        *linear_rules(f"{prefix}.out_proj", "attention/out", input_axes=2),
    )
    return tuple(replace(rule, kind=c.LinearAttention) for rule in rules)


@dataclass(frozen=True, kw_only=True)
class Mamba2Fields:
    """The fields of config.json that describe a Mamba 2 layer: their names, and defaults.

    Attributes:
        num_heads: Field of the number of heads, 128 by default.
        head_dim: Field of their width.
        num_groups: Field of the number of groups that share B and C.
        state_dim: Field of the width of B and C.
        width: Field of the convolution's width, 4 by default.
        convolution_bias: Field of the convolution's bias, which is there by default.
        bias: Field of the projections' biases, which are not there by default.
        activation: Field of the activation after the convolution.
        unused: Fields without effect.
        inner_width: Field of the width of all heads, 1024 by default; null follows from `expand`.
            None has no such field.
        expand: Field of the width of all heads over that of the model, 2 by default; None if heads
            may have any width.
        default_head_dim: Default of the width of a head; None follows from `expand`.
        default_groups: Default of the number of groups.
        default_state_dim: Default of the width of B and C.
    """

    num_heads: str
    head_dim: str
    num_groups: str = "n_groups"
    state_dim: str
    width: str = "conv_kernel"
    convolution_bias: str = "use_conv_bias"
    bias: str = "use_bias"
    activation: str = "hidden_act"
    unused: tuple[str, ...]
    inner_width: str | None = None
    expand: str | None = "expand"
    default_head_dim: int | None = None
    default_groups: int = 8
    default_state_dim: int = 128

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
        heads = reader.integer(self.num_heads, 128)
        biases: list[Any] = ["in", "out"] if reader.boolean(self.bias, False) else []
        if reader.boolean(self.convolution_bias, True):
            biases.append("convolution")
        return c.LinearAttention(
            num_heads=heads,
            num_key_heads=reader.integer(self.num_groups, self.default_groups),
            key_dim=reader.integer(self.state_dim, self.default_state_dim),
            value_dim=self._read_head_dim(reader, heads),
            decay=c.StepDecay(min_step=min_step, max_step=max_step),
            delta_rule=False,
            beta="step",
            unit_vectors=False,
            scale=1.0,
            skip=True,
            convolution_width=reader.integer(self.width, 4),
            output=c.GatedNorm(norm=norm, over="group", placement="before_norm"),
            biases=tuple(biases),
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
        fields = {
            self.num_heads: layer.num_heads,
            self.head_dim: layer.value_dim,
            self.num_groups: layer.num_key_heads,
            self.state_dim: layer.key_dim,
            self.width: layer.convolution_width,
            self.convolution_bias: "convolution" in layer.biases,
            self.bias: "out" in layer.biases,
        }
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


def hybrid_kinds(config: c.TransformerConfig) -> tuple[c.LinearAttention, c.MultiHead] | None:
    """The recurrent and the attention layers' options, of which a model has one each.

    Of layers that the model lacks, an option that config.json can express is returned. None for
    models with other layers.
    """
    kinds = {config.layer(i).attention for i in range(config.num_layers)} - {c.NoAttention()}
    mambas = [x for x in kinds if isinstance(x, c.LinearAttention)]
    attentions = [x for x in kinds if isinstance(x, c.MultiHead)]
    if max(len(mambas), len(attentions)) > 1 or len(kinds) > len(mambas) + len(attentions):
        return None
    width = config.model_dim
    no_mamba = c.LinearAttention(num_heads=1, num_key_heads=1, key_dim=1, value_dim=2 * width)
    no_attention = c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=width, positions=(None,))
    return next(iter(mambas), no_mamba), next(iter(attentions), no_attention)


MAMBA2 = Mamba2Fields(
    num_heads="num_heads",
    head_dim="head_dim",
    state_dim="state_size",
    default_head_dim=64,
    # Initial values, and the forms of a computation.
    unused=(
        *("chunk_size", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        *("rescale_prenorm_residual", "residual_in_fp32"),
    ),
)
BAMBA = Mamba2Fields(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    num_groups="mamba_n_groups",
    state_dim="mamba_d_state",
    width="mamba_d_conv",
    convolution_bias="mamba_conv_bias",
    bias="mamba_proj_bias",
    expand="mamba_expand",
    default_groups=1,
    default_state_dim=256,
    unused=("mamba_chunk_size", "num_logits_to_keep"),
)
BAMBA_LAYER = (
    *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_attention_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.pre_ff_layernorm", "pre_feed_forward_norm"),
    *mamba2_rules(f"{p.LAYER_PREFIX}.mamba"),
    *(replace(rule, kind=c.MultiHead) for rule in p.ATTENTION),
    *linear_rules(f"{p.LAYER_PREFIX}.feed_forward.gate_proj", "feed_forward/gate"),
    *linear_rules(f"{p.LAYER_PREFIX}.feed_forward.up_proj", "feed_forward/up"),
    *linear_rules(f"{p.LAYER_PREFIX}.feed_forward.down_proj", "feed_forward/down"),
)
BAMBA_TABLE = ParamMapping(
    top_level=(
        MappingRule("model.embed_tokens.weight", "embedding/tokens/embedding"),
        *norm_rules("model.final_layernorm", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={"decoder": BAMBA_LAYER},
)
BACKBONE_TOP_LEVEL = (
    MappingRule("backbone.embeddings.weight", "embedding/tokens/embedding"),
    *norm_rules("backbone.norm_f", "decoder/final_norm"),
    MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
)
MAMBA2_TABLE = ParamMapping(
    top_level=BACKBONE_TOP_LEVEL,
    stacks={
        "decoder": (
            *norm_rules("backbone.layers.{layer}.norm", "pre_attention_norm"),
            *mamba2_rules("backbone.layers.{layer}.mixer"),
        )
    },
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


def read_bamba(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a bamba model."""
    sizes = p.read_sizes(reader)
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-5))
    reader.require_value("partial_rotary_factor", 0.5)
    attention = c.MultiHead(
        **p.read_heads(reader, heads=32, kv_heads=8),
        positions=(read_rope(reader, fraction=0.5, max_length=262_144),),
        biases=p.read_biases(reader),
    )
    mamba = BAMBA.read(reader, norm, **read_step_limits(reader))
    full = reader.sequence("attn_layer_indices", int) or ()
    kinds = tuple(attention if i in full else mamba for i in range(sizes["num_layers"]))
    glu = p.read_glu(reader, hidden_dim=14_336, bias=reader.boolean("mlp_bias", False))
    return c.TransformerConfig(
        **sizes,
        attention=c.Hybrid(kinds=shortest_cycle(kinds)),
        feed_forward=(glu,),
        norm=norm,
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def write_bamba(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = hybrid_kinds(config)
    if kinds is None or not isinstance(config.feed_forward[0], c.GLU):
        return None
    mamba, attention = kinds
    rope = attention.positions[0] or c.Rope(fraction=0.5)
    if not isinstance(rope, c.Rope):
        return None
    layers = [config.layer(i).attention for i in range(config.num_layers)]
    return {
        **p.write_sizes(replace(config, attention=attention)),
        "attn_layer_indices": [i for i, x in enumerate(layers) if isinstance(x, c.MultiHead)],
        "attention_bias": "out" in attention.biases,
        "mlp_bias": config.feed_forward[0].bias,
        "rms_norm_eps": config.norm.eps,
        **BAMBA.write(config, mamba),
        **write_step_limits(mamba),
        **write_rope(rope, fraction_name="partial_rotary_factor"),
    }


FAMILIES = (
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        read_mamba2,
        write_mamba2,
        MAMBA2_TABLE,
        attention_type=c.LinearAttention,
    ),
    Family(
        "bamba", "BambaForCausalLM", read_bamba, write_bamba, BAMBA_TABLE, attention_type=c.Hybrid
    ),
)
