"""Tiny configurations of transformers models that few people use, or that came late.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_from_2023 import (
    DEEPSEEK,
    GRANITE,
    IDS,
    LLAMA,
    LLAMA31,
    MHA,
    NARROW,
    YARN,
)
from tests.interop.references.specs_to_2022 import rope

HALF_ROPE = rope(25_000.0, partial_rotary_factor=0.5)
WIDE_HEADS = {"hidden_size": 32, "num_attention_heads": 4}
LATENT = {name: x for name, x in DEEPSEEK.items() if name != "first_k_dense_replace"}
LONGROPE_OF_6 = rope(
    1e4,
    "longrope",
    short_factor=[1.0, 1.2, 1.5],
    long_factor=[1.0, 2.0, 6.0],
    original_max_position_embeddings=10,
)
SPECS = {
    "apertus": (
        "apertus",
        "ApertusForCausalLM",
        LLAMA | IDS | {"attention_bias": True, "rope_parameters": LLAMA31},
    ),
    "apertus_text": (
        "apertus1p5_text",
        "Apertus1p5TextForCausalLM",
        LLAMA | IDS | {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ),
    "gemma": (
        "gemma",
        "GemmaForCausalLM",
        LLAMA | NARROW | IDS | {"hidden_act": "gelu", "rope_parameters": rope(1e4)},
    ),
    "gemma_mqa": (
        "gemma",
        "GemmaForCausalLM",
        LLAMA
        | NARROW
        | {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}
        | {"hidden_act": "silu"},
    ),
    "phi": ("phi", "PhiForCausalLM", MHA | WIDE_HEADS | {"rope_parameters": HALF_ROPE}),
    "phi_qk_norm": (
        "phi",
        "PhiForCausalLM",
        LLAMA | WIDE_HEADS | {"qk_layernorm": True, "layer_norm_eps": 1e-2},
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2ForCausalLM",
        LLAMA | IDS | {"norm_epsilon": 1e-2, "sliding_window": 5, "rope_parameters": rope(1e5)},
    ),
    "glm": (
        "glm",
        "GlmForCausalLM",
        LLAMA | IDS | {"head_dim": 8, "rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
    ),
    "exaone": (
        "exaone",
        "LlamaForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-2, "rope_parameters": LLAMA31},
    ),
    "persimmon": (
        "persimmon",
        "PersimmonForCausalLM",
        {k: v for k, v in MHA.items() if k != "num_key_value_heads"}
        | WIDE_HEADS
        | {"rope_parameters": HALF_ROPE, "layer_norm_eps": 1e-2},
    ),
    "internlm3": (
        "internlm3",
        "LlamaForCausalLM",
        LLAMA | IDS | {"head_dim": 10, "rope_parameters": rope(5e7)},
    ),
    "internlm3_biased": (
        "internlm3",
        "LlamaForCausalLM",
        LLAMA | {"head_dim": None, "attention_bias": True, "mlp_bias": True},
    ),
    "iquestcoder": (
        "iquestcoder",
        "LlamaForCausalLM",
        LLAMA | {"head_dim": 10, "rms_norm_eps": 1e-2, "rope_parameters": rope(5e5)},
    ),
    "cwm": (
        "cwm",
        "CwmForCausalLM",
        LLAMA
        | IDS
        | {"num_hidden_layers": 5, "head_dim": 10, "sliding_window": 5, "rope_parameters": LLAMA31},
    ),
    "hyperclovax": (
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        GRANITE | {"head_dim": 10, "rope_parameters": rope(1e6)},
    ),
    "hyperclovax_pre": (
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        GRANITE | {"use_post_norm": False, "attention_multiplier": None, "mlp_bias": True},
    ),
    "jais2": ("jais2", "Jais2ForCausalLM", LLAMA | IDS | {"head_dim": 10, "layer_norm_eps": 1e-2}),
    "granite_swa": (
        "granite_swa",
        "GraniteSWAForCausalLM",
        GRANITE
        | IDS
        | {"num_hidden_layers": 5, "sliding_window": 5, "attention_bias": True}
        | {"layer_rope_theta": [0, 1e4, 1e4, 5e2, 1e4]},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        GRANITE
        | IDS
        | {"num_hidden_layers": 4, "sliding_window": 5, "num_local_experts": 5}
        | {"intermediate_size": 10, "shared_intermediate_size": 14, "rope_parameters": rope(1e3)}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "solar_open": (
        "solar_open",
        "SolarOpenForCausalLM",
        LLAMA
        | IDS
        | {"head_dim": 10, "attention_bias": True, "n_routed_experts": 9, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 11, "routed_scaling_factor": 1.4, "n_shared_experts": 2},
    ),
    "sarvam_moe": (
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        LLAMA
        | IDS
        | {"head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 2}
        | {"moe_intermediate_size": 11, "routed_scaling_factor": 1.4, "n_shared_experts": 2}
        | {"attention_bias": True, "rope_parameters": rope(1e3)},
    ),
    "mellum": (
        "mellum",
        "MellumForCausalLM",
        LLAMA
        | IDS
        | {"num_hidden_layers": 4, "head_dim": 10, "num_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 11, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": rope(1e3)}},
    ),
    "flint": (
        "flint",
        "FlintForCausalLM",
        LLAMA
        | IDS
        | {"num_hidden_layers": 5, "head_dim": 10, "num_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 11, "shared_expert_intermediate_size": 14}
        | {"sliding_window": 5, "rope_parameters": rope(1e3)},
    ),
    "sarvam_mla": (
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        DEEPSEEK
        | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 11, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "youtu": ("youtu", "YoutuForCausalLM", LATENT | IDS | {"rope_parameters": rope(1e3)}),
    "youtu_biased": (
        "youtu",
        "YoutuForCausalLM",
        LATENT | {"attention_bias": True, "rope_interleave": False, "tie_word_embeddings": False},
    ),
    "minicpm3": (
        "minicpm3",
        "MiniCPM3ForCausalLM",
        LATENT
        | {"qk_rope_head_dim": 6, "scale_emb": 3.5, "scale_depth": 0.9, "dim_model_base": 17}
        | {"max_position_embeddings": 64, "rope_parameters": LONGROPE_OF_6},
    ),
}
