"""DBRX: LayerNorms with a scale, clipped queries, keys and values, and experts in three tensors."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import EXPERTS, MOE
from jaxformer.interop.families.option_fields import Field, FieldTable, template
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import read_rope_section, write_rope_section
from jaxformer.interop.transforms import StackedExperts

LAYER = "transformer.blocks.{layer}"
MLP = f"{LAYER}.ffn.experts.mlp"
MAPPING = m.decoder_mapping(
    m.top_level_rules("transformer.wte", "transformer.norm_f"),
    *m.layer_norm_rules(
        f"{LAYER}.norm_attn_norm", pre_attention_norm="norm_1", pre_feed_forward_norm="norm_2"
    ),
    *m.fused_rules(f"{LAYER}.norm_attn_norm.attn.Wqkv", "attention", p.QKV),
    *m.branch_rules(f"{LAYER}.norm_attn_norm.attn", "attention", out="out_proj"),
    *m.linear_rules(f"{LAYER}.ffn.router.layer", "feed_forward/router"),
    m.MappingRule(f"{MLP}.w1", f"{EXPERTS}/gate/kernel", StackedExperts()),
    m.MappingRule(f"{MLP}.v1", f"{EXPERTS}/up/kernel", StackedExperts()),
    m.MappingRule(f"{MLP}.w2", f"{EXPERTS}/down/kernel", StackedExperts(transposed=False)),
)
TABLE = FieldTable(
    template=template(branch=MOE, norm=c.LayerNorm(parameters="scale")),  # eps of torch
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("d_model", "model_dim", 2048),
        Field("n_layers", "num_layers", 24),
        Field("n_heads", "attention.num_heads", 16),
        Field("attn_config.kv_n_heads", "attention.num_kv_heads", 1),
        Field("attn_config.clip_qkv", "attention.clip_qkv", None, ConfigReader.optional_number),
        Field("ffn_config.ffn_hidden_size", "feed_forward.expert.hidden_dim", 3584),
        Field("ffn_config.ffn_act_fn.name", "feed_forward.expert.activation", "silu"),
        Field("ffn_config.moe_num_experts", "feed_forward.num_experts", 4),
        Field("ffn_config.moe_top_k", "feed_forward.top_k", 1),
        Field(
            "ffn_config.moe_normalize_expert_weights",
            "feed_forward.router.renormalise",
            1.0,
            ConfigReader.optional_number,
            choices={1.0: True, None: False},
        ),
        Field("tie_word_embeddings", "head.tied", False),
    ),
    unused=tuple(
        f"ffn_config.{name}"
        for name in ("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment")
    ),
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a dbrx model."""
    attention, experts = reader.part("attn_config"), reader.part("ffn_config")
    width, heads = reader.integer("d_model", 2048), reader.integer("n_heads", 16)
    kv_heads, reason = attention.integer("kv_n_heads", 1), "it repeats attn_config.kv_n_heads"
    reader.require_value("num_key_value_heads", kv_heads, reason=reason)
    experts.require_value("hidden_size", width, reason="it repeats d_model")
    base = attention.number("rope_theta", 10_000.0)  # where released files have it
    length = reader.positive_integer("max_seq_len", 2048)
    rope = read_rope_section(reader.part("rope_parameters"), base=base, max_length=length)
    options = {"attention.head_dim": max(1, width // max(1, heads)), "attention.positions": (rope,)}
    return TABLE.read(reader, options)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A dbrx's configuration from ours."""
    fields = TABLE.write(config)
    if fields is None:
        return None
    rope, lengths = write_rope_section(p.first_rope(config))
    fields["attn_config"] |= {"rope_theta": rope["rope_theta"]}
    fields["ffn_config"] |= {"hidden_size": config.model_dim}
    length = lengths.get("max_position_embeddings", 2048)
    return {**fields, "max_seq_len": length, "rope_parameters": rope}


FAMILIES = (Family("dbrx", "DbrxForCausalLM", read, write, MAPPING),)
