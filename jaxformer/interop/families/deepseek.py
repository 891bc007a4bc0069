"""DeepSeek V2 and V3, GLM 4.7 Flash: multi-head latent attention and experts in a Llama block.

Modules that predict further tokens are left out.
"""

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import hf_activation_name
from jaxformer.interop.families.llama_like_experts import (
    DeepSeekMoE,
    DeepSeekV2MoE,
    deepseek_experts,
    has_feed_forward_biases,
)
from jaxformer.interop.families.option_fields import (
    POSITIVE_INTEGER,
    Field,
    read_options,
    write_options,
)
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeFields
from jaxformer.interop.transforms import FusedPerGroup, LinearKernel

LATENT_EPS = 1e-6  # of the latents' norms, independent of rms_norm_eps
Fields = tuple[Field, ...]
SIGMOID = c.Router(score="sigmoid", selection_bias=True)
V2 = DeepSeekV2MoE(
    num_shared=2, **deepseek_experts(64, width=1407, router=c.Router(renormalise=False))
)
V3 = DeepSeekMoE(
    first_dense=3,
    groups=c.ExpertGroups(num_groups=8, top_k=4),
    **deepseek_experts(256, 8, width=2048, router=replace(SIGMOID, scale=2.5)),
)
LITE = DeepSeekMoE(
    first_dense=1,
    has_layer_types=True,
    **deepseek_experts(64, 4, width=1536, router=replace(SIGMOID, scale=1.8)),
)


def _has_direct_query(config: c.TransformerConfig) -> bool:
    kinds = (x.attention for x in config.layers if isinstance(x.attention, c.Latent))
    return any(x.query_latent_dim is None for x in kinds)


def _has_latent_query(config: c.TransformerConfig) -> bool:
    return not _has_direct_query(config)


LATENT_RULES = (
    m.MappingRule(
        f"{p.SELF_ATTENTION}.q_proj.weight",
        "attention/query/kernel",
        LinearKernel(),
        _has_direct_query,
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.q_a_proj", "attention/query_latent"),
    *m.norm_rules(f"{p.SELF_ATTENTION}.q_a_layernorm", "attention/query_latent_norm"),
    m.MappingRule(
        f"{p.SELF_ATTENTION}.q_b_proj.weight",
        "attention/query/kernel",
        LinearKernel(),
        _has_latent_query,
    ),
    *m.fused_rules(f"{p.SELF_ATTENTION}.kv_a_proj_with_mqa", "attention", ("latent", "rotary_key")),
    *m.norm_rules(f"{p.SELF_ATTENTION}.kv_a_layernorm", "attention/latent_norm"),
    m.MappingRule(
        f"{p.SELF_ATTENTION}.kv_b_proj.weight",
        ("attention/key/kernel", "attention/value/kernel"),
        FusedPerGroup(),
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
)
MAPPING = m.decoder_mapping(p.TOP_LEVEL, *p.PRE_NORMS, *LATENT_RULES, *V3.rules)


def latent_fields(*, query: int | None = 1536, plain: int = 128, value: int = 128) -> Fields:
    """Fields of latent attention, with defaults of ranks and widths."""
    return (
        Field("num_attention_heads", "num_heads"),
        Field("kv_lora_rank", "latent_dim", 512),
        Field("q_lora_rank", "query_latent_dim", query, ConfigReader.optional_integer),
        Field("qk_nope_head_dim", "nope_dim", plain, POSITIVE_INTEGER),
        Field("qk_rope_head_dim", "rope_dim", 64, POSITIVE_INTEGER),
        Field("v_head_dim", "value_dim", value),
    )


@dataclass(frozen=True)
class DeepSeekLike:
    """Latent attention and experts in a Llama block.

    Attributes:
        model_type: As in `Family`.
        architecture: As in `Family`.
        moe: Feed-forward networks.
        max_length: Default of ``max_position_embeddings``.
        eps: Default of the RMSNorm's eps.
        latent: Fields of the attention.
        has_pairing: Whether ``rope_interleave`` says which features RoPE turns as a pair; without
            it they are neighbours.
        has_biases: Whether ``mlp_bias`` says that networks have biases.
        heads_divide_width: Whether transformers requires that num_heads divides model_dim.
        predicts_further_tokens: As in `Family`.
    """

    model_type: str
    architecture: str
    moe: DeepSeekMoE
    _: KW_ONLY
    max_length: int = 4096
    eps: float = 1e-6
    latent: Fields = field(default_factory=latent_fields)
    has_pairing: bool = True
    has_biases: bool = False
    heads_divide_width: bool = False
    predicts_further_tokens: bool = True

    def family(self) -> Family:
        """The family."""
        return Family(
            self.model_type,
            self.architecture,
            self.read,
            self.write,
            MAPPING,
            attention_types=(c.Latent,),
            predicts_further_tokens=self.predicts_further_tokens,
        )

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        neighbours = reader.boolean("rope_interleave", True) if self.has_pairing else True
        bias = reader.boolean("mlp_bias", False) if self.has_biases else False
        pairing = "neighbours" if neighbours else "halves"
        rope = RopeFields(pairing=pairing, max_length=self.max_length).read_rope(reader)
        branches = self.moe.read(reader, bias=bias)
        return c.TransformerConfig(
            **p.read_sizes(reader),
            attention=_read_attention(reader, rope, self.latent),
            feed_forward=branches,
            norm=c.RMSNorm(eps=reader.number("rms_norm_eps", self.eps)),
            head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        a, experts = config.attention, self.moe.write(config)
        if not (isinstance(a, c.Latent) and p.is_rope_decoder(config)) or experts is None:
            return None
        if self.heads_divide_width and config.model_dim % a.num_heads:
            return None
        rope = p.first_rope(config)
        return {
            **write_latent_decoder(config, a),
            **experts,
            **_write_scale(RopeFields().write_rope(rope), rope, a),
            **({"rope_interleave": rope.pairing == "neighbours"} if self.has_pairing else {}),
            **({"mlp_bias": has_feed_forward_biases(config)} if self.has_biases else {}),
        }


def _read_attention(reader: ConfigReader, rope: c.Rope, fields: Fields) -> c.Latent:
    latent = read_latent(reader, fields)
    reader.require_value("head_dim", latent.rope_dim, reason="it repeats qk_rope_head_dim")
    section = reader.section("rope_scaling") or reader.section("rope_parameters")
    weight = None if section is None else section.optional_number("mscale_all_dim")
    scale = None
    if section is not None and rope.scaling is not None and weight:
        grown = yarn_attention_factor(section.number("factor", 1.0), mscale=weight)
        scale = latent.key_dim**-0.5 * grown**2
    return replace(latent, positions=(rope,), scale=scale)


def read_latent(reader: ConfigReader, fields: Fields) -> c.Latent:
    """Latent attention without positions."""
    options = read_options(reader, fields)
    reason = "latent attention has a key and a value for each head"
    reader.require_value("num_key_value_heads", options["num_heads"], reason=reason)
    width = options["nope_dim"] + options["rope_dim"]
    reader.require_value("qk_head_dim", width, reason="the parts of a head add up to it")
    biases: tuple[Any, ...] = ()
    if reader.boolean("attention_bias", False):
        biases = ("latent", "rotary_key", "out")
        biases += () if options["query_latent_dim"] is None else ("query_latent",)
    norm = c.RMSNorm(eps=LATENT_EPS)
    return c.Latent(**options, positions=(None,), norm=norm, biases=biases)


def write_latent_decoder(config: c.TransformerConfig, latent: c.Latent) -> dict[str, Any]:
    """Sizes, norm and activation of a decoder, and sizes and biases of its latent attention."""
    branch: Any = config.layers[0].feed_forward
    branch = branch.expert if isinstance(branch, c.MoE) else branch
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": branch.hidden_dim,
        "hidden_act": hf_activation_name(branch.activation),
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
        "num_key_value_heads": latent.num_heads,
        **write_options(latent, latent_fields()),
        "attention_bias": "out" in latent.biases,
    }


def _write_scale(fields: dict[str, Any], rope: c.Rope, a: c.Latent) -> dict[str, Any]:
    """RoPE fields with mscale_all_dim, which reproduces the attention scale."""
    factor = getattr(rope.scaling, "factor", 1.0)
    if a.scale is None or factor <= 1:
        return fields
    grown = math.sqrt(a.scale) * (a.nope_dim + a.rope_dim) ** 0.25
    exact = (grown - 1) / (0.1 * math.log(factor))
    weight = round(exact, 9)  # 1.0 or 0.707 of released files, without the error of the root
    if not math.isclose(weight, exact, rel_tol=1e-13):
        weight = exact
    for name in ("rope_scaling", "rope_parameters"):
        fields[name] = {**fields[name], "mscale_all_dim": weight}
    return fields


ROWS = (
    DeepSeekLike(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        V2,
        max_length=2048,
        has_pairing=False,
        has_biases=True,
        heads_divide_width=True,
        predicts_further_tokens=False,
    ),
    DeepSeekLike("deepseek_v3", "DeepseekV3ForCausalLM", V3),
    DeepSeekLike(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        LITE,
        max_length=202_752,
        eps=1e-5,
        latent=latent_fields(query=768, plain=192, value=256),
    ),
)
FAMILIES = tuple(row.family() for row in ROWS)
