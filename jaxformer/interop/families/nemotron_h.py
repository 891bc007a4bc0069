"""Nemotron-H and Nemotron 3: a layer is Mamba 2, attention, a dense network or experts alone."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like_experts import expert_rules, shared_rules
from jaxformer.interop.families.mamba import (
    BACKBONE_TOP_LEVEL,
    Mamba2Fields,
    hybrid_kinds,
    mamba2_rules,
    read_step_limits,
)
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules

LAYER = "backbone.layers.{layer}"
MIXER = f"{LAYER}.mixer"
SHARED_WIDTH = "moe_shared_expert_intermediate_size"
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
# Initial values, forms of a computation, layers that predict further tokens, and RoPE, which no
# layer has.
UNUSED = (
    "chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern "
    "mtp_layers_block_type num_logits_to_keep num_nextn_predict_layers partial_rotary_factor "
    "rescale_prenorm_residual residual_in_fp32 rope_theta time_step_floor time_step_max "
    "use_mamba_kernels"
)
MAMBA = Mamba2Fields(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state_dim="ssm_state_size",
    activation="mamba_hidden_act",
    expand=None,
    default_head_dim=64,
    unused=tuple(UNUSED.split()),
)
ATTENTION = (
    *linear_rules(f"{MIXER}.q_proj", "attention/query"),
    *linear_rules(f"{MIXER}.k_proj", "attention/key"),
    *linear_rules(f"{MIXER}.v_proj", "attention/value"),
    *linear_rules(f"{MIXER}.o_proj", "attention/out", input_axes=2),
)
TABLE = ParamMapping(
    top_level=BACKBONE_TOP_LEVEL,
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.norm", "pre_attention_norm"),  # a layer has one of the two
            *norm_rules(f"{LAYER}.norm", "pre_feed_forward_norm"),
            *mamba2_rules(MIXER),
            *(replace(rule, kind=c.MultiHead) for rule in ATTENTION),
            *linear_rules(f"{MIXER}.up_proj", "feed_forward/up"),
            *linear_rules(f"{MIXER}.down_proj", "feed_forward/down"),
            *expert_rules(MIXER),
            *shared_rules(f"{MIXER}.shared_experts"),
            *linear_rules(f"{MIXER}.fc1_latent_proj", "feed_forward/latent_down"),
            *linear_rules(f"{MIXER}.fc2_latent_proj", "feed_forward/latent_up"),
            MappingRule(f"{MIXER}.gate.e_score_correction_bias", "feed_forward/selection_bias"),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a nemotron_h model."""
    norm = c.RMSNorm(eps=reader.number("layer_norm_epsilon", 1e-5))
    for name in ("attention_bias", "mamba_proj_bias", "tie_word_embeddings"):
        reader.require_value(name, False)
    if read_step_limits(reader) != {"min_step": 0.0, "max_step": None}:
        reader.add_problem("time_step_limit", "steps are limited by time_step_min alone.")
    branches: dict[str, tuple[c.AttentionKind, c.FeedForward]] = {
        "linear_attention": (
            MAMBA.read(reader, norm, min_step=reader.number("time_step_min", 1e-3), max_step=None),
            c.NoFeedForward(),
        ),
        "full_attention": (
            c.MultiHead(
                **p.read_heads(reader, heads=32, kv_heads=8, head_dim=128), positions=(None,)
            ),
            c.NoFeedForward(),
        ),
        "mlp": (c.NoAttention(), _read_mlp(reader, "intermediate_size", 21_504)),
        "moe": (c.NoAttention(), _read_moe(reader)),
    }
    types = _read_layer_types(reader)
    kinds, feed_forward = zip(*shortest_cycle(tuple(branches[x] for x in types)), strict=True)
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=reader.integer("hidden_size", 4096),
        num_layers=len(types),
        attention=c.Hybrid(kinds=kinds),
        feed_forward=feed_forward,
        norm=norm,
    )


def _read_layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """The type of each layer, by a list or by letters."""
    words = reader.sequence("layers_block_type", str)
    letters = reader.get("hybrid_override_pattern")
    name = "layers_block_type"
    if words is None and isinstance(letters, str):
        name, words = "hybrid_override_pattern", tuple(LETTERS.get(x, x) for x in letters)
    types = tuple(OLD_TYPES.get(word, word) for word in words or ())
    if not types or not set(types) <= set(LETTERS.values()):
        known = ", ".join(f"{letter} ({word})" for letter, word in LETTERS.items())
        reader.add_problem(name, f"expected {known} for each layer.")
        return ("mlp",)
    reader.require_value(
        "num_hidden_layers", len(types), reason=f"{name} has another number of layers"
    )
    return types


def _read_mlp(reader: ConfigReader, width_name: str, width: int) -> c.MLP:
    return c.MLP(
        hidden_dim=reader.integer(width_name, width),
        activation=reader.choice("mlp_hidden_act", "relu2", HF_ACTIVATIONS),
        bias=reader.boolean("mlp_bias", False),
    )


def _read_moe(reader: ConfigReader) -> c.MoE:
    """Experts without a gate, beside a shared one."""
    reader.require_value("n_shared_experts", 1)
    groups, top_k_groups = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    router = c.Router(
        score="sigmoid",
        selection_bias=True,
        groups=None if groups == 1 else c.ExpertGroups(num_groups=groups, top_k=top_k_groups),
        renormalise=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    expert = replace(_read_mlp(reader, "moe_intermediate_size", 7688), bias=False)
    shared = _read_mlp(reader, SHARED_WIDTH, 7688)
    latent, latent_dim = None, reader.optional_integer("moe_latent_size")
    if latent_dim is not None:
        latent = c.ExpertLatent(latent_dim=latent_dim, bias=shared.bias)
    return c.MoE(
        expert=expert,
        num_experts=reader.integer("n_routed_experts", 8),
        top_k=reader.integer("num_experts_per_tok", 2),
        router=router,
        shared=c.SharedExpert(expert=shared),
        latent=latent,
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = hybrid_kinds(config)
    types = [_layer_type(config.layer(i)) for i in range(config.num_layers)]
    if kinds is None or None in types:
        return None
    mamba, attention = kinds
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "layers_block_type": types,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "layer_norm_epsilon": config.norm.eps,
        "time_step_min": 0.0 if mamba.steps is None else mamba.steps.min_step,
        **MAMBA.write(config, mamba),
    }
    for branch in config.feed_forward:
        if isinstance(branch, c.MLP):
            fields |= _write_mlp(branch, "intermediate_size")
        elif isinstance(branch, c.MoE):
            fields |= _write_moe(branch)
    return fields


def _layer_type(layer: Any) -> str | None:
    """The type of a layer with one branch."""
    match layer.attention, layer.feed_forward:
        case c.LinearAttention(), c.NoFeedForward():
            return "linear_attention"
        case c.MultiHead(), c.NoFeedForward():
            return "full_attention"
        case c.NoAttention(), c.MLP():
            return "mlp"
        case c.NoAttention(), c.MoE(expert=c.MLP(), shared=c.SharedExpert(expert=c.MLP())):
            return "moe"
    return None


def _write_mlp(branch: Any, width_name: str) -> dict[str, Any]:
    return {
        width_name: branch.hidden_dim,
        "mlp_hidden_act": hf_activation_name(branch.activation),
        "mlp_bias": branch.bias,
    }


def _write_moe(moe: c.MoE) -> dict[str, Any]:
    shared, groups = moe.shared, moe.router.groups
    return {
        **({} if shared is None else _write_mlp(shared.expert, SHARED_WIDTH)),
        "moe_intermediate_size": moe.expert.hidden_dim,
        "moe_latent_size": None if moe.latent is None else moe.latent.latent_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": 1 if groups is None else groups.num_groups,
        "topk_group": 1 if groups is None else groups.top_k,
        "norm_topk_prob": moe.router.renormalise,
        "routed_scaling_factor": moe.router.scale,
    }


FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        read,
        write,
        TABLE,
        ignored_tensors=(*INV_FREQ_PATTERNS, r"mtp\..*"),
        attention_type=c.Hybrid,
    ),
)
