"""Baichuan 2: Llama with fused queries, keys and values, and a head whose rows have length 1.

7B has RoPE. 13B has ALiBi, and no ``max_position_embeddings`` in its config.json. The rows of the
head are divided by their length when they are read.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import Fused, UnitRows

QKV = ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel")
TABLE = ParamMapping(
    top_level=(
        MappingRule("model.embed_tokens.weight", "embedding/tokens/embedding"),
        *norm_rules("model.norm", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", UnitRows()),
    ),
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            MappingRule(f"{p.LAYER_PREFIX}.self_attn.W_pack.weight", QKV, Fused()),
            *linear_rules(f"{p.LAYER_PREFIX}.self_attn.o_proj", "attention/out", input_axes=2),
            *p.FEED_FORWARD,
        )
    },
)
VERSION_1_VOCAB_SIZE = 64_000


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a baichuan model."""
    reader.get("z_loss_weight")
    reader.get("_from_model_config")
    if reader.integer("vocab_size") == VERSION_1_VOCAB_SIZE:
        reader.add_problem("vocab_size", "Baichuan 1 has another head; only version 2 is read.")
    has_rope = "max_position_embeddings" in reader.values
    positions = read_rope(reader, max_length=4096) if has_rope else c.Alibi()
    return p.read_decoder(reader, dict(**p.read_heads(reader), positions=(positions,)))


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A baichuan's configuration from ours."""
    positions = config.multi_head.positions[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(config.feed_forward[0], c.GLU):
        return None
    fields = {**p.write_sizes(config), "rms_norm_eps": config.norm.eps}
    if isinstance(positions, c.Rope):
        fields |= {"max_position_embeddings": 4096, **write_rope(positions)}
    return fields


FAMILIES = (Family("baichuan", "BaichuanForCausalLM", read, write, TABLE, in_transformers=False),)
