"""Llama and the families that differ from it in a few fields: each is a row of `ROWS`.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries.
"""

from jaxformer import config as c
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.llama_like_experts import DeepSeekMoE, MixtralMoE, OlmoMoE, QwenMoE
from jaxformer.interop.families.llama_like_family import FEED_FORWARD_BIAS, BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import (
    FusedGLU,
    LastLayerWindows,
    LayerTypeWindows,
    LlamaMLP,
    OneRope,
    OneWindow,
    RopeByLayerType,
    RopeByNumber,
    RopeOfWindows,
)

QKV = ALL_BIASES[:3]
ATTENTION_BIAS = BiasField("attention_bias", ALL_BIASES)
MLP_BIAS = BiasField("mlp_bias", FEED_FORWARD_BIAS)
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
        constant_biases=QKV,
    ),
    LlamaLike(
        "mixtral",
        "MixtralForCausalLM",
        kv_heads=8,
        eps=1e-5,
        positions=OneRope(base=1e6, max_length=131_072),
        windows=OneWindow(default=None),
        branch=MixtralMoE(),
    ),
    LlamaLike(
        "qwen3",
        "Qwen3ForCausalLM",
        kv_heads=32,
        head_dim=128,
        positions=OneRope(max_length=32_768),
        windows=LastLayerWindows(),
        biases=(ATTENTION_BIAS,),
        qk_norm="head",
    ),
    LlamaLike(
        "olmo2",
        "Olmo2ForCausalLM",
        eps=1e-5,
        biases=(ATTENTION_BIAS,),
        qk_norm="width",
        norm_placement="res_post",
    ),
    LlamaLike(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        kv_heads=4,
        positions=OneRope(max_length=32_768),
        windows=OneWindow(default=4096, switch="use_sliding_window"),
        biases=(ATTENTION_BIAS,),
        qk_norm="head",
        branch=QwenMoE(num_experts=128, top_k=8),
    ),
    LlamaLike(
        "arcee",
        "ArceeForCausalLM",
        eps=1e-5,
        biases=(ATTENTION_BIAS, MLP_BIAS),
        branch=LlamaMLP(),
        heads_divide_width=True,
    ),
    LlamaLike(
        "seed_oss",
        "SeedOssForCausalLM",
        kv_heads=8,
        head_dim=128,
        positions=OneRope(max_length=524_288),
        biases=(
            BiasField("attention_bias", QKV, default=True),
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
        eps=1e-5,
        tied=True,
        positions=OneRope(base=5e5, max_length=131_072, pairing="neighbours"),
        biases=(BiasField("use_bias", (*ALL_BIASES, *FEED_FORWARD_BIAS)),),
    ),
    LlamaLike(
        "glm4",
        "Glm4ForCausalLM",
        kv_heads=2,
        head_dim=128,
        eps=1.5625e-7,
        positions=OneRope(max_length=131_072, pairing="neighbours", fraction=0.5),
        biases=(BiasField("attention_bias", QKV, default=True),),
        norm_placement="sandwich",
        branch=FusedGLU(),
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
        eps=1e-5,
        positions=RopeOfWindows(),
        windows=LayerTypeWindows(default=4096, period=4),
        qk_norm="head",
        norm_placement="res_post",
    ),
    LlamaLike(
        "olmo3",
        "Olmo3ForCausalLM",
        eps=1e-5,
        positions=RopeByLayerType(base=5e5),
        windows=LayerTypeWindows(default=4096, period=4),
        biases=(ATTENTION_BIAS,),
        qk_norm="width",
        norm_placement="res_post",
    ),
    LlamaLike(
        "olmoe",
        "OlmoeForCausalLM",
        eps=1e-5,
        positions=OneRope(max_length=4096),
        biases=(ATTENTION_BIAS,),
        qk_norm="width",
        branch=OlmoMoE(num_experts=64, top_k=8),
        unsupported=("clip_qkv",),  # it clips after the norm
    ),
    LlamaLike(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        positions=OneRope(base=5e5, max_length=4096),
        biases=(ATTENTION_BIAS,),
        qk_norm="width",
        norm_placement="res_post",
        branch=OlmoMoE(num_experts=7, top_k=5),
    ),
    LlamaLike(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        kv_heads=16,
        positions=OneRope(max_length=32_768),
        windows=LastLayerWindows(),
        biases=(BiasField("qkv_bias", QKV, default=True),),
        branch=QwenMoE(num_experts=60, top_k=4, width=1408, dense_width=5632, has_shared=True),
    ),
    LlamaLike(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        kv_heads=8,
        eps=1e-5,
        positions=OneRope(max_length=131_072, fraction=0.5),
        biases=(BiasField("attention_bias", QKV),),
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        branch=DeepSeekMoE(first_dense=1, num_experts=128, top_k=8, width=1408),
    ),
    LlamaLike(
        "dots1",
        "Dots1ForCausalLM",
        windows=LastLayerWindows(switch=None, first=62),
        biases=(ATTENTION_BIAS,),
        qk_norm="head",
        branch=DeepSeekMoE(
            width=1408, router=c.Router(score="sigmoid", selection_bias=True, renormalise=False)
        ),
    ),
    LlamaLike(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        kv_heads=8,
        head_dim=128,
        positions=OneRope(base=5e6, max_length=196_608, fraction=1.0),
        qk_norm="width",
        branch=MixtralMoE(
            num_experts=256, top_k=8, router=c.Router(score="sigmoid", selection_bias=True)
        ),
    ),
)
FAMILIES = tuple(row.family() for row in ROWS)
