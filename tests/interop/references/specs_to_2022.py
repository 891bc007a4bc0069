"""Tiny configurations of transformers models released before 2023.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

V = 40  # ids 0 to 3 are never drawn: some models take them for padding


def rope(theta, kind="default", **numbers):
    return {"rope_type": kind, "rope_theta": theta, **numbers}


T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 3,
    "d_ff": 22,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
TRANSLATOR = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 22,
    "decoder_ffn_dim": 22,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 32,
}
MARIAN = TRANSLATOR | {
    "vocab_size": V,
    "activation_function": "relu",
    "scale_embedding": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": 1,
    "decoder_start_token_id": 0,
}
FSMT = TRANSLATOR | {
    "langs": ["en", "de"],
    "src_vocab_size": V + 3,
    "tgt_vocab_size": V,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
GPT = {"vocab_size": V, "n_positions": 20, "n_embd": 24, "n_layer": 2, "n_head": 4}
NEOX = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 22,
    "hidden_act": "gelu_fast",
    "rope_parameters": rope(1e4, partial_rotary_factor=0.25),
}
OPT = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "ffn_dim": 22,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
}

SPECS = {
    "marian": ("marian", "MarianMTModel", MARIAN),
    "fsmt": ("fsmt", "FSMTForConditionalGeneration", FSMT),
    "t5": ("t5", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "relu"}),
    "t5_v1_1": (
        "t5",
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("mt5", "MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "switch_transformers": (
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        T5
        | {
            "num_layers": 4,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "num_experts": 5,
            "expert_capacity": 2,
            "router_bias": True,
        },
    ),
    "openai_gpt": ("openai-gpt", "OpenAIGPTLMHeadModel", GPT),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT | {"n_inner": 22}),
    "gpt2_scales": (
        "gpt2",
        "GPT2LMHeadModel",
        GPT | {"n_inner": 22, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt3_banded": ("gpt2", "GPT2LMHeadModel", GPT | {"n_inner": 22, "n_layer": 3}),
    "gpt_neo": (
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": V,
            "max_position_embeddings": 20,
            "hidden_size": 24,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 22,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
        },
    ),
    "gptj": (
        "gptj",
        "GPTJForCausalLM",
        GPT | {"n_embd": 24, "n_head": 2, "n_inner": 22, "rotary_dim": 6},
    ),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM", NEOX),
    "gpt_neox_serial": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        NEOX | {"use_parallel_residual": False, "hidden_act": "gelu", "attention_bias": False},
    ),
    "bloom": (
        "bloom",
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": 24, "n_layer": 2, "n_head": 6},
    ),
    "opt": ("opt", "OPTForCausalLM", OPT),
    "opt_350m": (
        "opt",
        "OPTForCausalLM",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
    ),
    "xlnet_uni": (
        "xlnet",
        "XLNetLMHeadModel",
        {
            "vocab_size": V,
            "d_model": 16,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 22,
            "ff_activation": "relu",
            "attn_type": "uni",
            "use_mems_eval": False,
            "use_mems_train": False,
            "pad_token_id": 0,
        },
    ),
}
