"""StableLM 2: Llama with LayerNorms, partial RoPE, and at 12B parallel blocks with QK-norm."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope

ATTENTION = f"{p.LAYER_PREFIX}.self_attn"
TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
            *p.ATTENTION,
            *p.FEED_FORWARD,
            # A tensor for each head.
            MappingRule(
                f"{ATTENTION}.q_layernorm.norms.{{expert}}.weight", "attention/query_norm/scale"
            ),
            MappingRule(
                f"{ATTENTION}.k_layernorm.norms.{{expert}}.weight", "attention/key_norm/scale"
            ),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a stablelm model."""
    eps = reader.number("layer_norm_eps", 1e-5)
    has_qk_norm = reader.boolean("qk_layernorm", False)
    is_parallel = reader.boolean("use_parallel_residual", False)
    per_head = c.QKNorm(norm=c.LayerNorm(eps=eps, parameters="scale"), over="each_head")
    heads = dict(
        **p.read_heads(reader, kv_heads=32),
        positions=(read_rope(reader, fraction=0.25, max_length=4096),),
        qk_norm=per_head if has_qk_norm else None,
        biases=p.ALL_BIASES[:3] if reader.boolean("use_qkv_bias", False) else (),
    )
    return p.read_decoder(
        reader,
        heads,
        norm=c.LayerNorm(eps=eps),
        block="parallel_shared_norm" if is_parallel else "serial",
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A stablelm's configuration from ours; num_heads must divide model_dim (transformers)."""
    attention = config.multi_head
    divides = config.model_dim % attention.num_heads == 0
    if not (p.is_rope_decoder(config) and isinstance(config.feed_forward[0], c.GLU) and divides):
        return None
    return {
        **p.write_sizes(config),
        "layer_norm_eps": config.norm.eps,
        "use_qkv_bias": "query" in attention.biases,
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": config.block != "serial",
        **write_rope(p.first_rope(config), fraction_name="partial_rotary_factor"),
    }


FAMILIES = (Family("stablelm", "StableLmForCausalLM", read, write, TABLE),)
