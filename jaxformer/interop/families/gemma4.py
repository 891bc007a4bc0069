"""Gemma 4: E2B, E4B, 31B and 26B-A4B.

Full layers have other heads and another RoPE than those with a window, and may have one projection
for key and value. E2B and E4B have embeddings for each layer, and their last layers read keys and
values of earlier ones. `gemma4` is the text part of a model that also reads images; it can be read,
and is written as `gemma4_text`.
"""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import gemma
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like_experts import SHARED
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import (
    MappingRule,
    ParamMapping,
    glu_rules,
    linear_rules,
    norm_rules,
)
from jaxformer.interop.rope_config import read_rope_section, write_rope_section
from jaxformer.interop.transforms import ExpertKernels, Fused

NORMS = {  # beside those of the layer
    "pre_feedforward_layernorm": "pre_shared_norm",
    "post_feedforward_layernorm_1": "post_shared_norm",
    "pre_feedforward_layernorm_2": "pre_experts_norm",
    "post_feedforward_layernorm_2": "post_experts_norm",
}
EXPERTS = (
    *glu_rules(f"{p.LAYER_PREFIX}.mlp", SHARED),
    *(
        rule
        for theirs, ours in NORMS.items()
        for rule in norm_rules(f"{p.LAYER_PREFIX}.{theirs}", f"feed_forward/{ours}")
    ),
    *linear_rules(f"{p.LAYER_PREFIX}.router.proj", "feed_forward/router"),
    MappingRule(f"{p.LAYER_PREFIX}.router.scale", "feed_forward/router_norm/scale"),
    MappingRule(f"{p.LAYER_PREFIX}.router.per_expert_scale", "feed_forward/expert_scale"),
    MappingRule(
        f"{p.LAYER_PREFIX}.experts.gate_up_proj",
        ("feed_forward/experts/gate/kernel", "feed_forward/experts/up/kernel"),
        Fused(part=ExpertKernels(), axis=1),
    ),
    MappingRule(
        f"{p.LAYER_PREFIX}.experts.down_proj", "feed_forward/experts/down/kernel", ExpertKernels()
    ),
)
LAYER_EMBEDDINGS = (
    MappingRule("model.embed_tokens_per_layer.weight", "layer_embedding/tokens/embedding"),
    *linear_rules("model.per_layer_model_projection", "layer_embedding/projection"),
    *norm_rules("model.per_layer_projection_norm", "layer_embedding/norm"),
)
LAYER_EMBEDDING_BRANCH = (
    *linear_rules(f"{p.LAYER_PREFIX}.per_layer_input_gate", "layer_embedding/gate"),
    *linear_rules(f"{p.LAYER_PREFIX}.per_layer_projection", "layer_embedding/down"),
    *norm_rules(f"{p.LAYER_PREFIX}.post_per_layer_input_norm", "layer_embedding/norm"),
)
TABLE = ParamMapping(
    top_level=(*p.TOP_LEVEL, *LAYER_EMBEDDINGS),
    stacks={
        "decoder": (
            *gemma.GEMMA3.mapping.stacks["decoder"],
            *linear_rules(f"{p.LAYER_PREFIX}.self_attn.k_proj", "attention/key_value"),
            MappingRule(f"{p.LAYER_PREFIX}.layer_scalar", "layer_scalar"),
            *LAYER_EMBEDDING_BRANCH,
            *EXPERTS,
        )
    },
)
SHARED_KV_BIASES: tuple[Any, ...] = ("query", "key_value", "out")
GLOBAL_ROPE: dict[str, Any] = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e6,
}
ROPES: dict[str, dict[str, Any]] = {
    "full_attention": GLOBAL_ROPE,
    "sliding_attention": {"rope_theta": 1e4},
}


def read_text(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gemma4_text model."""
    reader.require_value("use_bidirectional_attention", False, "vision")  # of tokens of images
    sizes = p.read_sizes(reader)
    norm = c.RMSNorm(eps=reader.number("rms_norm_eps", 1e-6))
    kinds = _read_kinds(reader, sizes["num_layers"], norm)
    branch, wide_branch = (_read_feed_forward(reader, norm, factor) for factor in (1, 2))
    is_wide = reader.boolean("use_double_wide_mlp", False)
    first_layers: tuple[c.Layer, ...] = ()
    if count := _read_num_shared(reader, kinds):
        first_layers = tuple(c.Layer(attention=x, feed_forward=branch) for x in kinds[:-count])
        kinds = tuple(map(_with_source, kinds[-count:]))
    return c.TransformerConfig(
        **sizes,
        first_layers=first_layers,
        attention=c.Hybrid(kinds=shortest_cycle(kinds)),
        feed_forward=(wide_branch if first_layers and is_wide else branch,),
        layer_embedding=_read_layer_embedding(reader),
        norm=norm,
        norm_placement="sandwich",
        layer_scalar=True,
        embedding=c.Embedding(scale=math.sqrt(reader.positive_integer("hidden_size"))),
        head=c.LMHead(
            tied=reader.boolean("tie_word_embeddings", True),
            softcap=reader.optional_number("final_logit_softcapping"),
        ),
    )


def read_multimodal(reader: ConfigReader) -> c.TransformerConfig:
    """Read the text part of the config.json of a gemma4 model; the tensors say if it is tied."""
    for name in ("vision_config", "audio_config", "vision_soft_tokens_per_image"):
        reader.get(name)
    for name in ("eoa_token_index", "tie_word_embeddings"):
        reader.get(name)
    return read_text(reader.section("text_config") or reader)


def _read_num_shared(reader: ConfigReader, kinds: tuple[Any, ...]) -> int:
    """Number of the last layers that read keys and values of earlier ones."""
    count, shares = (
        reader.integer("num_kv_shared_layers", 0),
        reader.boolean("attention_k_eq_v", False),
    )
    if count == 0:
        return 0
    windows = [kind.windows for kind in kinds]
    if not 0 < count < len(kinds):
        problem = f"expected 0 or more, and fewer than the {len(kinds)} layers."
    elif set(windows[-count:]) - set(windows[:-count]):
        problem = "each of these layers needs an earlier one of its type, whose keys it reads."
    elif shares:
        problem = "attention_k_eq_v, one projection for key and value, is not supported beside it."
    else:
        return count
    reader.add_problem("num_kv_shared_layers", problem)
    return 0


def _with_source(kind: Any) -> Any:
    """The option of a layer that reads keys and values of an earlier one."""
    biases = ("query", "out") if kind.biases else ()
    return replace(kind, cross_layer_kv=True, value_norm=None, biases=biases)


def _read_layer_embedding(reader: ConfigReader) -> c.LayerEmbedding | None:
    """The embeddings of each layer, if there are any."""
    dim, vocab_size = (
        reader.integer("hidden_size_per_layer_input", 256),
        reader.integer("vocab_size_per_layer_input", 262_144),
    )
    if dim == 0:
        return None
    if vocab_size != (size := reader.integer("vocab_size")):
        reader.add_problem("vocab_size_per_layer_input", f"must be vocab_size, which is {size}.")
    activation = reader.choice("hidden_activation", "gelu_pytorch_tanh", HF_ACTIVATIONS)
    return c.LayerEmbedding(dim=dim, activation=activation)


def _read_feed_forward(reader: ConfigReader, norm: c.RMSNorm, factor: int) -> c.FeedForward:
    """A gated network of a multiple of the width, beside experts if there are any."""
    dense = p.read_glu(reader, name="hidden_activation", activation="gelu_pytorch_tanh")
    dense = replace(dense, hidden_dim=factor * dense.hidden_dim)
    names = "moe_intermediate_size", "num_experts", "top_k_experts"
    if not reader.boolean("enable_moe_block", False):
        for name in names:  # without effect
            reader.get(name)
        return dense
    width, num_experts, top_k = map(reader.integer, names)
    return c.MoE(
        expert=c.GLU(hidden_dim=width, activation=dense.activation),
        num_experts=num_experts,
        top_k=top_k,
        router=c.Router(norm=norm, expert_scale=True),
        shared=c.SharedExpert(expert=dense),
        norm=norm,
    )


def _read_kinds(reader: ConfigReader, count: int, norm: c.RMSNorm) -> tuple[Any, ...]:
    """The attention kind of each layer; transformers takes the last for a full one."""
    sliding = p.read_layer_types(reader, count, lambda i: (i + 1) % 6 > 0)
    sliding = (*sliding[:-1], False)
    sections = reader.section("rope_parameters") or ConfigReader(ROPES)
    for kind in ("full_attention", *("sliding_attention",) * any(sliding)):
        if sections.section(kind) is None:
            sections.add_problem(kind, "expected an object.")
    length = reader.integer("max_position_embeddings", 131_072)
    full_rope, local_rope = (
        read_rope_section(
            sections.section(kind) or ConfigReader({}), base=rope["rope_theta"], max_length=length
        )
        for kind, rope in ROPES.items()
    )
    common: dict[str, Any] = {
        **p.read_heads(reader, heads=8, kv_heads=4, head_dim=256),
        "scale": 1.0,
        "qk_norm": c.QKNorm(norm=norm),
        "value_norm": replace(norm, parameters="none"),
        "biases": p.read_biases(reader),
    }
    window = reader.integer("sliding_window", 512)
    local = c.MultiHead(**common, positions=(local_rope,), windows=(window,))
    shares = reader.boolean("attention_k_eq_v", False)
    full_layers = [i for i, here in enumerate(sliding) if not here]
    common |= {"positions": (full_rope,), **_read_full_heads(reader, full_layers, shares, common)}
    if shares:
        biases = SHARED_KV_BIASES if common["biases"] else ()
        full: Any = c.SharedKV(**common | {"biases": biases})
    else:
        full = c.MultiHead(**common)
    return tuple(local if here else full for here in sliding)


def _read_full_heads(
    reader: ConfigReader, layers: list[int], shares: bool, default: dict[str, Any]
) -> dict[str, int]:
    """Heads of the full layers: released files have two fields, later ones an entry for a layer."""
    num_kv_heads, width = default["num_kv_heads"], default["head_dim"]
    released = {
        "num_kv_heads": reader.integer("num_global_key_value_heads", num_kv_heads),
        "head_dim": reader.integer("global_head_dim", 512),
    }
    by_layer = reader.section("per_layer_config")
    if by_layer is None:
        return released if shares else released | {"num_kv_heads": num_kv_heads}
    names = {int(x): x for x in by_layer.values if x.isdecimal()}  # "05" of 60 layers
    entries = [by_layer.section(names.get(i, "")) or ConfigReader({}) for i in layers]
    heads = [
        {
            "num_kv_heads": entry.integer("num_key_value_heads", num_kv_heads),
            "head_dim": entry.integer("head_dim", width),
        }
        for entry in entries
    ]
    if any(entry != heads[0] for entry in heads):
        reader.add_problem("per_layer_config", "full layers must have the same heads.")
    return heads[0]


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    layers: Any = [config.layer(i) for i in range(config.num_layers)]
    sources = [layer for layer in layers if not layer.attention.cross_layer_kv]
    full: Any = [layer for layer in sources if layer.window is None]
    local: Any = [layer for layer in sources if layer.window is not None] or full
    branch, last_branch = layers[0].feed_forward, layers[-1].feed_forward
    experts: Any = branch if isinstance(branch, c.MoE) and branch.shared is not None else None
    dense = branch if experts is None else experts.shared.expert
    if not (
        full
        and all(isinstance(x.attention, c.MultiHead | c.SharedKV) for x in (full[0], local[0]))
        and isinstance(full[0].positions, c.Rope)
        and isinstance(local[0].positions, c.Rope)
        and isinstance(dense, c.GLU)
    ):
        return None
    shares, heads = isinstance(full[0].attention, c.SharedKV), local[0].attention
    full_heads = full[0].attention
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "global_head_dim": full_heads.head_dim,
        "num_global_key_value_heads": full_heads.num_kv_heads if shares else None,
        "attention_k_eq_v": shares,
        "attention_bias": "out" in heads.biases,
        "rms_norm_eps": config.norm.eps,
        "final_logit_softcapping": config.head.softcap,
        "tie_word_embeddings": config.head.tied,
        **_feed_forward_fields(dense, experts),
        "num_kv_shared_layers": len(layers) - len(sources),
        "use_double_wide_mlp": branch != last_branch,
        "hidden_size_per_layer_input": config.layer_embedding.dim if config.layer_embedding else 0,
        "vocab_size_per_layer_input": config.vocab_size,
        **p.write_layer_types(config),
    }
    return fields | {
        "rope_parameters": {
            "full_attention": write_rope_section(full[0].positions)[0],
            "sliding_attention": write_rope_section(local[0].positions)[0],
        }
    }


def _feed_forward_fields(dense: c.GLU, experts: c.MoE | None) -> dict[str, Any]:
    """Fields of the gated network, and of the experts beside it."""
    return {
        "intermediate_size": dense.hidden_dim,
        "hidden_activation": hf_activation_name(dense.activation),
        "enable_moe_block": experts is not None,
        "moe_intermediate_size": experts and experts.expert.hidden_dim,
        "num_experts": experts and experts.num_experts,
        "top_k_experts": experts and experts.top_k,
    }


FAMILIES = (
    Family("gemma4_text", "Gemma4ForCausalLM", read_text, write, TABLE, attention_type=c.Hybrid),
    Family(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        read_multimodal,
        lambda config: None,
        TABLE,
        ignored_tensors=(
            *INV_FREQ_PATTERNS,
            r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*",
        ),
        key_renames=((r"^language_model\.", ""), (r"^model\.language_model\.", "model.")),
        attention_type=c.Hybrid,
    ),
)
