"""Tiny configurations of model types with a state per feature: Mamba, Jamba, Griffin.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_from_2023 import IDS
from tests.interop.references.specs_to_2022 import V

MAMBA = IDS | {
    "vocab_size": V,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "state_size": 7,
    "conv_kernel": 5,
    "time_step_rank": 6,
}
JAMBA = IDS | {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 22,
    "num_experts": 9,
    "num_experts_per_tok": 4,
    "expert_layer_period": 3,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "mamba_d_state": 7,
    "mamba_d_conv": 5,
    "mamba_expand": 3,
    "mamba_dt_rank": 10,
}
GRIFFIN = IDS | {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 44,
    "lru_width": 20,
    "conv1d_width": 3,
    "attention_window_size": 5,
    "logits_soft_cap": 9.0,
}
SPECS = {
    "mamba": ("mamba", "MambaForCausalLM", MAMBA | {"use_bias": True}),
    "mamba_wide": (
        "mamba",
        "MambaForCausalLM",
        MAMBA
        | {"intermediate_size": 52, "time_step_rank": "auto", "use_conv_bias": False}
        | {"tie_word_embeddings": False},
    ),
    "falcon_mamba": (
        "falcon_mamba",
        "FalconMambaForCausalLM",
        MAMBA | {"mixer_rms_eps": 1e-3, "expand": 3},
    ),
    "jamba": ("jamba", "JambaForCausalLM", JAMBA),
    "jamba_dense": (
        "jamba",
        "JambaForCausalLM",
        JAMBA | {"num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "rwkv": (
        "rwkv",
        "RwkvForCausalLM",
        {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 3, "attention_hidden_size": 20}
        | {"intermediate_size": 22, "layer_norm_epsilon": 1e-2, "rescale_every": 0},
    ),
    "recurrent_gemma": ("recurrent_gemma", "RecurrentGemmaForCausalLM", GRIFFIN),
    "recurrent_gemma_biased": (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        GRIFFIN
        | {"attention_bias": True, "lru_width": None, "tie_word_embeddings": False}
        | {"block_types": ["attention", "recurrent"], "hidden_activation": "gelu"},
    ),
}
