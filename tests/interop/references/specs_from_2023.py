"""Tiny configurations of transformers models released in 2023 or later.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_to_2022 import V, rope

LLAMA = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MHA = LLAMA | {"num_key_value_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 22,
    "new_decoder_architecture": True,
    "num_ln_in_parallel_attn": 1,
    "tie_word_embeddings": False,
    "rope_parameters": rope(500042.0),
}
OLD_FALCON = FALCON | {
    "new_decoder_architecture": False,
    "num_ln_in_parallel_attn": None,
    "num_kv_heads": None,
    "tie_word_embeddings": True,
    "rope_parameters": rope(1e4),
}
PHI3 = LLAMA | IDS | {"original_max_position_embeddings": 64, "rope_parameters": rope(250000.0)}
COHERE = LLAMA | IDS | {"logit_scale": 5 / 6, "rope_parameters": rope(75e6)}
LLAMA31 = rope(
    5e5,
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope(
    1e4, "yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, original_max_position_embeddings=16
)
LONGROPE = rope(
    1e4,
    "longrope",
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.2, 1.5],
    long_factor=[1.0, 2.0, 6.0],
)
GEMMA3 = {"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(1e4)}
DEEPSEEK = MHA | {
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
}
GRANITE = LLAMA | {
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.7,
    "rope_parameters": rope(1e7),
}
GEMMA4 = {
    "num_hidden_layers": 5,
    "head_dim": 6,
    "global_head_dim": 10,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": rope(1e6, "proportional", partial_rotary_factor=0.4),
        "sliding_attention": rope(1e4),
    },
}
NARROW = {"hidden_size": 16, "head_dim": 6}  # heads side by side are wider than the model

DELTA_NET = (
    LLAMA
    | IDS
    | {
        "num_hidden_layers": 3,
        "head_dim": 10,
        "rms_norm_eps": 1e-2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 9,
        "linear_conv_kernel_dim": 3,
    }
)
MROPE = rope(1e7, partial_rotary_factor=0.4, mrope_section=[1, 1, 0], mrope_interleaved=True)

CONVOLUTIONS = (
    LLAMA
    | IDS
    | {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "rope_parameters": rope(1e6),
    }
)
SSM = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 3,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
}
NEMOTRON_H = IDS | {
    "vocab_size": V,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 22,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "n_groups": 3,
    "ssm_state_size": 5,
    "conv_kernel": 3,
    "time_step_min": 0.4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 11,
    "routed_scaling_factor": 1.3,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
}
MULTIPLIERS = {
    "embedding_multiplier": 2.3,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 0.85,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.15,
    "ssm_multipliers": [0.7, 1.1, 0.9, 1.3, 0.6],
    "ssm_out_multiplier": 0.75,
    "mlp_multipliers": [0.9, 0.6],
}
SPECS = {
    "palm_like": (
        "cohere",
        "CohereForCausalLM",
        COHERE | {"num_key_value_heads": 1, "logit_scale": 24**-0.5, "rope_parameters": rope(1e4)},
    ),
    "llama": (
        "llama",
        "LlamaForCausalLM",
        MHA | {"rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
    ),
    "llama2_70b": (
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
    ),
    "llama3": (
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-5, "rope_parameters": rope(5e5)},
    ),
    "llama31": ("llama", "LlamaForCausalLM", LLAMA | {"head_dim": 12, "rope_parameters": LLAMA31}),
    "llama_linear": (
        "llama",
        "LlamaForCausalLM",
        MHA | {"rope_parameters": rope(1e4, "linear", factor=4.0)},
    ),
    "llama_yarn": ("llama", "LlamaForCausalLM", MHA | {"head_dim": 12, "rope_parameters": YARN}),
    "llama_dynamic": (
        "llama",
        "LlamaForCausalLM",
        MHA | {"max_position_embeddings": 9, "rope_parameters": rope(1e4, "dynamic", factor=2.0)},
    ),
    "llama_biased": (
        "llama",
        "LlamaForCausalLM",
        MHA | {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope(1e4)},
    ),
    "yi_34b": (
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-5, "rope_parameters": rope(5e6)},
    ),
    "deepseek_67b": (
        "llama",
        "LlamaForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-6, "rope_parameters": rope(1e4)},
    ),
    "smollm2": (
        "llama",
        "LlamaForCausalLM",
        MHA | {"tie_word_embeddings": True, "rope_parameters": rope(130000.0)},
    ),
    "reka_flash3": ("llama", "LlamaForCausalLM", LLAMA | NARROW | {"rope_parameters": rope(8e6)}),
    "mistral": (
        "mistral",
        "MistralForCausalLM",
        LLAMA | {"sliding_window": 5, "rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
    ),
    "mixtral": (
        "mixtral",
        "MixtralForCausalLM",
        LLAMA
        | {
            "intermediate_size": 6,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": rope(1e6),
        },
    ),
    "olmo": ("olmo", "OlmoForCausalLM", MHA | {"rope_parameters": rope(1e4)}),
    "olmo_clip": ("olmo", "OlmoForCausalLM", MHA | {"clip_qkv": 0.8, "rope_parameters": rope(1e4)}),
    "olmo_1b": (
        "olmo",
        "OlmoForCausalLM",
        MHA | {"tie_word_embeddings": True, "rope_parameters": rope(1e4)},
    ),
    "olmo2": (
        "olmo2",
        "Olmo2ForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-6, "rope_parameters": rope(5e5)},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        LLAMA
        | NARROW
        | {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 4,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": rope(1e4),
        },
    ),
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        LLAMA
        | NARROW
        | {
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 5,
            "sliding_window": 5,
            "rope_parameters": GEMMA3,
        },
    ),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM", LLAMA | GEMMA4),
    "gemma4_moe": (
        "gemma4_text",
        "Gemma4ForCausalLM",
        LLAMA
        | GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 9,
        },
    ),
    "gemma4_edge": (  # embeddings of layers, keys of earlier layers, as E2B
        "gemma4_text",
        "Gemma4ForCausalLM",
        LLAMA
        | GEMMA4
        | {
            "num_hidden_layers": 7,
            "layer_types": [*(["sliding_attention"] * 2 + ["full_attention"]), "sliding_attention"]
            + ["sliding_attention"] * 2
            + ["full_attention"],
            "attention_k_eq_v": False,
            "attention_bias": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 7,
            "vocab_size_per_layer_input": V,
        },
    ),
    "gemma4_kv": (
        "gemma4_text",
        "Gemma4ForCausalLM",
        LLAMA
        | GEMMA4
        | {"attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "nemotron": (
        "nemotron",
        "NemotronForCausalLM",
        LLAMA
        | {
            "hidden_size": 16,
            "head_dim": 8,
            "rope_parameters": rope(1e4, partial_rotary_factor=0.5),
        },
    ),
    "qwen2": (
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-6, "rope_parameters": rope(1e6)},
    ),
    "qwen2_swa": (
        "qwen2",
        "Qwen2ForCausalLM",
        LLAMA
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": rope(1e6),
        },
    ),
    "qwen3": (
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 10, "rms_norm_eps": 1e-6, "rope_parameters": rope(1e6)},
    ),
    "qwen3_swa": (
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA
        | {
            "head_dim": 10,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": rope(1e6),
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "rope_parameters": rope(1e6),
        },
    ),
    "arcee": ("arcee", "ArceeForCausalLM", LLAMA | {"head_dim": 12, "rope_parameters": YARN}),
    "seed_oss": (
        "seed_oss",
        "SeedOssForCausalLM",
        LLAMA | {"head_dim": 10, "rope_parameters": rope(1e7)},
    ),
    "ministral": (
        "ministral",
        "MinistralForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": rope(1e6),
        },
    ),
    "ernie4_5": (
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        LLAMA | {"head_dim": 10, "use_bias": True, "rope_parameters": rope(5e5)},
    ),
    "smollm3": (
        "smollm3",
        "SmolLM3ForCausalLM",
        LLAMA
        | IDS
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "no_rope_layers": [1, 1, 0],
            "rope_parameters": rope(2e6),
        },
    ),
    "exaone4": (
        "exaone4",
        "Exaone4ForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": rope(1e6),
        },
    ),
    "olmo3": (
        "olmo3",
        "Olmo3ForCausalLM",
        LLAMA
        | IDS
        | {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": rope(5e5)},
        },
    ),
    "olmoe": (
        "olmoe",
        "OlmoeForCausalLM",
        LLAMA
        | IDS
        | {
            "intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": rope(1e4),
        },
    ),
    "flex_olmo": (
        "flex_olmo",
        "FlexOlmoForCausalLM",
        LLAMA
        | IDS
        | {
            "intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_parameters": rope(5e5),
        },
    ),
    "glm4": (
        "glm4",
        "Glm4ForCausalLM",
        LLAMA | IDS | {"head_dim": 12, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
    ),
    "stablelm": (
        "stablelm",
        "StableLmForCausalLM",
        LLAMA
        | IDS
        | {
            "hidden_size": 32,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": rope(1e4, partial_rotary_factor=0.25),
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        "VaultGemmaForCausalLM",
        LLAMA
        | NARROW
        | IDS
        | {
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 4,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": rope(1e4),
        },
    ),
    "nanochat": (
        "nanochat",
        "NanoChatForCausalLM",
        LLAMA
        | IDS
        | {"attention_bias": True, "final_logit_softcapping": 3.0, "rope_parameters": rope(1e4)},
    ),
    "dbrx": (
        "dbrx",
        "DbrxForCausalLM",
        {
            "vocab_size": V,
            "d_model": 24,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 5e5},
            "ffn_config": {"ffn_hidden_size": 10, "moe_num_experts": 7, "moe_top_k": 3},
            "rope_parameters": rope(5e5),
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        LLAMA
        | {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 14,
            "rope_parameters": rope(1e6),
        },
    ),
    "deepseek_v2_moe": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 3.2,
            "rope_parameters": rope(1e4),
        },
    ),
    "deepseek_v3_moe": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 8,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": rope(1e4),
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        "Glm4MoeForCausalLM",
        LLAMA
        | {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "routed_scaling_factor": 1.4,
            "rope_parameters": rope(1e6, partial_rotary_factor=0.5),
        },
    ),
    "dots1": (
        "dots1",
        "Dots1ForCausalLM",
        LLAMA
        | {
            "head_dim": 10,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "max_window_layers": 1,
            "first_k_dense_replace": 1,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": rope(1e7),
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        LLAMA
        | IDS
        | {
            "head_dim": 12,
            "intermediate_size": 8,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": rope(5e6, partial_rotary_factor=0.5),
        },
    ),
    "exaone_moe": (
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        LLAMA
        | IDS
        | {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "rope_parameters": rope(1e6),
        },
    ),
    "hy_v3": (
        "hy_v3",
        "HYV3ForCausalLM",
        LLAMA
        | {
            "head_dim": 10,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 8,
            "router_scaling_factor": 1.7,
            "rope_parameters": rope(1e6),
        },
    ),
    "afmoe": (
        "afmoe",
        "AfmoeForCausalLM",
        LLAMA
        | {
            "num_hidden_layers": 4,
            "head_dim": 10,
            "sliding_window": 5,
            "global_attn_every_n_layers": 3,
            "num_dense_layers": 2,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 8,
            "route_scale": 1.7,
            "mup_enabled": True,
            "rope_parameters": rope(1e4),
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        LLAMA
        | IDS
        | {
            "num_hidden_layers": 3,
            "head_dim": 10,
            "sliding_window": 5,
            "intermediate_size": 8,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.5,
            "rope_parameters": rope(
                1.5e5,
                "yarn",
                factor=32.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=1000,
            ),
        },
    ),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeForCausalLM",
        GRANITE | {"intermediate_size": 6, "num_local_experts": 7, "num_experts_per_tok": 3},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        GRANITE
        | {
            "intermediate_size": 6,
            "shared_intermediate_size": 10,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
        },
    ),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        LLAMA | {"head_dim": 10, "rope_parameters": rope(1e4, "dynamic", alpha=50.0, factor=1.0)},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        LLAMA
        | {
            "head_dim": 10,
            "intermediate_size": 8,
            "num_experts": 7,
            "moe_topk": 3,
            "attention_bias": True,
            "rope_parameters": rope(1e4, "dynamic", alpha=1000.0, factor=1.0),
        },
    ),
    "ministral3": (
        "ministral3",
        "Ministral3ForCausalLM",
        LLAMA
        | {
            "head_dim": 10,
            "rope_parameters": rope(
                1e6,
                "yarn",
                factor=8.0,
                beta_fast=4.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=5,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        CONVOLUTIONS | {"conv_bias": True, "block_multiple_of": 7, "block_ffn_dim_multiplier": 1.2},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        CONVOLUTIONS
        | {
            "conv_L_cache": 4,
            "num_dense_layers": 2,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "routed_scaling_factor": 1.3,
        },
    ),
    "helium": (
        "helium",
        "HeliumForCausalLM",
        LLAMA | IDS | {"head_dim": 6, "attention_bias": True, "rope_parameters": rope(1e5)},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        DELTA_NET
        | {
            "intermediate_size": 22,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "rope_parameters": rope(1e7, partial_rotary_factor=0.4),
        },
    ),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA_NET | {"rope_parameters": MROPE}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        DELTA_NET
        | {
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": MROPE,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        "KimiLinearForCausalLM",
        MHA
        | IDS
        | {
            "num_hidden_layers": 4,
            "rms_norm_eps": 1e-2,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "linear_num_heads": 3,
            "linear_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "moe_intermediate_size": 9,
            "num_experts": 7,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
        },
    ),
    "minimax": (
        "minimax",
        "MiniMaxForCausalLM",
        LLAMA
        | IDS
        | {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "rms_norm_eps": 1e-2,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "block_size": 5,
            **{
                "full_attn_alpha_factor": 1.7,
                "linear_attn_alpha_factor": 0.6,
                "mlp_alpha_factor": 1.3,
            },
            **{
                "full_attn_beta_factor": 0.8,
                "linear_attn_beta_factor": 1.4,
                "mlp_beta_factor": 0.5,
            },
            "rope_parameters": rope(1e7),
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        LLAMA
        | IDS
        | {
            "head_dim": 10,
            "use_bias": True,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 8,
            "rope_parameters": rope(5e5),
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {name: x for name, x in DEEPSEEK.items() if name != "first_k_dense_replace"}
        | {
            "attention_bias": True,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 8,
            "rope_parameters": rope(1e6),
        },
    ),
    "cohere2_moe": (
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        {name: x for name, x in COHERE.items() if name != "rope_parameters"}
        | {
            "num_hidden_layers": 4,
            "head_dim": 10,
            "intermediate_size": 8,
            "sliding_window": 5,
            "logit_scale": 0.25,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "prefix_dense_intermediate_size": 14,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "rope_theta": 5e4,
        },
    ),
    "phimoe": (
        "phimoe",
        "PhimoeForCausalLM",
        LLAMA
        | IDS
        | {
            "intermediate_size": 8,
            "num_local_experts": 7,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 5,
            "rope_parameters": rope(1e4),
        },
    ),
    "bamba": (
        "bamba",
        "BambaForCausalLM",
        LLAMA
        | IDS
        | SSM
        | {
            "hidden_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "time_step_limit": (0.4, 1.1),
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": rope(1e4, partial_rotary_factor=0.5),
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        LLAMA
        | IDS
        | SSM
        | MULTIPLIERS
        | {
            "mamba_d_ssm": 48,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "time_step_limit": (0.4, 1.1),
            **dict.fromkeys(("mamba_proj_bias", "projectors_bias"), True),
            **dict.fromkeys(("attention_bias", "mlp_bias"), True),
            "rope_parameters": rope(1e11),
        },
    ),
    "falcon_h1_without_norm": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        LLAMA
        | IDS
        | SSM
        | MULTIPLIERS
        | {
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1e11),
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        DELTA_NET
        | {
            "head_dim": 6,
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"]
            + ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "rope_parameters": rope(5e5),
        },
    ),
    "olmo_hybrid_nope": (
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        DELTA_NET
        | {
            "head_dim": 6,
            "num_hidden_layers": 4,
            "layer_types": None,
            "linear_num_value_heads": 4,
            "linear_allow_neg_eigval": False,
            "tie_word_embeddings": True,
            "rope_parameters": rope(None),
        },
    ),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        IDS
        | {
            "vocab_size": V,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_heads": 6,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 5,
            "conv_kernel": 4,
            "chunk_size": 7,
            "use_conv_bias": False,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | IDS
        | SSM
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 10,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 14,
            "position_embedding_type": "nope",
            "time_step_limit": (0.4, 1.1),
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | IDS
        | SSM
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 14,
            "position_embedding_type": "rope",
            "attention_bias": True,
        },
    ),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", NEMOTRON_H),
    "nemotron_h_latent": (
        "nemotron_h",
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {"moe_latent_size": 9, "mlp_bias": True, "layers_block_type": ["moe", "full_attention"]},
    ),
    "qwen1_14b": ("qwen2", "Qwen2ForCausalLM", MHA | {"rope_parameters": rope(1e4)}),
    "falcon": ("falcon", "FalconForCausalLM", FALCON),
    "falcon_40b": (
        "falcon",
        "FalconForCausalLM",
        FALCON
        | {"num_ln_in_parallel_attn": 2, "tie_word_embeddings": True, "rope_parameters": rope(1e4)},
    ),
    "falcon_7b": ("falcon", "FalconForCausalLM", OLD_FALCON),
    "falcon_rw": (
        "falcon",
        "FalconForCausalLM",
        OLD_FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "phi3": ("phi3", "Phi3ForCausalLM", PHI3),
    "phi3_4k": ("phi3", "Phi3ForCausalLM", PHI3 | {"sliding_window": 5}),
    "phi3_longrope": (
        "phi3",
        "Phi3ForCausalLM",
        PHI3
        | {
            "hidden_size": 32,
            "max_position_embeddings": 40,
            "original_max_position_embeddings": 10,
            "tie_word_embeddings": True,
            "rope_parameters": LONGROPE,
        },
    ),
    "cohere": ("cohere", "CohereForCausalLM", COHERE | {"use_qk_norm": True}),
    "command_r": (
        "cohere",
        "CohereForCausalLM",
        COHERE | {"num_key_value_heads": 4, "logit_scale": 0.0625, "rope_parameters": rope(8e6)},
    ),
    "cohere2": (
        "cohere2",
        "Cohere2ForCausalLM",
        COHERE
        | {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "logit_scale": 0.25,
            "rope_parameters": rope(5e4),
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": rope(1e4)},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {"rms_norm_eps": 1e-5, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.5}},
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": rope(5e5)},
    ),
}
