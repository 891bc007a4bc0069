"""AFMoE (Trinity): gated heads, sandwich norms, RoPE in the layers with a window, experts."""

from dataclasses import replace

from jaxformer.interop.config_fields import FactorField, Field, Unused, fixed, root_of_width
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeOfWindows
from jaxformer.interop.families.windows import Windows, all_but_every
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import decoder_mapping, layer_norm_rules
from jaxformer.zoo.arcee import TRINITY

# DeepSeek's experts, dense layers first, except: other names, always renormalised.
EXPERTS = e.Experts(
    moe=replace(e.MOE, router=e.SIGMOID),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim", 1408),
        e.ACTIVATION,
        Field("num_experts", "num_experts", 64),
        Field("num_experts_per_tok", "top_k", 6),
        Field("route_scale", "router.scale", 1.0),
        e.SharedExperts("num_shared_experts", 2, required=True),
        *fixed(moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc"),
    ),
    layers=e.DenseFirst(1, "num_dense_layers"),
)
FAMILIES = (
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        TRINITY,
        (
            *(*p.decoder(head_dim=128, eps=1e-5), p.ATTENTION_BIAS, EXPERTS),
            *fixed(score_func="sigmoid", route_norm=True, norm_topk_prob=True, n_group=1),
            *fixed(topk_group=1, num_expert_groups=1, num_limited_groups=1),
            Unused("load_balance_coeff", "use_grouped_mm"),  # of training, and of speed
            Unused(*e.EXPERT_ATTRIBUTES),
            FactorField("mup_enabled", "embedding.scale", factor=root_of_width),
            Windows(1024, rule=all_but_every(4, "global_attn_every_n_layers")),
            RopeOfWindows(max_length=16_384, without_windows=False),
        ),
        decoder_mapping(
            *p.TOP_LEVEL,
            *layer_norm_rules(
                p.LAYER_PREFIX,
                pre_attention_norm="input_layernorm",
                post_attention_norm="post_attention_layernorm",
                pre_feed_forward_norm="pre_mlp_layernorm",
                post_feed_forward_norm="post_mlp_layernorm",
            ),
            *(*p.ATTENTION, *p.QK_NORMS, *e.deepseek_rules("router.gate", "expert_bias")),
        ),
        predicts_further_tokens=True,
    ),
)
