"""Tiny configurations of model types that have an option which few others have.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_from_2023 import DEEPSEEK, IDS, LLAMA, YARN
from tests.interop.references.specs_to_2022 import V, rope

EXPERTS = (
    DEEPSEEK
    | IDS
    | {
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    }
)
MISTRAL4 = EXPERTS | {
    "rope_parameters": YARN
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    | {"original_max_position_embeddings": 5}
}
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {"layer_types": [FULL, SLIDING, FULL, SLIDING], "sliding_window": 5}
BY_LAYER = (
    LLAMA
    | KINDS
    | {"num_hidden_layers": 4, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
)
SHARED = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 9,
}
LAGUNA = BY_LAYER | SHARED | {"head_dim": 12, "moe_routed_scaling_factor": 1.6}
MIMO = BY_LAYER | {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "head_dim": 18,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.6,
}
BEAM = (
    LLAMA
    | IDS
    | {"head_dim": 10, "rms_norm_eps": 1e-3, "sliding_window": 5, "moe_intermediate_size": 8}
    | {"num_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2}
    | {"routed_scaling_factor": 1.7}
)
MODERNBERT = (
    {name: x for name, x in LLAMA.items() if name != "num_key_value_heads"}
    | IDS
    | {"cls_token_id": 1, "sep_token_id": 2, "norm_eps": 1e-3, "local_attention": 10}
    | {"num_hidden_layers": 4}
)
MUSE_GLIMMER = (  # one layer has positions without a window, one a window without positions
    LLAMA
    | IDS
    | {"num_hidden_layers": 5, "head_dim": 10, "sliding_window": 5, "rms_norm_eps": 1e-2}
    | {"layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL], "post_norm_eps": 0.1}
    | {"layer_rope_theta": [7.0, 5e4, 0, 5e4, 0], "rope_parameters": rope(5e4)}
    | {"qk_scale_factor": 2.1, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}
)
GEMMA3N = (  # the table of each layer has fewer tokens; one width, or one of each layer
    LLAMA
    | IDS
    | {"num_hidden_layers": 7, "head_dim": 10, "sliding_window": 5, "rms_norm_eps": 1e-2}
    | {"layer_types": [SLIDING, FULL] * 2 + [SLIDING, SLIDING, FULL], "num_kv_shared_layers": 3}
    | {"activation_sparsity_pattern": [0.6, 0.8, 0.0, 0.3, 0.0, 0.0, 0.0], "altup_num_inputs": 3}
    | {"vocab_size_per_layer_input": V - 9, "hidden_size_per_layer_input": 7, "laurel_rank": 5}
    | {"rope_parameters": {FULL: rope(1e6), SLIDING: rope(1e4)}, "final_logit_softcapping": 3.0}
)
SIZES = "vocab_size", "hidden_size", "max_position_embeddings"
SPECS = {
    "axk1": (
        "axk1",
        "AXK1ForCausalLM",
        EXPERTS | {"rms_norm_eps": 1e-5, "rope_parameters": rope(1e4)},
    ),
    "bitnet": (
        "bitnet",
        "BitNetForCausalLM",
        LLAMA | {"rms_norm_eps": 1e-2, "attention_bias": True, "rope_parameters": rope(5e5)},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", "MiMoV2FlashForCausalLM", MIMO),
    "mimo_v2_flash_biased": (
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        MIMO | {"attention_bias": True, "attention_value_scale": None},
    ),
    "gpt_neox_japanese": (
        "gpt_neox_japanese",
        "GPTNeoXJapaneseForCausalLM",
        {name: x for name, x in LLAMA.items() if name in SIZES}
        | {"num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_multiple_size": 2}
        | {"rope_parameters": rope(25_000.0, partial_rotary_factor=0.5)},
    ),
    "kolibri1": (
        "kolibri1",
        "Kolibri1ForCausalLM",
        {name: x for name, x in LLAMA.items() if name != "intermediate_size"}
        | {"layer_types": [SLIDING, FULL], "sliding_window": 5, "head_dim": 12}
        | SHARED
        | {"norm_topk_prob": True, "rope_parameters": rope(1e6)},
    ),
    "laguna": (
        "laguna",
        "LagunaForCausalLM",
        LAGUNA
        | {
            "num_attention_heads_per_layer": [4, 6, 4, 2],
            "moe_router_logit_softcapping": 0.7,
            "rope_parameters": {
                FULL: YARN | {"partial_rotary_factor": 0.5},
                SLIDING: rope(1e4, partial_rotary_factor=0.7),
            },
        },
    ),
    "laguna_elements": (
        "laguna",
        "LagunaForCausalLM",
        LAGUNA | {"gating": "per-element", "attention_bias": True},
    ),
    "beam": (
        "beam",
        "BeamForCausalLM",
        BEAM | {"num_hidden_layers": 7, "mlp_layer_types": ["dense"] * 5 + ["sparse"] * 2},
    ),
    "beam_turned": (  # RoPE in all layers, no windows in some
        "beam",
        "BeamForCausalLM",
        BEAM
        | {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False}
        | {"rope_parameters": {FULL: rope(1e5), SLIDING: None}, "final_logit_softcapping": None},
    ),
    "modernbert_decoder": (
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        MODERNBERT | {"rope_parameters": {FULL: rope(1.6e5), SLIDING: rope(1e4)}},
    ),
    "modernbert_decoder_biased": (
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        MODERNBERT
        | {"layer_types": [SLIDING, SLIDING, FULL, SLIDING], "classifier_activation": "silu"}
        | {"hidden_activation": "relu", "norm_bias": True, "attention_bias": True}
        | {"mlp_bias": True, "classifier_bias": True, "decoder_bias": False}
        | {"tie_word_embeddings": False},
    ),
    "mistral4": ("mistral4", "Mistral4ForCausalLM", MISTRAL4),
    "gemma3n": ("gemma3n_text", "Gemma3nForCausalLM", GEMMA3N),
    "gemma3n_biased": (
        "gemma3n_text",
        "Gemma3nForCausalLM",
        GEMMA3N
        | {"intermediate_size": [20, 20, 23, 23, 23, 23, 23], "attention_bias": True}
        | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": V, "layer_types": None},
    ),
}
