"""Command R, Command A and Command A+: parallel blocks with one shared norm, scaled logits.

Command A (cohere2) rotates only in its layers with a window; the others see everything and no
positions. Command A+ (cohere2_moe) has experts after some dense layers, which may rotate without a
window.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    EXPERT_RULES,
    PREFIX,
    count_dense_layers,
    dense_width,
    layer_branches,
    shared_rules,
)
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import ParamMapping, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope

SCORES: Mapping[str, Any] = {"softmax": "softmax", "sigmoid": "sigmoid"}
COMBINATIONS: Mapping[str, Any] = {"average": "average", "sum": "sum"}
TABLE = ParamMapping(
    top_level=p.TOP_LEVEL,
    stacks={
        "decoder": (
            *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
            *p.ATTENTION,
            *p.QK_NORMS,
            *p.FEED_FORWARD,
            *EXPERT_RULES,
            *shared_rules(f"{PREFIX}.shared_experts"),
        )
    },
)


def read_cohere(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a cohere model."""
    rope = read_rope(reader, pairing="neighbours", base=5e5, max_length=8192)
    norm = _norm(reader)
    return _read(
        reader,
        positions=(rope,),
        qk_norm=c.QKNorm(norm=norm, over="each_head")
        if reader.boolean("use_qk_norm", False)
        else None,
    )


def write_cohere(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere's configuration from ours."""
    fields = _write(config) if p.is_rope_decoder(config) else None
    return fields and {
        **fields,
        "use_qk_norm": config.multi_head.qk_norm is not None,
        **write_rope(p.first_rope(config)),
    }


def read_cohere2(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a cohere2 model."""
    _require_constants(reader)
    every = reader.positive_integer("layer_switch", 4)
    every = reader.positive_integer("sliding_window_pattern", every)
    reader.get("_sliding_window_pattern")
    count = reader.integer("num_hidden_layers")
    sliding = p.read_layer_types(reader, count, lambda i: (i + 1) % every != 0)
    window = reader.optional_integer("sliding_window", 4096)
    rope = read_rope(reader, pairing="neighbours", max_length=8192)
    return _read(
        reader,
        positions=shortest_cycle(tuple(rope if here else None for here in sliding)),
        windows=p.window_cycle(reader, sliding, window),
    )


def write_cohere2(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere2's configuration from ours."""
    fields = _write(config)
    return fields and {
        **fields,
        **p.write_layer_types(config),
        **(write_rope(p.first_rope(config)) if _rotates(config) else {}),
    }


def read_cohere2_moe(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a cohere2_moe model."""
    _require_constants(reader)
    dense, count = count_dense_layers(reader, 0), reader.integer("num_hidden_layers")
    first = reader.integer("first_k_dense_replace", 0)  # whatever mlp_layer_types says
    dense_every = reader.positive_integer("prefix_dense_sliding_window_pattern", 1)
    every = reader.positive_integer("sliding_window_pattern", 4)

    def slides(layer: int) -> bool:
        if layer < first:
            return (layer + 1) % dense_every != 0
        return (layer - first + 1) % every != 0

    sliding = p.read_layer_types(reader, count, slides)
    rope = read_rope(reader, pairing="neighbours", max_length=8192)
    other_fields = {name: x for name, x in reader.values.items() if name != "rope_scaling"}
    if rope != read_rope(ConfigReader(other_fields), pairing="neighbours", max_length=8192):
        reason = "transformers ignores it in this family, and the other fields say otherwise."
        reader.add_problem("rope_scaling", reason)
    rotated = (here or (i < dense and dense_every == 1) for i, here in enumerate(sliding))
    prefix = "prefix_dense_intermediate_size"
    width = "intermediate_size" if reader.get(prefix) is None else prefix
    config = _read(
        reader,
        head_dim=128,
        feed_forward=(p.read_glu(reader, width_name=width),) * dense
        + (_read_moe(reader),) * (count - dense),
        positions=tuple(rope if here else None for here in rotated),
        windows=p.window_cycle(reader, sliding, reader.optional_integer("sliding_window", 4096)),
    )
    eps = reader.optional_number("rms_norm_eps")
    if eps is not None:
        config = replace(config, norm=c.RMSNorm(eps=eps))
    return _with_first_layers(config, dense if dense < count else 0)


def _read_moe(reader: ConfigReader) -> c.MoE:
    expert = p.read_glu(reader)
    score = reader.choice("expert_selection_fn", "softmax", SCORES)
    combination = reader.choice("shared_expert_combination_strategy", "average", COMBINATIONS)
    renormalise = reader.boolean("norm_topk_prob", True)  # of sigmoids alone
    shared, num_shared = None, reader.integer("num_shared_experts", 0)
    if num_shared:
        wide = replace(expert, hidden_dim=num_shared * expert.hidden_dim)
        shared = c.SharedExpert(expert=wide, combination=combination)
    return c.MoE(
        expert=expert,
        num_experts=reader.integer("num_experts", 8),
        top_k=reader.integer("num_experts_per_tok", 2),
        router=c.Router(score=score, renormalise=renormalise or score == "softmax"),
        shared=shared,
    )


def _with_first_layers(config: c.TransformerConfig, count: int) -> c.TransformerConfig:
    """The same model, whose first layers are none of the cycles."""
    layers = [config.layer(i) for i in range(config.num_layers)]
    rest = layers[count:]
    return replace(
        config,
        first_layers=tuple(layer.to_layer() for layer in layers[:count]),
        attention=replace(
            config.multi_head,
            positions=shortest_cycle(tuple(layer.positions for layer in rest)),
            windows=shortest_cycle(tuple(layer.window for layer in rest)),
        ),
        feed_forward=shortest_cycle(tuple(layer.feed_forward for layer in rest)),
    )


def write_cohere2_moe(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A cohere2_moe's configuration from ours."""
    fields, branches = _write(config), layer_branches(config)
    if fields is None or branches is None:
        return None
    moe, dense_layers = branches
    width = moe.expert.hidden_dim
    shared = moe.shared or c.SharedExpert(expert=moe.expert, combination="average")
    rotated = any(
        layer.rope is not None and layer.window is None for layer in map(config.layer, dense_layers)
    )
    kinds = ["dense" if i in dense_layers else "sparse" for i in range(config.num_layers)]
    return {
        **fields,
        **p.write_layer_types(config),
        **(write_rope(p.first_rope(config)) if _rotates(config) else {}),
        "rms_norm_eps": config.norm.eps if isinstance(config.norm, c.RMSNorm) else None,
        "intermediate_size": width,
        "prefix_dense_intermediate_size": dense_width(config, dense_layers, moe),
        "prefix_dense_sliding_window_pattern": 1 if rotated else 2,
        "mlp_layer_types": kinds,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "num_shared_experts": 0 if moe.shared is None else shared.expert.hidden_dim // width,
        "shared_expert_combination_strategy": shared.combination,
        "expert_selection_fn": moe.router.score,
        "norm_topk_prob": moe.router.renormalise,
    }


def _require_constants(reader: ConfigReader) -> None:
    """What the first files say of themselves, and what no file says otherwise."""
    reader.require_value("order_of_interleaved_layers", "local_attn_first")
    reader.require_value("position_embedding_type", "rope_gptj")
    reader.require_value("rotary_pct", 1)
    reader.require_value("use_gated_activation", True)
    reader.require_value("use_parallel_block", True)
    reader.require_value("use_qk_norm", False)
    reader.require_value("use_embedding_sharing", reader.boolean("tie_word_embeddings", True))


def _rotates(config: c.TransformerConfig) -> bool:
    return any(isinstance(layer.positions, c.Rope) for layer in config.distinct_layers)


def _read(
    reader: ConfigReader,
    *,
    head_dim: int | None = None,
    feed_forward: tuple[c.FeedForward, ...] | None = None,
    **attention: Any,
) -> c.TransformerConfig:
    heads = p.read_heads(reader, head_dim=head_dim)
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=c.MultiHead(**heads, biases=p.read_biases(reader), **attention),
        feed_forward=feed_forward or (p.read_glu(reader),),
        norm=_norm(reader),
        block="parallel_shared_norm",
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", True),
            multiplier=reader.number("logit_scale", 0.0625),
        ),
    )


def _norm(reader: ConfigReader) -> c.LayerNorm:
    return c.LayerNorm(eps=reader.number("layer_norm_eps", 1e-5), parameters="scale")


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    if not isinstance(config.topology, c.Decoder):
        return None
    if not isinstance(config.feed_forward[0], c.GLU | c.MoE):
        return None
    return {
        **p.write_sizes(config),
        "attention_bias": "out" in config.multi_head.biases,
        "layer_norm_eps": config.norm.eps,
        "logit_scale": config.head.multiplier,
    }


FAMILIES = (
    Family("cohere", "CohereForCausalLM", read_cohere, write_cohere, TABLE),
    Family("cohere2", "Cohere2ForCausalLM", read_cohere2, write_cohere2, TABLE),
    Family("cohere2_moe", "Cohere2MoeForCausalLM", read_cohere2_moe, write_cohere2_moe, TABLE),
)
