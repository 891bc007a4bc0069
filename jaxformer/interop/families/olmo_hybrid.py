"""OLMo Hybrid: layers of gated DeltaNet with norms before the branches, and OLMo 3's attention.

Transformers cuts the convolutions of queries, keys and values into thirds when it writes a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import LlamaHybrid
from jaxformer.interop.families.llama_like_family import BiasField
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.transforms import ConvolutionKernel

DELTA_NET = f"{p.LAYER_PREFIX}.linear_attn"
CONVOLUTIONS = {name: f"{DELTA_NET}.{name[0]}_conv1d.weight" for name in p.QKV}
LINEAR_LAYER = (
    *m.layer_norm_rules(
        p.LAYER_PREFIX,
        pre_attention_norm="attention_layer_norm",
        pre_feed_forward_norm="feedforward_layer_norm",
    ),
    *(
        m.MappingRule(tensor, f"attention/{name}_convolution/kernel", ConvolutionKernel())
        for name, tensor in CONVOLUTIONS.items()
    ),
    *m.attention_rules(DELTA_NET),
    *m.branch_rules(DELTA_NET, "attention", step="a_proj", beta="b_proj", gate="g_proj"),
    m.MappingRule(f"{DELTA_NET}.A_log", "attention/rate/bias"),
    m.MappingRule(f"{DELTA_NET}.dt_bias", "attention/step_bias/bias"),
    *m.norm_rules(f"{DELTA_NET}.o_norm", "attention/norm"),
)
FULL_LAYER = (
    *m.layer_norm_rules(
        p.LAYER_PREFIX,
        post_attention_norm="feedforward_layer_norm",
        post_feed_forward_norm="post_feedforward_layernorm",
    ),
    *p.ATTENTION,
)
RENAMES = (  # names in memory, and of the attention layers in other files
    (r"(layers\.\d+)\.input_layernorm\.", r"\1.attention_layer_norm."),
    (r"(layers\.\d+)\.post_attention_layernorm\.", r"\1.feedforward_layer_norm."),
)
READ_NORM = c.RMSNorm(eps=1e-5)  # of what is read from the state, independent of rms_norm_eps


def three_quarters_of_width(options: Mapping[str, Any]) -> int:
    """Width of a key whose heads together have three quarters of the model's."""
    return int(0.75 * options["model_dim"]) // max(1, options["num_key_heads"])


@dataclass(frozen=True, kw_only=True)
class OptionalRope(OneRope):
    """RoPE, or no positions where its base or its type is null, as in releases."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing."""
        section = reader.section("rope_parameters")
        if section is None:
            reason = (
                "transformers takes this for a base of 10,000, its authors for no positions; say "
                '{"rope_theta": 10000.0} or {"rope_theta": null}.'
            )
            reader.add_problem("rope_parameters", reason)
        elif None in (section.get("rope_theta", 0), section.get("rope_type", "default")):
            return (None,)
        return super().read(reader, windows)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        fields = super().write(config)
        no_positions = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        return no_positions if fields is None else fields


@dataclass(frozen=True)
class OlmoHybrid(LlamaHybrid):
    """Norms are before the branches of gated DeltaNet, and after those of attention."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config = super().read(reader)
        placements: Any = tuple(
            "res_post" if isinstance(layer.attention, c.MultiHead) else "pre"
            for layer in config.layers
        )
        return replace(config, norm_placement=placements)

    def default_types(self, reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
        """Attention in every fourth layer; in the last one, if there is none."""
        types = super().default_types(reader, num_layers)
        return types if any(types) else (*types[:-1], True)


ROW = OlmoHybrid(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    sizes={"num_attention_heads": 30},
    norm_rules=(),
    positions=OptionalRope(max_length=65_536),
    biases=(BiasField("attention_bias", p.ALL_BIASES),),
    qk_norm=c.QKNorm(over="width"),
    attention_rules=FULL_LAYER,
    mixer=c.LinearAttention(
        num_heads=1, num_key_heads=1, key_dim=1, value_dim=1, output=c.GatedNorm(norm=READ_NORM)
    ),
    mixer_fields=(
        Field("linear_num_key_heads", "num_key_heads", lambda x: x["attention_heads"]),
        Field("linear_num_value_heads", "num_heads", lambda x: x["attention_heads"]),
        Field("linear_key_head_dim", "key_dim", three_quarters_of_width),
        Field("linear_value_head_dim", "value_dim", lambda x: 2 * x["key_dim"]),
        Field("linear_conv_kernel_dim", "convolution_width", 4),
        Field("linear_allow_neg_eigval", "max_beta", True, choices={True: 2.0, False: 1.0}),
    ),
    mixer_rules=LINEAR_LAYER,
    may_lack_kinds=True,
    unused=(  # initial values
        *("linear_a_log_min", "linear_a_log_max"),
        *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
)
FAMILIES = (replace(ROW.family(), key_renames=RENAMES, cut_together=tuple(CONVOLUTIONS.values())),)
