"""Nemotron: LayerNorm stored as scale - 1, squared ReLU, half of each head rotated."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping
from jaxformer.interop.rope_config import read_rope, write_rope

TABLE = ParamMapping(
    top_level=p.TOP_LEVEL, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.FEED_FORWARD)}
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a nemotron model."""
    heads = dict(
        **p.read_heads(reader),
        positions=(read_rope(reader, fraction=0.5, max_length=4096),),
        biases=p.read_biases(reader),
    )
    branch = c.MLP(
        hidden_dim=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", "relu2", HF_ACTIVATIONS),
        bias=reader.boolean("mlp_bias", False),
    )
    norm = c.LayerNorm(eps=reader.number("norm_eps", 1e-5), scale_offset=1.0)
    return p.read_decoder(reader, heads, feed_forward=branch, norm=norm)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A nemotron's configuration from ours."""
    branch = config.feed_forward[0]
    if not (p.is_rope_decoder(config) and isinstance(branch, c.MLP)):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "mlp_bias": branch.bias,
        "norm_eps": config.norm.eps,
        **write_rope(p.first_rope(config), fraction_name="partial_rotary_factor"),
    }


FAMILIES = (Family("nemotron", "NemotronForCausalLM", read, write, TABLE),)
