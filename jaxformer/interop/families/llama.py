"""Llama and the families that differ from it in a few fields: each is a row of `ROWS`.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries.
"""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_experts import (
    EXPERT_RULES,
    GPT_OSS_EXPERTS,
    GRANITE_EXPERTS,
    MOE,
    DeepSeekMoE,
    Experts,
    GraniteSharedExperts,
    HunyuanExperts,
    HunyuanV3MoE,
    QwenMoE,
    deepseek_experts,
    deepseek_rules,
    mixtral_experts,
    olmo_fields,
    qwen_experts,
)
from jaxformer.interop.families.llama_like_family import FEED_FORWARD_BIAS, BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import (
    FUSED_GLU,
    GRANITE_MULTIPLIERS,
    Dense,
    LastLayerWindows,
    LayerTypeWindows,
    OneRope,
    OneWindow,
    RopeAndQueryScaling,
    RopeByLayerType,
    RopeByNumber,
    RopeOfWindows,
    RopeWithAlpha,
)
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.param_mapping import MappingRule, branch_rules, norm_rules, qk_norm_rules
from jaxformer.interop.transforms import SwapHeadHalves

PARALLEL_BLOCK = {False: "serial", True: "parallel_shared_norm"}
EXPERT_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
SIGMOID = c.Router(score="sigmoid", selection_bias=True)
EPS_5 = c.RMSNorm(eps=1e-5)
ATTENTION_BIAS = BiasField("attention_bias", p.ALL_BIASES)
MLP_BIAS = BiasField("mlp_bias", FEED_FORWARD_BIAS)
HUNYUAN: dict[str, Any] = dict(
    norm=EPS_5,
    positions=RopeWithAlpha(),
    biases=(ATTENTION_BIAS,),
    qk_norm=c.QKNorm(placement="after_rope"),
    qk_norm_rules=qk_norm_rules(p.SELF_ATTENTION, "query_layernorm", "key_layernorm"),
)


def swap_head_halves(rule: MappingRule) -> MappingRule:
    """Return the rule with the halves of each head swapped."""
    part: Any = rule.transform
    return replace(rule, transform=SwapHeadHalves(part=part))


ROWS = (
    LlamaLike(
        "llama", "LlamaForCausalLM", biases=(ATTENTION_BIAS, MLP_BIAS), heads_divide_width=True
    ),
    LlamaLike(
        "mistral",
        "MistralForCausalLM",
        kv_heads=8,
        positions=OneRope(max_length=131_072),
        windows=OneWindow(default=4096),
    ),
    LlamaLike(
        "qwen2",
        "Qwen2ForCausalLM",
        kv_heads=32,
        positions=OneRope(max_length=32_768),
        windows=LastLayerWindows(),
        constant_biases=p.QKV,
    ),
    LlamaLike(
        "mixtral",
        "MixtralForCausalLM",
        kv_heads=8,
        norm=EPS_5,
        positions=OneRope(base=1e6, max_length=131_072),
        windows=OneWindow(default=None),
        branch=mixtral_experts(),
    ),
    LlamaLike(
        "qwen3",
        "Qwen3ForCausalLM",
        kv_heads=32,
        head_dim=128,
        positions=OneRope(max_length=32_768),
        windows=LastLayerWindows(),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(),
    ),
    LlamaLike(
        "olmo2",
        "Olmo2ForCausalLM",
        norm=EPS_5,
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(over="width"),
        norm_placement="res_post",
    ),
    LlamaLike(
        "olmo",
        "OlmoForCausalLM",
        norm=c.LayerNorm(eps=1e-5, parameters="none"),
        norm_field=None,
        biases=(ATTENTION_BIAS,),
        fields=(Field("clip_qkv", "attention.clip_qkv", read=ConfigReader.optional_number),),
    ),
    LlamaLike(
        "nemotron",
        "NemotronForCausalLM",
        norm=c.LayerNorm(scale_offset=1.0),
        norm_field="norm_eps",
        positions=OneRope(max_length=4096, fraction=0.5),
        biases=(ATTENTION_BIAS, MLP_BIAS),
        branch=Dense(c.MLP, "relu2"),
    ),
    LlamaLike(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        kv_heads=4,
        positions=OneRope(max_length=32_768),
        windows=OneWindow(default=4096, switch="use_sliding_window"),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(),
        branch=QwenMoE(**qwen_experts(128, 8)),
    ),
    LlamaLike(
        "arcee",
        "ArceeForCausalLM",
        norm=EPS_5,
        biases=(ATTENTION_BIAS, MLP_BIAS),
        branch=Dense(c.MLP, "relu2"),
        heads_divide_width=True,
    ),
    LlamaLike(
        "seed_oss",
        "SeedOssForCausalLM",
        kv_heads=8,
        head_dim=128,
        positions=OneRope(max_length=524_288),
        biases=(
            BiasField("attention_bias", p.QKV, default=True),
            BiasField("attention_out_bias", ("out",)),
            MLP_BIAS,
        ),
    ),
    LlamaLike(
        "ministral",
        "MinistralForCausalLM",
        kv_heads=8,
        positions=OneRope(max_length=131_072),
        windows=LayerTypeWindows(default=4096),
    ),
    LlamaLike(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        kv_heads=2,
        head_dim=128,
        norm=EPS_5,
        tied=True,
        positions=OneRope(base=5e5, max_length=131_072, pairing="neighbours"),
        biases=(BiasField("use_bias", (*p.ALL_BIASES, *FEED_FORWARD_BIAS)),),
    ),
    LlamaLike(
        "glm4",
        "Glm4ForCausalLM",
        kv_heads=2,
        head_dim=128,
        norm=c.RMSNorm(eps=1.5625e-7),
        positions=OneRope(max_length=131_072, pairing="neighbours", fraction=0.5),
        biases=(BiasField("attention_bias", p.QKV, default=True),),
        norm_placement="sandwich",
        branch=Dense(rules=FUSED_GLU),
    ),
    LlamaLike(
        "smollm3",
        "SmolLM3ForCausalLM",
        kv_heads=4,
        tied=True,
        positions=RopeByNumber(base=2e6, max_length=32_768),
        windows=LayerTypeWindows(default=None, switch="use_sliding_window"),
        biases=(ATTENTION_BIAS, MLP_BIAS),
    ),
    LlamaLike(
        "exaone4",
        "Exaone4ForCausalLM",
        kv_heads=32,
        norm=EPS_5,
        positions=RopeOfWindows(),
        windows=LayerTypeWindows(default=4096, period=4),
        qk_norm=c.QKNorm(),
        norm_placement="res_post",
    ),
    LlamaLike(
        "olmo3",
        "Olmo3ForCausalLM",
        norm=EPS_5,
        positions=RopeByLayerType(base=5e5),
        windows=LayerTypeWindows(default=4096, period=4),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(over="width"),
        norm_placement="res_post",
    ),
    LlamaLike(
        "olmoe",
        "OlmoeForCausalLM",
        norm=EPS_5,
        positions=OneRope(max_length=4096),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(over="width"),
        branch=Experts(fields=olmo_fields(64, 8), rules=EXPERT_RULES),
        constants={"clip_qkv": None},  # it clips after the norm
    ),
    LlamaLike(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        positions=OneRope(base=5e5, max_length=4096),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(over="width"),
        norm_placement="res_post",
        branch=Experts(fields=olmo_fields(7, 5), rules=EXPERT_RULES),
    ),
    LlamaLike(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        kv_heads=16,
        positions=OneRope(max_length=32_768),
        windows=LastLayerWindows(),
        biases=(BiasField("qkv_bias", p.QKV, default=True),),
        branch=QwenMoE(**qwen_experts(60, 4, width=1408, dense_width=5632, shared_width=5632)),
    ),
    LlamaLike(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        kv_heads=8,
        norm=EPS_5,
        positions=OneRope(max_length=131_072, fraction=0.5),
        biases=(BiasField("attention_bias", p.QKV),),
        qk_norm=c.QKNorm(),
        qk_norm_field="use_qk_norm",
        branch=DeepSeekMoE(first_dense=1, **deepseek_experts(128, 8, width=1408)),
    ),
    LlamaLike(
        "dots1",
        "Dots1ForCausalLM",
        windows=LastLayerWindows(switch=None, first=62),
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(),
        branch=DeepSeekMoE(
            **deepseek_experts(width=1408, router=replace(SIGMOID, renormalise=False))
        ),
    ),
    LlamaLike(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        kv_heads=32,
        norm=EPS_5,
        positions=RopeOfWindows(),
        windows=LayerTypeWindows(default=4096, period=4),
        qk_norm=c.QKNorm(),
        branch=DeepSeekMoE(
            first_dense=1,
            has_layer_types=True,
            rules=deepseek_rules(bias="e_score_correction_bias"),
            **deepseek_experts(
                64, 8, width=1024, router=replace(SIGMOID, scale=2.5), names=EXPERT_NAMES
            ),
        ),
    ),
    LlamaLike(
        "hy_v3",
        "HYV3ForCausalLM",
        kv_heads=8,
        head_dim=128,
        norm=EPS_5,
        positions=OneRope(base=11_158_840.0, max_length=131_072),
        biases=(ATTENTION_BIAS, MLP_BIAS),
        qk_norm=c.QKNorm(),
        branch=HunyuanV3MoE(
            first_dense=1,
            has_layer_types=True,
            rules=deepseek_rules("router.gate", "expert_bias", "shared_mlp"),
            **deepseek_experts(
                192,
                8,
                width=1536,
                router=replace(SIGMOID, scale=2.826),
                names=EXPERT_NAMES | {"routed_scaling_factor": "router_scaling_factor"},
            ),
        ),
    ),
    LlamaLike(
        "gpt_oss",
        "GptOssForCausalLM",
        kv_heads=8,
        head_dim=64,
        norm=EPS_5,
        positions=OneRope(base=1.5e5, max_length=131_072, has_default_scaling=True),
        windows=LayerTypeWindows(default=128, period=2),
        biases=(BiasField("attention_bias", p.ALL_BIASES, default=True),),
        sinks=True,
        branch=GPT_OSS_EXPERTS,
    ),
    LlamaLike(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        kv_heads=8,
        head_dim=128,
        positions=OneRope(base=5e6, max_length=196_608, fraction=1.0),
        qk_norm=c.QKNorm(over="width"),
        branch=mixtral_experts(256, 8, moe=replace(MOE, router=SIGMOID)),
    ),
    LlamaLike(
        "granite",
        "GraniteForCausalLM",
        biases=(ATTENTION_BIAS, MLP_BIAS),
        fields=GRANITE_MULTIPLIERS,
    ),
    LlamaLike(
        "granitemoe",
        "GraniteMoeForCausalLM",
        biases=(ATTENTION_BIAS,),
        fields=GRANITE_MULTIPLIERS,
        branch=GRANITE_EXPERTS,
    ),
    LlamaLike(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        biases=(ATTENTION_BIAS,),
        fields=GRANITE_MULTIPLIERS,
        branch=GraniteSharedExperts(fields=GRANITE_EXPERTS.fields, rules=GRANITE_EXPERTS.rules),
    ),
    LlamaLike(
        "helium",
        "HeliumForCausalLM",
        kv_heads=20,
        head_dim=128,
        norm=c.RMSNorm(eps=1e-8),
        positions=OneRope(base=1e5, max_length=4096, pairing="neighbours"),
        biases=(BiasField("attention_bias", p.QKV), MLP_BIAS),
    ),
    LlamaLike("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", **HUNYUAN),
    LlamaLike("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", **HUNYUAN, branch=HunyuanExperts()),
    LlamaLike(
        "ministral3",
        "Ministral3ForCausalLM",
        kv_heads=8,
        head_dim=128,
        norm=EPS_5,
        positions=RopeAndQueryScaling(max_length=262_144),
        windows=OneWindow(default=None),
    ),
    LlamaLike(
        "stablelm",
        "StableLmForCausalLM",
        kv_heads=32,
        norm=c.LayerNorm(),
        norm_field="layer_norm_eps",
        norm_rules=(*p.PRE_NORMS, *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm")),
        positions=OneRope(max_length=4096, fraction=0.25),
        biases=(BiasField("use_qkv_bias", p.QKV),),
        qk_norm=c.QKNorm(norm=c.LayerNorm(parameters="scale"), over="each_head"),
        qk_norm_field="qk_layernorm",
        qk_norm_rules=tuple(  # a tensor for each head
            MappingRule(
                f"{p.SELF_ATTENTION}.{name[0]}_layernorm.norms.{{expert}}.weight",
                f"attention/{name}_norm/scale",
            )
            for name in ("query", "key")
        ),
        fields=(Field("use_parallel_residual", "block", False, choices=PARALLEL_BLOCK),),
        heads_divide_width=True,
    ),
    # Norms without parameters, also of the embedding. RoPE turns backwards, which is turning with
    # the halves of each head swapped, so they are swapped in the kernels. Queries and keys are
    # normed after RoPE, which is the same without parameters.
    LlamaLike(
        "nanochat",
        "NanoChatForCausalLM",
        norm=c.RMSNorm(parameters="none"),
        embedding_norm=True,
        biases=(ATTENTION_BIAS,),
        qk_norm=c.QKNorm(norm=c.RMSNorm(parameters="none")),
        attention_rules=(
            *map(
                swap_head_halves,
                branch_rules(p.SELF_ATTENTION, "attention", query="q_proj", key="k_proj"),
            ),
            *branch_rules(p.SELF_ATTENTION, "attention", value="v_proj", out="o_proj"),
        ),
        branch=Dense(
            c.MLP,
            "relu2",
            rules=branch_rules(f"{p.LAYER_PREFIX}.mlp", "feed_forward", up="fc1", down="fc2"),
        ),
        fields=(
            Field(
                "final_logit_softcapping", "head.softcap", 15.0, read=ConfigReader.optional_number
            ),
        ),
    ),
)
FAMILIES = tuple(row.family() for row in ROWS)
