"""Llama and the families that differ from it in a few fields: each is a row of `ROWS`.

Pre-norm decoders with RMSNorm, SwiGLU, rotary positions and grouped queries.
"""

from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.llama_like_family import (
    FEED_FORWARD_BIAS,
    BiasField,
    LastLayerWindows,
    LayerTypeWindows,
    LlamaLike,
    LlamaMLP,
    MixtralMoE,
    OneWindow,
    QwenMoE,
)

QKV = ALL_BIASES[:3]
BIASES = (BiasField("attention_bias", ALL_BIASES), BiasField("mlp_bias", FEED_FORWARD_BIAS))
ROWS = (
    LlamaLike("llama", "LlamaForCausalLM", biases=BIASES, heads_divide_width=True),
    LlamaLike(
        "mistral",
        "MistralForCausalLM",
        kv_heads=8,
        max_length=131_072,
        windows=OneWindow(default=4096),
    ),
    LlamaLike(
        "qwen2",
        "Qwen2ForCausalLM",
        kv_heads=32,
        max_length=32_768,
        windows=LastLayerWindows(),
        constant_biases=QKV,
    ),
    LlamaLike(
        "mixtral",
        "MixtralForCausalLM",
        kv_heads=8,
        base=1e6,
        max_length=131_072,
        eps=1e-5,
        windows=OneWindow(default=None),
        branch=MixtralMoE(),
    ),
    LlamaLike(
        "qwen3",
        "Qwen3ForCausalLM",
        kv_heads=32,
        head_dim=128,
        max_length=32_768,
        windows=LastLayerWindows(),
        biases=BIASES[:1],
        qk_norm="head",
    ),
    LlamaLike(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        kv_heads=4,
        max_length=32_768,
        windows=OneWindow(default=4096, switch="use_sliding_window"),
        biases=BIASES[:1],
        qk_norm="head",
        branch=QwenMoE(num_experts=128, top_k=8),
    ),
    LlamaLike("arcee", "ArceeForCausalLM", eps=1e-5, biases=BIASES, branch=LlamaMLP()),
    LlamaLike(
        "seed_oss",
        "SeedOssForCausalLM",
        kv_heads=8,
        head_dim=128,
        max_length=524_288,
        biases=(
            BiasField("attention_bias", QKV, default=True),
            BiasField("attention_out_bias", ("out",)),
            BIASES[1],
        ),
    ),
    LlamaLike(
        "ministral",
        "MinistralForCausalLM",
        kv_heads=8,
        max_length=131_072,
        windows=LayerTypeWindows(default=4096),
    ),
)
FAMILIES = tuple(row.family() for row in ROWS)
