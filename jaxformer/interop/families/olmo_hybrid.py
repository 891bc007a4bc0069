"""OLMo Hybrid: layers of gated DeltaNet with norms before the branches, and OLMo 3's attention.

Transformers cuts the convolutions of queries, keys and values into thirds when it writes a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import Field, Options, Unused
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mixers import Kind, Mixer, linear_attention, of_kind
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.interop.transforms import DEPTHWISE
from jaxformer.zoo.olmo import OLMO_2
from jaxformer.zoo.sizes import like

DELTA_NET = f"{p.LAYER_PREFIX}.linear_attn"
CONVOLUTIONS = {name: f"{DELTA_NET}.{name[0]}_conv1d.weight" for name in p.QKV}
RENAMES = (  # names in memory, and of the attention layers in other files
    (r"(layers\.\d+)\.input_layernorm\.", r"\1.attention_layer_norm."),
    (r"(layers\.\d+)\.post_attention_layernorm\.", r"\1.feedforward_layer_norm."),
)
READ_NORM = c.RMSNorm(eps=1e-5)  # of what is read from the state, independent of rms_norm_eps


def three_quarters_of_width(options: Options) -> int:
    """Width of a key whose heads together have three quarters of the model's."""
    return int(0.75 * options["model_dim"]) // max(1, options["num_key_heads"])


def model_heads(options: Options) -> int:
    """Heads of the attention."""
    return int(options["attention.num_heads"])


def every_fourth_or_last(reader: ConfigReader, num_layers: int) -> Callable[[int], bool]:
    """Attention in every fourth layer; in the last one, if there is none."""
    return lambda i: i % 4 == 3 or (num_layers < 4 and i == num_layers - 1)


@dataclass(frozen=True, kw_only=True)
class OptionalRope(RopeField):
    """RoPE, or no positions where its base or its type is null, as in releases."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        section = reader.section("rope_parameters")
        if section is None:
            reason = (
                "transformers takes this for a base of 10,000, its authors for no positions; say "
                '{"rope_theta": 10000.0} or {"rope_theta": null}.'
            )
            reader.add_problem("rope_parameters", reason)
        elif None in (section.get("rope_theta", 0), section.get("rope_type", "default")):
            return (None,)
        return super().read_positions(reader, windows)

    def write(self, model: c.TransformerConfig) -> dict[str, Any]:
        rope = first_rope(model)
        if rope is None:
            return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        return self.write_rope(rope)


@dataclass(frozen=True, kw_only=True)
class MixerWithItsNorms(Mixer):
    """Norms are before the branches of gated DeltaNet, and after the branches of attention."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention kind and the place of the norms of each layer."""
        attention: Any = super().read(reader, options)["attention"]
        kinds = attention.function(None)
        placements = tuple("pre" if kind else "res_post" for kind in kinds)
        return {"attention": attention, "norm_placement": placements}


FAMILIES = (
    Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        like(OLMO_2, norm_placement="pre"),
        (
            *(*p.decoder(heads=30), *p.GLU, p.ATTENTION_BIAS),
            OptionalRope(max_length=65_536),
            MixerWithItsNorms(
                kind=Kind(
                    linear_attention(output=c.GatedNorm(norm=READ_NORM)),
                    (
                        Field("linear_num_key_heads", "num_key_heads", model_heads),
                        Field("linear_num_value_heads", "num_heads", model_heads),
                        Field("linear_key_head_dim", "key_dim", three_quarters_of_width),
                        Field("linear_value_head_dim", "value_dim", lambda x: 2 * x["key_dim"]),
                        Field("linear_conv_kernel_dim", "convolution_width", 4),
                        Field(
                            "linear_allow_neg_eigval",
                            "max_beta",
                            True,
                            choices={True: 2.0, False: 1.0},
                        ),
                    ),
                ),
                default=every_fourth_or_last,
                may_lack_kinds=True,
            ),
            # Initial values.
            Unused("linear_a_log_min", "linear_a_log_max"),
            Unused("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        ),
        m.decoder_mapping(
            *p.TOP_LEVEL,
            *of_kind(
                c.LinearAttention,
                *m.layer_norm_rules(
                    p.LAYER_PREFIX,
                    pre_attention_norm="attention_layer_norm",
                    pre_feed_forward_norm="feedforward_layer_norm",
                ),
                *(
                    m.MappingRule(tensor, f"attention/{name}_convolution/kernel", DEPTHWISE)
                    for name, tensor in CONVOLUTIONS.items()
                ),
                *m.attention_rules(DELTA_NET),
                *m.branch_rules(
                    DELTA_NET, "attention", step="a_proj", beta="b_proj", gate="g_proj"
                ),
                m.MappingRule(f"{DELTA_NET}.A_log", "attention/rate/bias"),
                m.MappingRule(f"{DELTA_NET}.dt_bias", "attention/step_bias/bias"),
                *m.norm_rules(f"{DELTA_NET}.o_norm", "attention/norm"),
            ),
            *of_kind(
                c.MultiHead,
                *m.layer_norm_rules(
                    p.LAYER_PREFIX,
                    post_attention_norm="feedforward_layer_norm",
                    post_feed_forward_norm="post_feedforward_layernorm",
                ),
                *(*p.ATTENTION, *p.QK_NORMS),
            ),
            *p.FEED_FORWARD,
        ),
        key_renames=RENAMES,
        cut_together=tuple(CONVOLUTIONS.values()),
        attention_types=(c.LinearAttention, c.MultiHead),
    ),
)
