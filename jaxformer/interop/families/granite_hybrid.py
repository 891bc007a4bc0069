"""Granite 4: Mamba 2 and attention, Granite's multipliers, and experts beside a shared network."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import GraniteMoE
from jaxformer.interop.families.llama_like_options import read_multipliers, write_multipliers
from jaxformer.interop.families.mamba import (
    BAMBA,
    hybrid_kinds,
    mamba2_rules,
    read_step_limits,
    write_step_limits,
)
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import Fused

EXPERTS = GraniteMoE(has_shared=True)
SHARED = f"{p.LAYER_PREFIX}.shared_mlp"
LAYER_TYPES = {  # the old names and the new ones
    "mamba": False,
    "linear_attention": False,
    "attention": True,
    "full_attention": True,
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *p.PRE_NORMS,
            *mamba2_rules(f"{p.LAYER_PREFIX}.mamba"),
            *(replace(rule, kind=c.MultiHead) for rule in p.ATTENTION),
            *EXPERTS.rules,
            MappingRule(
                f"{SHARED}.input_linear.weight",
                ("feed_forward/gate/kernel", "feed_forward/up/kernel"),
                Fused(),
            ),
            *linear_rules(f"{SHARED}.output_linear", "feed_forward/down"),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a granitemoehybrid model."""
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6))
    heads = dict(
        **p.read_heads(reader, heads=32),
        positions=(_read_positions(reader),),
        biases=p.read_biases(reader),
    )
    model = p.read_decoder(reader, heads, feed_forward=_read_feed_forward(reader), norm=norm)
    model = read_multipliers(reader, model)
    mamba = BAMBA.read(reader, norm, **read_step_limits(reader))
    types = _read_layer_types(reader, model.num_layers)
    kinds = tuple(model.multi_head if full else mamba for full in types)
    return replace(model, attention=c.Hybrid(kinds=shortest_cycle(kinds)))


def _read_positions(reader: ConfigReader) -> c.Rope | None:
    """RoPE, if ``position_embedding_type`` says so."""
    has_rope = {"rope": True, "nope": False, "none": False}
    if reader.choice("position_embedding_type", "none", has_rope):
        return read_rope(reader)
    for name in ROPE_FIELDS:  # without effect
        reader.get(name)
    return None


def _read_feed_forward(reader: ConfigReader) -> c.FeedForward:
    """Experts beside a shared network, or the latter alone if there are no experts."""
    name = "shared_intermediate_size"
    shared = p.read_glu(reader, width_name=name, hidden_dim=1024)
    if reader.integer("num_local_experts", 8) == 0:
        for unused in ("intermediate_size", "num_experts_per_tok"):
            reader.get(unused)
        return shared
    (moe,) = GraniteMoE().read(reader, bias=False)
    return replace(moe, shared=c.SharedExpert(expert=shared))


def _read_layer_types(reader: ConfigReader, count: int) -> tuple[bool, ...]:
    """Which layers have attention."""
    name = "layer_types" if "layer_types" in reader else "layers_block_type"
    words = reader.sequence(name, str)
    if words is None:
        return (False,) * count
    if len(words) != count or not set(words) <= set(LAYER_TYPES):
        known = " or ".join(LAYER_TYPES)
        reader.add_problem(name, f"expected {known} for each of {count} layers.")
        return (False,) * count
    return tuple(LAYER_TYPES[word] for word in words)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds, branch = hybrid_kinds(config), config.feed_forward[0]
    if kinds is None:
        return None
    mamba, attention = kinds
    rope = attention.positions[0]
    if isinstance(branch, c.MoE) and branch.shared is not None:
        feed_forward = EXPERTS.write(config)
    elif isinstance(branch, c.GLU):
        feed_forward = {"num_local_experts": 0, "shared_intermediate_size": branch.hidden_dim}
    else:
        return None
    if feed_forward is None or not isinstance(rope, c.Rope | None):
        return None
    model = replace(config, attention=attention)
    layers = [config.layer(i).attention for i in range(config.num_layers)]
    return {
        **p.write_sizes(model),
        **feed_forward,
        "layer_types": [
            "full_attention" if isinstance(x, c.MultiHead) else "linear_attention" for x in layers
        ],
        "attention_bias": "out" in attention.biases,
        "rms_norm_eps": config.norm.eps,
        "position_embedding_type": None if rope is None else "rope",
        **write_multipliers(model),
        **BAMBA.write(config, mamba),
        **write_step_limits(mamba),
        **({} if rope is None else write_rope(rope)),
    }


FAMILIES = (
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        read,
        write,
        TABLE,
        attention_type=c.Hybrid,
    ),
)
