"""Phi-3.5 MoE: Llama's attention with biases, LayerNorm, and two experts chosen by SparseMixer."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import MixtralMoE
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping
from jaxformer.interop.rope_config import read_rope, write_rope

TABLE = ParamMapping(
    top_level=(*p.TOP_LEVEL, MappingRule("lm_head.bias", "head/bias")),
    stacks={"decoder": (*p.PRE_NORMS, *p.ATTENTION, *MixtralMoE.rules)},
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a phimoe model."""
    reader.require_value("num_experts_per_tok", 2, reason="SparseMixer chooses two experts here")
    reader.get("input_jitter_noise")  # of training
    heads = dict(
        **p.read_heads(reader, kv_heads=8),
        positions=(_read_rope(reader),),
        windows=(reader.optional_integer("sliding_window"),),
        biases=p.read_biases(reader),
    )
    moe = c.MoE(
        expert=p.read_glu(reader),
        num_experts=reader.integer("num_local_experts", 16),
        router=c.SparseMixer(jitter=reader.number("router_jitter_noise", 0.01)),
    )
    norm = c.LayerNorm(eps=reader.number("rms_norm_eps", 1e-5))
    config = p.read_decoder(reader, heads, feed_forward=moe, norm=norm)
    bias = reader.boolean("lm_head_bias", False)
    return replace(config, head=replace(config.head, bias=bias))


def _read_rope(reader: ConfigReader) -> c.Rope:
    """RoPE; its factor of attention stands under two names, for short and for long sequences.

    Transformers 5 turns by the short factors whatever the length, the released code by the long
    ones beyond the context of the training, as here.
    """
    rope = read_rope(reader, base=1e6, max_length=131_072)
    if rope.scaling is None:
        return rope
    section = reader.section("rope_scaling") or reader.section("rope_parameters") or reader
    short, long = (section.number(f"{name}_mscale") for name in ("short", "long"))
    if not isinstance(rope.scaling, c.LongRope):
        name = "rope_type" if "rope_type" in section else "type"
        section.add_problem(name, "expected default or longrope.")
        return rope
    if short != long and not section.problems:
        section.add_problem("long_mscale", f"it must equal short_mscale, {short}.")
    return replace(rope, scaling=replace(rope.scaling, attention_factor=short))


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A phimoe's configuration from ours."""
    branch = config.feed_forward[0]
    if not (p.is_rope_decoder(config) and isinstance(branch, c.MoE)):
        return None
    if not isinstance(branch.router, c.SparseMixer):
        return None
    rope = p.first_rope(config)
    fields = write_rope(rope)
    if isinstance(rope.scaling, c.LongRope):
        for name in ("rope_scaling", "rope_parameters"):
            factor = fields[name].pop("attention_factor", None)
            fields[name] |= {"short_mscale": factor, "long_mscale": factor}
    return {
        **p.write_sizes(config),
        **fields,
        "rms_norm_eps": config.norm.eps,
        "sliding_window": p.first_window(config),
        "attention_bias": "out" in config.multi_head.biases,
        "lm_head_bias": config.head.bias,
        "num_local_experts": branch.num_experts,
        "num_experts_per_tok": branch.top_k,
        "router_jitter_noise": branch.router.jitter,
    }


FAMILIES = (Family("phimoe", "PhimoeForCausalLM", read, write, TABLE),)
