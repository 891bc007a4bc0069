"""Tiny configurations of further model types that are rows beside their kin.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_from_2023 import COHERE, DELTA_NET, GEMMA4, IDS, LLAMA
from tests.interop.references.specs_to_2022 import GPT, TRANSLATOR, V, rope

BIGCODE = GPT | {"n_inner": 22, "bos_token_id": 1, "eos_token_id": 2}
ALONE = {  # heads, layers and widths of decoders under the names of OPT's kind
    "vocab_size": V,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
LFM3 = (
    LLAMA
    | IDS
    | {"num_hidden_layers": 5, "head_dim": 10, "conv_L_cache": 5, "sliding_window": 5}
    | {"layer_types": ["conv", SLIDING, FULL, "conv", SLIDING]}
    | {
        "rope_parameters": {
            SLIDING: rope(1e4),
            FULL: rope(1e6, "proportional", partial_rotary_factor=0.4),
        }
    }
)
SPECS = {
    "gpt_bigcode": ("gpt_bigcode", "GPTBigCodeForCausalLM", BIGCODE),
    "gpt_bigcode_mha": (
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        BIGCODE | {"multi_query": False, "scale_attn_weights": False},
    ),
    "mpt": (
        "mpt",
        "MptForCausalLM",
        {
            "vocab_size": V,
            "d_model": 24,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 32,
            "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.4},
        },
    ),
    "codegen": (
        "codegen",
        "CodeGenForCausalLM",
        GPT | {"n_embd": 48, "n_head": 8, "n_inner": 22, "rotary_dim": 4},
    ),
    "biogpt": (
        "biogpt",
        "BioGptForCausalLM",
        ALONE
        | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"intermediate_size": 22, "hidden_act": "relu"},
    ),
    "xglm": (
        "xglm",
        "XGLMForCausalLM",
        ALONE | {"d_model": 16, "num_layers": 2, "attention_heads": 4, "ffn_dim": 22},
    ),
    "ctrl": ("ctrl", "CTRLLMHeadModel", GPT | {"dff": 22}),
    "m2m_100": (
        "m2m_100",
        "M2M100ForConditionalGeneration",
        TRANSLATOR
        | {"vocab_size": V, "encoder_layers": 3, "encoder_ffn_dim": 26, "pad_token_id": 2}
        | {"encoder_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "pegasus": (
        "pegasus",
        "PegasusForConditionalGeneration",
        TRANSLATOR | {"vocab_size": V, "decoder_layers": 3, "decoder_ffn_dim": 26},
    ),
    "lfm3": ("lfm3", "Lfm3ForCausalLM", LFM3),
    "lfm3_plain": (
        "lfm3",
        "Lfm3ForCausalLM",
        LFM3
        | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True}
        | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "lara_mini": (
        "lara_mini",
        "LaraMiniForCausalLM",
        {name: x for name, x in DELTA_NET.items() if name != "intermediate_size"}
        | {"num_hidden_layers": 5, "linear_conv_kernel_dim": 3, "sliding_window": 5}
        | {"layer_types": [LINEAR, SLIDING, LINEAR, FULL, SLIDING]}
        | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 9}
        | {"shared_expert_intermediate_size": 14, "rope_parameters": rope(1e6)},
    ),
    "gemma4_unified_text": (
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        {name: x for name, x in (LLAMA | IDS | GEMMA4).items() if "per_layer" not in name},
    ),
    "cohere_compass_text": (
        "cohere_compass_text",
        "CohereCompassForCausalLM",
        COHERE
        | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]}
        | {"sliding_window": 5, "attention_bias": True}
        | {"rope_parameters": {FULL: rope(1e6, mrope_section=[1, 1, 1]), SLIDING: rope(1e4)}},
    ),
    "cohere_compass_nope": (
        "cohere_compass_text",
        "CohereCompassForCausalLM",
        COHERE
        | {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5}
        | {"logit_scale": None, "rope_parameters": {FULL: None, SLIDING: rope(1e4)}},
    ),
    "aria_text": (
        "aria_text",
        "AriaTextForCausalLM",
        LLAMA
        | IDS
        | {"moe_num_experts": 5, "moe_topk": 3, "moe_num_shared_experts": 3, "mlp_bias": True}
        | {"intermediate_size": 7, "hidden_act": "gelu", "rope_parameters": rope(1e5)},
    ),
}
