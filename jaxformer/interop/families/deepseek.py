"""DeepSeek V2, V3 and similar models: multi-head latent attention and experts in a Llama block."""

import math
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    POSITIVE_INTEGER,
    Field,
    Fields,
    Options,
    Repeated,
    Unused,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeAndQueryScaling
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.interop.transforms import LINEAR, LINEAR_BY_GROUP
from jaxformer.zoo.deepseek import DEEPSEEK_V2_LITE


def _has_direct_query(config: c.TransformerConfig) -> bool:
    kinds = (x.attention for x in config.layers if isinstance(x.attention, c.Latent))
    return any(x.query_latent_dim is None for x in kinds)


def _has_latent_query(config: c.TransformerConfig) -> bool:
    return not _has_direct_query(config)


LATENT_RULES = (
    m.MappingRule(
        f"{p.SELF_ATTENTION}.q_proj.weight", "attention/query/kernel", LINEAR, _has_direct_query
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.q_a_proj", "attention/query_latent"),
    *m.norm_rules(f"{p.SELF_ATTENTION}.q_a_layernorm", "attention/query_latent_norm"),
    m.MappingRule(
        f"{p.SELF_ATTENTION}.q_b_proj.weight", "attention/query/kernel", LINEAR, _has_latent_query
    ),
    *m.fused_rules(f"{p.SELF_ATTENTION}.kv_a_proj_with_mqa", "attention", ("latent", "rotary_key")),
    *m.norm_rules(f"{p.SELF_ATTENTION}.kv_a_layernorm", "attention/latent_norm"),
    m.MappingRule(
        f"{p.SELF_ATTENTION}.kv_b_proj.weight",
        ("attention/key/kernel", "attention/value/kernel"),
        LINEAR_BY_GROUP,
    ),
    *m.linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
)


def one_key_per_head(reader: ConfigReader, name: str, default: int) -> int:
    """Read the number of KV heads, which equals the number of heads."""
    reason = "latent attention has a key and a value for each head"
    reader.require_value(name, default, reason=reason)
    return default


class LatentBiases(Field):
    """A field that says whether all projections to and from latents have biases, and the output."""

    def read_value(self, reader: ConfigReader, options: Options) -> Any:
        if not super().read_value(reader, options):
            return ()
        has_latent_query = options["attention.query_latent_dim"] is not None
        return ("latent", "rotary_key", "out", *(("query_latent",) if has_latent_query else ()))

    def write_value(self, value: Any) -> bool:
        return "out" in value


WHOLE_HEAD = Repeated(
    "qk_head_dim",
    lambda x: x["attention.nope_dim"] + x["attention.rope_dim"],
    "the parts of a head add up to it",
)


def latent_fields(
    *,
    query: int | None = 1536,
    latent: int = 512,
    plain: int = 128,
    rotated: int = 64,
    value: Any = 128,
    eps: float = 1e-6,
    tied: bool = False,
) -> Fields:
    """Fields of a decoder with latent attention, with defaults of ranks and widths."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "model_dim"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "attention.num_heads"),
        Field(
            "num_key_value_heads",
            "attention.num_heads",
            lambda x: x["attention.num_heads"],
            one_key_per_head,
        ),
        Field("kv_lora_rank", "attention.latent_dim", latent),
        Field("q_lora_rank", "attention.query_latent_dim", query, ConfigReader.optional_integer),
        Field("qk_nope_head_dim", "attention.nope_dim", plain, POSITIVE_INTEGER),
        Field("qk_rope_head_dim", "attention.rope_dim", rotated, POSITIVE_INTEGER),
        Field("v_head_dim", "attention.value_dim", value),
        WHOLE_HEAD,
        LatentBiases("attention_bias", "attention.biases", False),
        Field("rms_norm_eps", "norm.eps", eps),
        Field("tie_word_embeddings", "head.tied", tied),
    )


@dataclass(frozen=True, kw_only=True)
class LatentRope(RopeField):
    """RoPE of the shared key, and the scale of the scores, which grows with YaRN.

    Attributes:
        has_pairing: Whether ``rope_interleave`` says which features RoPE turns as a pair; without
            it they are neighbours.
        has_width: Whether ``head_dim``, if a file has it, repeats how many features RoPE turns.
    """

    pairing: Any = "neighbours"
    has_pairing: bool = True
    has_width: bool = True

    def read(self, reader: ConfigReader, options: Options) -> Options:
        rope = self.read_rope(reader)
        if self.has_pairing and not reader.boolean("rope_interleave", True):
            rope = replace(rope, pairing="halves")
        width = options["attention.rope_dim"]
        if self.has_width:
            reader.require_value("head_dim", width, reason="it repeats qk_rope_head_dim")
        section = reader.section("rope_scaling") or reader.section("rope_parameters")
        weight = None if section is None else section.optional_number("mscale_all_dim")
        scale = None
        if section is not None and rope.scaling is not None and weight:
            grown = yarn_attention_factor(section.number("factor", 1.0), mscale=weight)
            scale = (options["attention.nope_dim"] + width) ** -0.5 * grown**2
        return {"attention.positions": (rope,), "attention.scale": scale}

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json, with mscale_all_dim, which reproduces the scale."""
        fields, rope, latent = super().write(model), first_rope(model), model.layers[0].attention
        if fields is None or rope is None or not isinstance(latent, c.Latent):
            return None
        if self.has_pairing:
            fields["rope_interleave"] = rope.pairing == "neighbours"
        factor = getattr(rope.scaling, "factor", 1.0)
        if latent.scale is None or factor <= 1:
            return fields
        grown = math.sqrt(latent.scale) * (latent.nope_dim + latent.rope_dim) ** 0.25
        exact = (grown - 1) / (0.1 * math.log(factor))
        weight = round(exact, 9)  # 1.0 or 0.707 of released files, without the error of the root
        if not math.isclose(weight, exact, rel_tol=1e-13):
            weight = exact
        for name in ("rope_scaling", "rope_parameters"):
            fields[name] = {**fields[name], "mscale_all_dim": weight}
        return fields


@dataclass(frozen=True)
class TurnedFraction:
    """``partial_rotary_factor`` is the part of a query that RoPE turns, which other fields say.

    Attributes:
        rope: The fields of RoPE.
    """

    rope: LatentRope

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """RoPE of the whole shared key."""
        rope_options = self.rope.read(reader, options)
        whole = tuple(replace(rope, fraction=1.0) for rope in rope_options["attention.positions"])
        return {**rope_options, "attention.positions": whole}

    def write(self, model: c.TransformerConfig) -> Options | None:
        latent: Any = model.layers[0].attention
        if (fields := self.rope.write(model)) is None:
            return None
        fraction = {self.rope.fraction_name: latent.rope_dim / latent.key_dim}
        names = [name for name in ("rope_scaling", "rope_parameters") if fields[name]]
        return fields | fraction | {name: {**fields[name], **fraction} for name in names}


MISTRAL_4_ROPE = LatentRope(
    max_length=1_048_576, pairing="neighbours", fraction=1.0, has_width=False
)


class GroupsByBest:
    """Groups that count by their best expert, if there are any; never renormalised (V2)."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        reader.require_value("topk_method", "greedy", "group_limited_greedy")
        num_groups, top_k = (reader.optional_integer(name) for name in ("n_group", "topk_group"))
        groups = None
        if reader.get("topk_method", "greedy") == "group_limited_greedy":
            if num_groups is None or top_k is None:
                reader.add_problem("topk_method", "it needs n_group and topk_group.")
            else:
                groups = c.ExpertGroups(num_groups=num_groups, top_k=top_k, score="max")
        return {"router.groups": groups, "router.renormalise": False}

    def write(self, model: Any) -> Options:
        """The fields of the groups, and the method."""
        method = "greedy" if model.router.groups is None else "group_limited_greedy"
        return {**e.Groups().write(model), "topk_method": method, "norm_topk_prob": False}


class MiniCpmMultipliers:
    """Multipliers of the branches by the depth of the model, and of the logits by its width."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        depth = reader.optional_number("scale_depth", 1.4)
        base = reader.optional_integer("dim_model_base", 256)
        root = math.sqrt(options["num_layers"])
        return {
            "residual_multiplier": 1.0 if depth is None else depth / root,
            "head.multiplier": 1.0 if base is None else base / options["model_dim"],
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields; None for a multiplier of the logits that no whole number gives."""
        exact = model.head.multiplier * model.model_dim
        if not math.isclose(exact, round(exact), rel_tol=1e-13):
            return None
        depth = model.residual_multiplier * math.sqrt(model.num_layers)
        return {"scale_depth": round(depth, 13), "dim_model_base": round(exact)}


AXK1_EXPERTS = e.deepseek_experts(
    *(192, 8),
    width=2048,
    router=replace(e.SIGMOID, scale=2.5),
    groups=c.ExpertGroups(num_groups=8, top_k=4),
    layers=e.DenseFirst(1, has_types=True),
    more=(Field("rms_norm_eps", "output_norm.eps", 1e-6),),
)
MODEL = DEEPSEEK_V2_LITE
RULES = *p.TOP_LEVEL, *p.PRE_NORMS, *LATENT_RULES, *e.deepseek_rules()
MAPPING = m.decoder_mapping(*RULES, multi_token=e.DEEPSEEK_MULTI_TOKEN)
FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        MODEL,
        (
            *(*latent_fields(), p.HEADS_DIVIDE_WIDTH),
            LatentRope(max_length=2048, has_pairing=False),
            e.deepseek_experts(
                64,
                width=1407,
                router=c.Router(renormalise=False),
                groups=GroupsByBest(),
                shared=2,
                dense=e.dense_fields(bias="mlp_bias"),
            ),
        ),
        MAPPING,
        attention_types=(c.Latent,),
    ),
    # As V2, except: experts chosen by sigmoid and a bias, in groups; renormalised.
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        MODEL,
        (
            *(*latent_fields(), LatentRope(max_length=4096)),
            e.deepseek_experts(
                256,
                8,
                width=2048,
                router=replace(e.SIGMOID, scale=2.5),
                groups=c.ExpertGroups(num_groups=8, top_k=4),
                layers=e.DenseFirst(3),
            ),
        ),
        MAPPING,
        attention_types=(c.Latent,),
        predicts_further_tokens=True,
    ),
    # As V3, except: sizes.
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        MODEL,
        (
            *latent_fields(query=768, plain=192, value=256, eps=1e-5),
            LatentRope(max_length=202_752),
            e.deepseek_experts(
                64,
                4,
                width=1536,
                router=replace(e.SIGMOID, scale=1.8),
                layers=e.DenseFirst(1, has_types=True),
            ),
        ),
        MAPPING,
        attention_types=(c.Latent,),
        predicts_further_tokens=True,
    ),
    # As V3, except: no groups; other names of fields in old files, whose head_dim is another width.
    Family(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        MODEL,
        (
            *(*latent_fields(query=None), Unused("head_dim", "q_head_dim")),
            LatentRope(max_length=4096, has_width=False, aliases=(("deepseek_yarn", "yarn"),)),
            e.with_old_names(
                e.deepseek_experts(
                    *(128, 8),
                    width=2048,
                    router=replace(e.SIGMOID, scale=2.5),
                    layers=e.DenseFirst(1),
                )
            ),
        ),
        MAPPING,
        attention_types=(c.Latent,),
        predicts_further_tokens=True,
    ),
    # As V3, except: chosen by softmax, queries grow with the position, experts in two tensors.
    Family(
        "mistral4",
        "Mistral4ForCausalLM",
        MODEL,
        (
            *latent_fields(query=1024, latent=256, plain=64),
            replace(WHOLE_HEAD, name="head_dim"),
            RopeAndQueryScaling(rope=TurnedFraction(MISTRAL_4_ROPE)),
            e.deepseek_experts(*(128, 4), width=2048, router=c.Router()),
        ),
        m.decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *LATENT_RULES, *p.FEED_FORWARD),
            m.MappingRule(f"{e.PREFIX}.gate.weight", "feed_forward/router/kernel", LINEAR),
            *e.stacked_rules(f"{e.PREFIX}.experts.gate_up_proj", f"{e.PREFIX}.experts.down_proj"),
            *m.glu_rules(f"{e.PREFIX}.shared_experts", e.SHARED),
        ),
        attention_types=(c.Latent,),
    ),
    # As V3, except: a norm of the sum of the chosen experts and the shared one (A.X K1).
    Family(
        "axk1",
        "AXK1ForCausalLM",
        MODEL,
        (
            *(*latent_fields(), LatentRope(max_length=32_768)),
            replace(AXK1_EXPERTS, moe=replace(AXK1_EXPERTS.moe, output_norm=c.RMSNorm())),
        ),
        m.decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *LATENT_RULES),
            *(replace(x, may_lack=x.params == e.SELECTION_BIAS) for x in e.deepseek_rules()),
            *m.norm_rules(f"{p.LAYER_PREFIX}.post_mlp_layernorm", "feed_forward/output_norm"),
        ),
        # Released files have the norm in the dense layer too, without effect, and no biases.
        ignored_tensors=(*INV_FREQ_PATTERNS, r"model\.layers\.0\.post_mlp_layernorm\.weight"),
        attention_types=(c.Latent,),
    ),
    # As V3, except: no experts; tied.
    Family(
        "youtu",
        "YoutuForCausalLM",
        MODEL,
        (
            *(*latent_fields(tied=True), *p.GLU, LatentRope(max_length=131_072)),
            Unused("embedding_initializer_range"),
        ),
        MAPPING,
        attention_types=(c.Latent,),
    ),
    # As Youtu, except: RoPE turns halves; multipliers of embedding, branches and logits.
    Family(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        MODEL,
        (
            *latent_fields(
                query=768, latent=256, plain=64, rotated=32, value=p.head_width, eps=1e-5, tied=True
            ),
            *(*p.GLU, p.MLP_BIAS, p.HEADS_DIVIDE_WIDTH, MiniCpmMultipliers()),
            Field("scale_emb", "embedding.scale", 12.0),
            LatentRope(max_length=32_768, pairing="halves", has_pairing=False),
        ),
        MAPPING,
        attention_types=(c.Latent,),
    ),
)
