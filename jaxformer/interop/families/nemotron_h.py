"""Nemotron-H and Nemotron 3: a layer is Mamba 2, attention, a dense network or experts alone."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    Change,
    Field,
    NoEntries,
    NotWritten,
    Options,
    Unused,
    fixed,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mamba import (
    BACKBONE_TOP_LEVEL,
    GROUPS_AND_CONVOLUTION,
    Mamba2Fields,
    StepLimits,
    mamba2_rules,
)
from jaxformer.interop.families.mixers import first_mixer, of_kind
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

LAYER = "backbone.layers.{layer}"
MIXER = f"{LAYER}.mixer"
TYPES = "layers_block_type"
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
MAMBA = Mamba2Fields(
    fields=(
        Field("mamba_num_heads", "num_heads", 128),
        Field("ssm_state_size", "key_dim", 128),
        *GROUPS_AND_CONVOLUTION,
        Field("time_step_min", "decay.min_step", 1e-3),
        NotWritten(Field("layer_norm_epsilon", "output.norm.eps", 1e-5)),
    ),
    head_dim="mamba_head_dim",
    activation="mamba_hidden_act",
    expand=None,
    default_head_dim=64,
)
MLP = c.MLP(hidden_dim=1)
ACTIVATION, BIAS = "mlp_hidden_act", "mlp_bias"
MLP_FIELDS = (
    Field("intermediate_size", "hidden_dim", 21_504),
    Field(ACTIVATION, "activation", "relu2"),
    Field(BIAS, "bias", False),
)


class LatentSize:
    """The width that experts read and write, if it differs from the model's."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        width = reader.optional_integer("moe_latent_size")
        if width is None:
            return {"latent": None}
        return {"latent": c.ExpertLatent(latent_dim=width, bias=reader.boolean(BIAS, False))}

    def write(self, model: c.MoE) -> Options:
        return {"moe_latent_size": None if model.latent is None else model.latent.latent_dim}


# Experts without a gate, beside a shared one.
EXPERTS = e.Experts(
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
        *(e.Groups(), LatentSize()),
        *fixed(n_shared_experts=1),
    ),
)


class Blocks:
    """What each layer is, by a list or by letters."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention kinds and the networks of the layers."""
        types = self._read_types(reader)
        mamba = MAMBA.read(reader, options)
        networks: dict[str, Any] = {
            "mlp": with_options(MLP, read_options(reader, MLP_FIELDS)),
            "moe": EXPERTS.read_moe(reader),
        }

        def kinds(attention: c.MultiHead) -> tuple[Any, ...]:
            known = {"linear_attention": mamba, "full_attention": attention}
            return tuple(known.get(word, c.NoAttention()) for word in types)

        return {
            "num_layers": len(types),
            "attention": Change(kinds),
            "feed_forward": tuple(networks.get(word, c.NoFeedForward()) for word in types),
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The list, and the fields of Mamba 2, of the dense network and of the experts."""
        types = [_layer_type(layer) for layer in model.layers]
        if None in types:
            return None
        entries = {
            TYPES: types,
            "num_hidden_layers": len(types),
            **(MAMBA.write(model, first_mixer(model, c.LinearAttention)) or {}),
        }
        for network in model.feed_forward:
            if isinstance(network, c.MLP):
                entries |= write_options(network, MLP_FIELDS) or {}
            elif isinstance(network, c.MoE):
                entries |= write_options(network, EXPERTS.fields) or {}
        return entries

    @staticmethod
    def _read_types(reader: ConfigReader) -> tuple[str, ...]:
        words, letters, name = (
            reader.sequence(TYPES, str),
            reader.get("hybrid_override_pattern"),
            TYPES,
        )
        if words is None and isinstance(letters, str):
            name, words = "hybrid_override_pattern", tuple(LETTERS.get(x, x) for x in letters)
        types = tuple(OLD_TYPES.get(word, word) for word in words or ())
        if not types or not set(types) <= set(LETTERS.values()):
            known = ", ".join(f"{letter} ({word})" for letter, word in LETTERS.items())
            reader.add_problem(name, f"expected {known} for each layer.")
            return ("mlp",)
        reason = f"{name} has another number of layers"
        reader.require_value("num_hidden_layers", len(types), reason=reason)
        return types


def _layer_type(layer: c.Layer) -> str | None:
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


class NoStepLimits(NoEntries):
    """``time_step_limit`` has no effect in this family, so it must be the default."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        if StepLimits().read(reader, options)["decay"] != c.StepDecay():
            reader.add_problem("time_step_limit", "steps are limited by time_step_min alone.")
        return {}


VOCABULARY, WIDTH, _, *HEADS = p.sizes(heads=32, kv_heads=8, head_dim=128, model_dim=4096)
FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        like(LLAMA, positions=(None,), feed_forward=(c.NoFeedForward(),)),
        (
            *(VOCABULARY, WIDTH, *HEADS, p.UNTIED, Blocks()),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            *(NoStepLimits(), *fixed(mamba_proj_bias=False)),
            Unused("attention_bias"),  # without effect in transformers: refused as tensors
            # Initial values, and forms of a computation.
            Unused("chunk_size", "expand", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
            Unused("moe_shared_expert_overlap", "use_mamba_kernels", "rescale_prenorm_residual"),
            Unused("residual_in_fp32", "time_step_floor", "time_step_max"),
            # Layers that predict further tokens, and RoPE, which no layer has.
            Unused("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
            Unused("num_nextn_predict_layers", "partial_rotary_factor", "rope_theta"),
        ),
        m.decoder_mapping(
            *BACKBONE_TOP_LEVEL,
            *m.norm_rules(f"{LAYER}.norm", "pre_attention_norm"),  # a layer has one of the two
            *m.norm_rules(f"{LAYER}.norm", "pre_feed_forward_norm"),
            *mamba2_rules(MIXER),
            *of_kind(c.MultiHead, *m.attention_rules(MIXER)),
            *m.branch_rules(MIXER, "feed_forward", up="up_proj", down="down_proj"),
            *e.expert_rules(MIXER),
            *m.glu_rules(f"{MIXER}.shared_experts", "feed_forward/shared"),
            *m.linear_rules(f"{MIXER}.fc1_latent_proj", "feed_forward/latent_down"),
            *m.linear_rules(f"{MIXER}.fc2_latent_proj", "feed_forward/latent_up"),
            m.MappingRule(f"{MIXER}.gate.e_score_correction_bias", "feed_forward/selection_bias"),
        ),
        ignored_tensors=(*INV_FREQ_PATTERNS, r"mtp\..*"),
        attention_types=(c.LinearAttention, c.MultiHead, c.NoAttention),
    ),
)
