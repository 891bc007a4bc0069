"""Qwen 3: Llama with RMSNorm on each head's query and key, and an explicit head_dim."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping
from jaxformer.interop.rope_config import read_rope

TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.QK_NORMS, *p.FEED_FORWARD)},
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a qwen3 model; head_dim does not depend on model_dim."""
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6))
    heads = dict(
        **p.read_heads(reader, kv_heads=32, head_dim=128),
        positions=(read_rope(reader, max_length=32768),),
        windows=p.read_last_layer_windows(reader),
        qk_norm=c.QKNorm(norm=norm, over="head"),
        biases=p.read_biases(reader),
    )
    return p.read_decoder(reader, heads, norm=norm)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen3's configuration from ours."""
    biases = "out" in config.multi_head.biases
    return p.write_decoder(config, attention_bias=biases, **p.write_last_layer_windows(config))


FAMILIES = (Family("qwen3", "Qwen3ForCausalLM", read, write, TABLE),)
