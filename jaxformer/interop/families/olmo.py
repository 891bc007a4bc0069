"""OLMo (non-parametric LayerNorm) and OLMo 2 (norms on branch outputs, queries and keys)."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping, norm_rules
from jaxformer.interop.rope_config import read_rope

OLMO = ParamMapping(top_level=p.TOP_LEVEL, stacks={"decoder": (*p.ATTENTION, *p.FEED_FORWARD)})
OLMO2 = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
            *norm_rules(f"{p.LAYER_PREFIX}.post_attention_layernorm", "post_attention_norm"),
            *norm_rules(f"{p.LAYER_PREFIX}.post_feedforward_layernorm", "post_feed_forward_norm"),
        )
    },
)
EPS = 1e-5  # not in OLMo's config.json


def read_olmo(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an olmo model."""
    heads = dict(
        **p.read_heads(reader),
        positions=(read_rope(reader),),
        clip_qkv=reader.optional_number("clip_qkv"),
        biases=p.read_biases(reader),
    )
    return p.read_decoder(reader, heads, norm=c.LayerNorm(eps=EPS, parameters="none"))


def write_olmo(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo's configuration from ours."""
    attention = config.multi_head
    biases, clip = "out" in attention.biases, attention.clip_qkv
    fields = p.write_decoder(config, attention_bias=biases, clip_qkv=clip)
    return fields and {name: value for name, value in fields.items() if name != "rms_norm_eps"}


def read_olmo2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an olmo2 model."""
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-5))
    heads = dict(
        **p.read_heads(reader),
        positions=(read_rope(reader),),
        qk_norm=c.QKNorm(norm=norm, over="width"),
        biases=p.read_biases(reader),
    )
    return p.read_decoder(reader, heads, norm=norm, norm_placement="res_post")


def write_olmo2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An olmo2's configuration from ours."""
    return p.write_decoder(config, attention_bias="out" in config.multi_head.biases)


FAMILIES = (
    Family("olmo", "OlmoForCausalLM", read_olmo, write_olmo, OLMO),
    Family("olmo2", "Olmo2ForCausalLM", read_olmo2, write_olmo2, OLMO2),
)
