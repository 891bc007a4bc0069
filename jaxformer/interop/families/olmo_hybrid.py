"""OLMo Hybrid: layers of gated DeltaNet with norms before the branches, and OLMo 3's attention.

Transformers cuts the convolutions of queries, keys and values into thirds when it writes a file.
"""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mamba import hybrid_kinds
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import ConvolutionKernel

DELTA_NET = f"{p.LAYER_PREFIX}.linear_attn"
CONVOLUTIONS = {name: f"{DELTA_NET}.{name[0]}_conv1d.weight" for name in ("query", "key", "value")}
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "a": "step", "b": "beta", "g": "gate"}
LINEAR_LAYER = (
    *norm_rules(f"{p.LAYER_PREFIX}.attention_layer_norm", "pre_attention_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.feedforward_layer_norm", "pre_feed_forward_norm"),
    *(
        MappingRule(tensor, f"attention/{name}_convolution/kernel", ConvolutionKernel())
        for name, tensor in CONVOLUTIONS.items()
    ),
    *(
        rule
        for letter, name in PROJECTIONS.items()
        for rule in linear_rules(f"{DELTA_NET}.{letter}_proj", f"attention/{name}")
    ),
    MappingRule(f"{DELTA_NET}.A_log", "attention/rate/bias"),
    MappingRule(f"{DELTA_NET}.dt_bias", "attention/step_bias/bias"),
    *norm_rules(f"{DELTA_NET}.o_norm", "attention/norm"),
    *linear_rules(f"{DELTA_NET}.o_proj", "attention/out", input_axes=2),
)
FULL_LAYER = (
    *norm_rules(f"{p.LAYER_PREFIX}.feedforward_layer_norm", "post_attention_norm"),
    *norm_rules(f"{p.LAYER_PREFIX}.post_feedforward_layernorm", "post_feed_forward_norm"),
    *p.ATTENTION,
    *p.QK_NORMS,
)
TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *(replace(rule, kind=c.LinearAttention) for rule in LINEAR_LAYER),
            *(replace(rule, kind=c.MultiHead) for rule in FULL_LAYER),
            *p.FEED_FORWARD,
        )
    },
)
RENAMES = (  # names in memory, and of the attention layers in other files
    (r"(layers\.\d+)\.input_layernorm\.", r"\1.attention_layer_norm."),
    (r"(layers\.\d+)\.post_attention_layernorm\.", r"\1.feedforward_layer_norm."),
)
PLACEMENTS: dict[str, Any] = {"linear_attention": "pre", "full_attention": "res_post"}
READ_NORM = c.RMSNorm(eps=1e-5)  # of what is read from the state, independent of rms_norm_eps
INITIAL_VALUES = (
    *("linear_a_log_min", "linear_a_log_max"),
    *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an olmo_hybrid model."""
    for name in INITIAL_VALUES:
        reader.get(name)
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6))
    heads = dict(
        **p.read_heads(reader, heads=30),
        positions=(_read_positions(reader),),
        qk_norm=c.QKNorm(norm=norm, over="width"),
        biases=p.read_biases(reader),
    )
    model = p.read_decoder(reader, heads, norm=norm)
    kinds: dict[str, Any] = {
        "linear_attention": _read_delta_net(reader),
        "full_attention": model.attention,
    }
    count = model.num_layers
    types = reader.sequence("layer_types", str)
    if types is None:
        types = tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(count))
        types = types if "full_attention" in types else (*types[:-1], "full_attention")
    if len(types) != count or set(types) != set(kinds):
        expected = f"expected linear_attention and full_attention for {count} layers."
        reader.add_problem("layer_types", expected)
        return model
    cycle = shortest_cycle(types)
    return replace(
        model,
        attention=c.Hybrid(kinds=tuple(kinds[name] for name in cycle)),
        norm_placement=tuple(PLACEMENTS[name] for name in cycle),
    )


def _read_positions(reader: ConfigReader) -> c.Rope | None:
    """RoPE; none where its base or its type is null, as in releases."""
    section = reader.section("rope_parameters")
    if section is None:
        reason = (
            "transformers takes this for a base of 10,000, its authors for no positions; say "
            '{"rope_theta": 10000.0} or {"rope_theta": null}.'
        )
        reader.add_problem("rope_parameters", reason)
    elif None in (section.get("rope_theta", 0), section.get("rope_type", "default")):
        return None
    return read_rope(reader, max_length=65_536)


def _read_delta_net(reader: ConfigReader) -> c.LinearAttention:
    heads = reader.integer("num_attention_heads", 30)
    key_heads = reader.integer("linear_num_key_heads", heads)
    width = int(0.75 * reader.integer("hidden_size", 1)) // max(1, key_heads)
    key_dim = reader.integer("linear_key_head_dim", width)
    return c.LinearAttention(
        num_heads=reader.integer("linear_num_value_heads", heads),
        num_key_heads=key_heads,
        key_dim=key_dim,
        value_dim=reader.integer("linear_value_head_dim", 2 * key_dim),
        max_beta=2.0 if reader.boolean("linear_allow_neg_eigval", True) else 1.0,
        convolution_width=reader.integer("linear_conv_kernel_dim", 4),
        output=c.GatedNorm(norm=READ_NORM),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = hybrid_kinds(config)
    if kinds is None or not isinstance(config.feed_forward[0], c.GLU):
        return None
    delta_net, attention = kinds
    rope = attention.positions[0]
    if not isinstance(rope, c.Rope | None):
        return None
    layers = [config.layer(i).attention for i in range(config.num_layers)]
    no_positions = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    return {
        **p.write_sizes(replace(config, attention=attention)),
        **(no_positions if rope is None else write_rope(rope)),
        "layer_types": [
            "full_attention" if isinstance(x, c.MultiHead) else "linear_attention" for x in layers
        ],
        "attention_bias": "out" in attention.biases,
        "rms_norm_eps": config.norm.eps,
        "linear_num_value_heads": delta_net.num_heads,
        "linear_num_key_heads": delta_net.num_key_heads,
        "linear_key_head_dim": delta_net.key_dim,
        "linear_value_head_dim": delta_net.value_dim,
        "linear_conv_kernel_dim": delta_net.convolution_width,
        "linear_allow_neg_eigval": delta_net.max_beta == 2,
    }


FAMILIES = (
    Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        read,
        write,
        TABLE,
        attention_type=c.Hybrid,
        key_renames=RENAMES,
        cut_together=tuple(CONVOLUTIONS.values()),
    ),
)
