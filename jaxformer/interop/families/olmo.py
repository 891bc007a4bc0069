"""OLMo: Llama with a LayerNorm without parameters. OLMo 2 and 3 are rows of `llama`."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping
from jaxformer.interop.rope_config import read_rope

OLMO = ParamMapping(top_level=p.TOP_LEVEL, stacks={"decoder": (*p.ATTENTION, *p.FEED_FORWARD)})
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


FAMILIES = (Family("olmo", "OlmoForCausalLM", read_olmo, write_olmo, OLMO),)
