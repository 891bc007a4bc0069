"""Nemotron-H and Nemotron 3: a layer is Mamba 2, attention, a dense network or experts alone."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_hybrid import one_of_each
from jaxformer.interop.families.llama_like_experts import (
    Experts,
    expert_rules,
    read_groups,
    write_groups,
)
from jaxformer.interop.families.mamba import (
    BACKBONE_TOP_LEVEL,
    GROUPS_AND_CONVOLUTION,
    Mamba2Fields,
    mamba2_rules,
    read_step_limits,
)
from jaxformer.interop.families.option_fields import (
    Field,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family

LAYER = "backbone.layers.{layer}"
MIXER = f"{LAYER}.mixer"
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
    fields=(
        Field("mamba_num_heads", "num_heads", 128),
        Field("ssm_state_size", "key_dim", 128),
        *GROUPS_AND_CONVOLUTION,
    ),
    head_dim="mamba_head_dim",
    activation="mamba_hidden_act",
    expand=None,
    default_head_dim=64,
    unused=tuple(UNUSED.split()),
)
MLP = c.MLP(hidden_dim=1)
ACTIVATION, BIAS = "mlp_hidden_act", "mlp_bias"
MLP_FIELDS = (
    Field("intermediate_size", "hidden_dim", 21_504),
    Field(ACTIVATION, "activation", "relu2"),
    Field(BIAS, "bias", False),
)
# Experts without a gate, beside a shared one.
EXPERTS = Experts(
    moe=c.MoE(
        expert=MLP,
        num_experts=2,
        router=c.Router(score="sigmoid", selection_bias=True),
        shared=c.SharedExpert(expert=MLP),
    ),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim", 7688),
        Field(ACTIVATION, "expert.activation", "relu2"),
        Field("moe_shared_expert_intermediate_size", "shared.expert.hidden_dim", 7688),
        Field(ACTIVATION, "shared.expert.activation", "relu2"),
        Field(BIAS, "shared.expert.bias", False),
        Field("n_routed_experts", "num_experts", 8),
        Field("num_experts_per_tok", "top_k", 2),
        Field("norm_topk_prob", "router.renormalise", True),
        Field("routed_scaling_factor", "router.scale", 1.0),
    ),
    rules=(
        *expert_rules(MIXER),
        *m.glu_rules(f"{MIXER}.shared_experts", "feed_forward/shared"),
        *m.linear_rules(f"{MIXER}.fc1_latent_proj", "feed_forward/latent_down"),
        *m.linear_rules(f"{MIXER}.fc2_latent_proj", "feed_forward/latent_up"),
        m.MappingRule(f"{MIXER}.gate.e_score_correction_bias", "feed_forward/selection_bias"),
    ),
    constants={"n_shared_experts": 1},
)
TABLE = m.decoder_mapping(
    BACKBONE_TOP_LEVEL,
    *m.norm_rules(f"{LAYER}.norm", "pre_attention_norm"),  # a layer has one of the two
    *m.norm_rules(f"{LAYER}.norm", "pre_feed_forward_norm"),
    *mamba2_rules(MIXER),
    *(replace(rule, kind=c.MultiHead) for rule in m.attention_rules(MIXER)),
    *m.branch_rules(MIXER, "feed_forward", up="up_proj", down="down_proj"),
    *EXPERTS.rules,
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a nemotron_h model."""
    norm = c.RMSNorm(eps=reader.number("layer_norm_epsilon", 1e-5))
    reader.require_value("mamba_proj_bias", False)
    reader.get("attention_bias")  # without effect in transformers: biases are refused as tensors
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
        "mlp": (c.NoAttention(), with_options(MLP, read_options(reader, MLP_FIELDS))),
        "moe": (c.NoAttention(), _read_moe(reader)),
    }
    types = _read_layer_types(reader)
    kinds, feed_forward = zip(*(branches[x] for x in types), strict=True)
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=reader.integer("hidden_size", 4096),
        num_layers=len(types),
        attention=kinds,
        feed_forward=feed_forward,
        norm=norm,
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
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


def _read_moe(reader: ConfigReader) -> c.MoE:
    moe, latent = EXPERTS.read_moe(reader, bias=False), None
    groups = read_groups(reader)
    latent_dim = reader.optional_integer("moe_latent_size")
    if latent_dim is not None:
        latent = c.ExpertLatent(latent_dim=latent_dim, bias=reader.boolean(BIAS, False))
    return with_options(moe, {"router.groups": groups, "latent": latent})


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """Fields of config.json, or None for another model."""
    kinds = one_of_each(config)
    types = [_layer_type(layer) for layer in config.layers]
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
        "tie_word_embeddings": config.head.tied,
        "layer_norm_epsilon": config.norm.eps,
        "time_step_min": 0.0 if mamba.steps is None else mamba.steps.min_step,
        **MAMBA.write(config, mamba),
    }
    for branch in config.feed_forward:
        if isinstance(branch, c.MLP):
            fields |= write_options(branch, MLP_FIELDS)
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


def _write_moe(moe: c.MoE) -> dict[str, Any]:
    router: Any = moe.router
    return {
        **write_options(moe, EXPERTS.fields),
        **write_groups(router.groups),
        "moe_latent_size": None if moe.latent is None else moe.latent.latent_dim,
    }


FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        read,
        write,
        TABLE,
        ignored_tensors=(*INV_FREQ_PATTERNS, r"mtp\..*"),
        attention_types=(c.LinearAttention, c.MultiHead, c.NoAttention),
    ),
)
