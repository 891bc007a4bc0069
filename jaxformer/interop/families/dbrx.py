"""DBRX: LayerNorms with a scale, clipped queries, keys and values, and experts in three tensors."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    OPTIONAL_NUMBER,
    Derived,
    Field,
    Repeated,
    Unused,
    Written,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.experts import EXPERTS
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField, read_rope_section, write_rope_section
from jaxformer.zoo.dbrx import DBRX

LAYER = "transformer.blocks.{layer}"
MLP = f"{LAYER}.ffn.experts.mlp"


class DbrxRope(RopeField):
    """RoPE, whose base released files have in ``attn_config``."""

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        return read_rope_section(
            reader.part("rope_parameters"),
            base=reader.part("attn_config").number("rope_theta", self.base),
            max_length=reader.positive_integer("max_seq_len", self.max_length),
        )

    def write_rope(self, rope: c.Rope) -> dict[str, Any]:
        """The base, the length and the object."""
        section, lengths = write_rope_section(rope)
        return {
            "attn_config.rope_theta": section["rope_theta"],
            "max_seq_len": lengths.get("max_position_embeddings", self.max_length),
            "rope_parameters": section,
        }


FAMILIES = (
    Family(
        "dbrx",
        "DbrxForCausalLM",
        DBRX,
        (
            Field("vocab_size", "vocab_size"),
            Field("d_model", "model_dim", 2048),
            Field("n_layers", "num_layers", 24),
            Field("n_heads", "attention.num_heads", 16),
            Field("attn_config.kv_n_heads", "attention.num_kv_heads", 1),
            Repeated(
                "num_key_value_heads",
                lambda options: options["attention.num_kv_heads"],
                "it repeats attn_config.kv_n_heads",
            ),
            Repeated("ffn_config.hidden_size", lambda x: x["model_dim"], "it repeats d_model"),
            Written(**{"ffn_config.hidden_size": lambda model: model.model_dim}),
            *(Derived("attention.head_dim", p.head_width), DbrxRope()),
            Field("attn_config.clip_qkv", "attention.clip_qkv", None, OPTIONAL_NUMBER),
            Field("ffn_config.ffn_hidden_size", "feed_forward.expert.hidden_dim", 3584),
            Field("ffn_config.ffn_act_fn.name", "feed_forward.expert.activation", "silu"),
            Field("ffn_config.moe_num_experts", "feed_forward.num_experts", 4),
            Field("ffn_config.moe_top_k", "feed_forward.top_k", 1),
            Field(
                "ffn_config.moe_normalize_expert_weights",
                *("feed_forward.router.renormalise", 1.0, OPTIONAL_NUMBER),
                choices={1.0: True, None: False},
            ),
            Field("tie_word_embeddings", "head.tied", False),
            Unused(
                *("ffn_config.moe_jitter_eps", "ffn_config.moe_loss_weight"),
                "ffn_config.uniform_expert_assignment",
            ),
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.wte", "transformer.norm_f"),
            *m.layer_norm_rules(
                f"{LAYER}.norm_attn_norm",
                pre_attention_norm="norm_1",
                pre_feed_forward_norm="norm_2",
            ),
            *m.fused_rules(f"{LAYER}.norm_attn_norm.attn.Wqkv", "attention", p.QKV),
            *m.branch_rules(f"{LAYER}.norm_attn_norm.attn", "attention", out="out_proj"),
            *m.linear_rules(f"{LAYER}.ffn.router.layer", "feed_forward/router"),
            m.MappingRule(f"{MLP}.w1", f"{EXPERTS}/gate/kernel", "e i o -> (e o) i"),
            m.MappingRule(f"{MLP}.v1", f"{EXPERTS}/up/kernel", "e i o -> (e o) i"),
            m.MappingRule(f"{MLP}.w2", f"{EXPERTS}/down/kernel", "e i o -> (e i) o"),
        ),
    ),
)
