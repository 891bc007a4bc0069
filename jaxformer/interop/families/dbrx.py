"""DBRX: LayerNorms with a scale, clipped queries, keys and values, and experts in three tensors."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like_experts import EXPERTS
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import read_rope_section, write_rope_section
from jaxformer.interop.transforms import StackedExperts

LAYER = "transformer.blocks.{layer}"
MLP = f"{LAYER}.ffn.experts.mlp"
MAPPING = m.ParamMapping(
    top_level=m.top_level_rules("transformer.wte", "transformer.norm_f"),
    stacks={
        "decoder": (
            *m.layer_norm_rules(
                f"{LAYER}.norm_attn_norm",
                pre_attention_norm="norm_1",
                pre_feed_forward_norm="norm_2",
            ),
            *m.fused_rules(f"{LAYER}.norm_attn_norm.attn.Wqkv", "attention", p.QKV),
            *m.branch_rules(f"{LAYER}.norm_attn_norm.attn", "attention", out="out_proj"),
            *m.linear_rules(f"{LAYER}.ffn.router.layer", "feed_forward/router"),
            m.MappingRule(f"{MLP}.w1", f"{EXPERTS}/gate/kernel", StackedExperts()),
            m.MappingRule(f"{MLP}.v1", f"{EXPERTS}/up/kernel", StackedExperts()),
            m.MappingRule(f"{MLP}.w2", f"{EXPERTS}/down/kernel", StackedExperts(transposed=False)),
        )
    },
)
EPS = 1e-5  # of torch, not in the file
BASE = 10_000.0


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a dbrx model."""
    names = "attn_config", "ffn_config", "rope_parameters"
    attention, experts, rope = (reader.section(name) or ConfigReader({}) for name in names)
    width, heads = reader.integer("d_model", 2048), reader.integer("n_heads", 16)
    kv_heads = attention.integer("kv_n_heads", 1)
    reader.require_value(
        "num_key_value_heads", kv_heads, reason="it repeats attn_config.kv_n_heads"
    )
    experts.require_value("hidden_size", width, reason="it repeats d_model")
    experts.require_value("moe_normalize_expert_weights", 1)
    for name in ("moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment"):
        experts.get(name)
    activation = experts.section("ffn_act_fn") or ConfigReader({})
    length = reader.integer("max_seq_len", 2048)
    base = attention.number("rope_theta", BASE)  # where released files have it
    renormalise = experts.get("moe_normalize_expert_weights", 1) is not None
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=width,
        num_layers=reader.integer("n_layers", 24),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=max(1, width // max(1, heads)),
            positions=(read_rope_section(rope, base=base, max_length=length),),
            clip_qkv=attention.optional_number("clip_qkv"),
        ),
        feed_forward=(
            c.MoE(
                expert=c.GLU(
                    hidden_dim=experts.integer("ffn_hidden_size", 3584),
                    activation=activation.choice("name", "silu", HF_ACTIVATIONS),
                ),
                num_experts=experts.integer("moe_num_experts", 4),
                top_k=experts.integer("moe_top_k", 1),
                router=c.Router(renormalise=renormalise),
            ),
        ),
        norm=c.LayerNorm(eps=EPS, parameters="scale"),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A dbrx's configuration from ours."""
    moe, attention = config.feed_forward[0], config.multi_head
    if not (p.is_rope_decoder(config) and isinstance(moe, c.MoE)) or isinstance(
        moe.expert, c.ClampedGEGLU
    ):
        return None
    rope, lengths = write_rope_section(p.first_rope(config))
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.model_dim,
        "n_layers": config.num_layers,
        "n_heads": attention.num_heads,
        "max_seq_len": lengths.get("max_position_embeddings", 2048),
        "attn_config": {
            "kv_n_heads": attention.num_kv_heads,
            "clip_qkv": attention.clip_qkv,
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "hidden_size": config.model_dim,
            "ffn_hidden_size": moe.expert.hidden_dim,
            "ffn_act_fn": {"name": hf_activation_name(moe.expert.activation)},
            "moe_num_experts": moe.num_experts,
            "moe_top_k": moe.top_k,
            "moe_normalize_expert_weights": 1.0 if moe.router.renormalise else None,
        },
        "rope_parameters": rope,
        "tie_word_embeddings": config.head.tied,
    }


FAMILIES = (Family("dbrx", "DbrxForCausalLM", read, write, MAPPING),)
