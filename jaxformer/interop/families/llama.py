"""Llama, Mistral, Qwen 2 and Mixtral.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries: llama, mistral, qwen2,
mixtral.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping
from jaxformer.interop.rope_config import read_rope
from jaxformer.interop.transforms import LinearKernel

TABLE = ParamMapping(
    top_level=p.TOP_LEVEL, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *p.FEED_FORWARD)}
)
MOE = f"{p.LAYER_PREFIX}.block_sparse_moe"
EXPERTS = (
    MappingRule(f"{MOE}.gate.weight", "feed_forward/router/kernel", LinearKernel()),
    MappingRule(
        f"{MOE}.experts.{{expert}}.w1.weight", "feed_forward/experts/gate/kernel", LinearKernel()
    ),
    MappingRule(
        f"{MOE}.experts.{{expert}}.w3.weight", "feed_forward/experts/up/kernel", LinearKernel()
    ),
    MappingRule(
        f"{MOE}.experts.{{expert}}.w2.weight", "feed_forward/experts/down/kernel", LinearKernel()
    ),
)
MIXTRAL = ParamMapping(
    top_level=p.TOP_LEVEL, stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *EXPERTS)}
)


def read_llama(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a llama model."""
    heads = dict(
        **p.read_heads(reader), positions=(read_rope(reader),), biases=p.read_biases(reader)
    )
    branch = p.read_glu(reader, bias=reader.boolean("mlp_bias", False))
    return p.read_decoder(reader, heads, feed_forward=branch)


def write_llama(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A llama's configuration from ours; num_heads must divide model_dim (transformers)."""
    branch = config.feed_forward[0]
    if config.model_dim % config.multi_head.num_heads or not isinstance(branch, c.GLU):
        return None
    biases = "out" in config.multi_head.biases
    return p.write_decoder(config, attention_bias=biases, mlp_bias=branch.bias)


def read_mistral(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a mistral model."""
    heads = dict(
        **p.read_heads(reader, kv_heads=8),
        positions=(read_rope(reader, max_length=131072),),
        windows=(reader.optional_integer("sliding_window", 4096),),
    )
    return p.read_decoder(reader, heads)


def write_mistral(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A mistral's configuration from ours."""
    return p.write_decoder(config, sliding_window=p.first_window(config))


def read_qwen2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a qwen2 model."""
    heads = dict(
        **p.read_heads(reader, kv_heads=32),
        positions=(read_rope(reader, max_length=32768),),
        windows=p.read_last_layer_windows(reader),
        biases=("query", "key", "value"),
    )
    return p.read_decoder(reader, heads)


def write_qwen2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen2's configuration from ours."""
    return p.write_decoder(config, **p.write_last_layer_windows(config))


def read_mixtral(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a mixtral model."""
    heads = dict(
        **p.read_heads(reader, kv_heads=8),
        positions=(read_rope(reader, base=1e6, max_length=131072),),
        windows=(reader.optional_integer("sliding_window"),),
    )
    experts = c.MoE(
        expert=p.read_glu(reader),
        num_experts=reader.integer("num_local_experts", reader.integer("num_experts", 8)),
        top_k=reader.integer("num_experts_per_tok", 2),
    )
    return p.read_decoder(reader, heads, feed_forward=experts, eps=1e-5)


def write_mixtral(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A mixtral's configuration from ours."""
    branch = config.feed_forward[0]
    if not isinstance(branch, c.MoE):
        return None
    return p.write_decoder(
        config,
        branch=c.MoE,
        num_local_experts=branch.num_experts,
        num_experts_per_tok=branch.top_k,
        sliding_window=p.first_window(config),
    )


FAMILIES = (
    Family("llama", "LlamaForCausalLM", read_llama, write_llama, TABLE),
    Family("mistral", "MistralForCausalLM", read_mistral, write_mistral, TABLE),
    Family("qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2, TABLE),
    Family("mixtral", "MixtralForCausalLM", read_mixtral, write_mixtral, MIXTRAL),
)
