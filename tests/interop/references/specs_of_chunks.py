"""Tiny configurations of model types with a difference of two softmaxes, or attention by chunks.

`SPECS` gives for each name its model type, its class and the arguments of its configuration.
"""

from tests.interop.references.specs_from_2023 import IDS, LLAMA
from tests.interop.references.specs_to_2022 import rope

PAIRS = LLAMA | IDS | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
LLAMA4 = (
    LLAMA
    | IDS
    | {"num_hidden_layers": 5, "head_dim": 10, "intermediate_size": 11, "intermediate_size_mlp": 22}
    | {"num_local_experts": 5, "interleave_moe_layer_step": 2, "attention_chunk_size": 5}
    | {"floor_scale": 3, "attn_scale": 0.3, "rope_parameters": rope(500042.0)}
)
CHUNKED, FULL = "chunked_attention", "full_attention"
SPECS = {
    "diffllama": (
        "diffllama",
        "DiffLlamaForCausalLM",
        PAIRS | {"num_hidden_layers": 3, "rope_parameters": rope(1e4)},
    ),
    "diffllama_biased": (
        "diffllama",
        "DiffLlamaForCausalLM",
        PAIRS
        | {"num_key_value_heads": 8, "attention_bias": True, "tie_word_embeddings": True}
        | {"rms_norm_eps": 1e-3},
    ),
    "llama4_text": ("llama4_text", "Llama4ForCausalLM", LLAMA4),
    "llama4_mixed": (  # positions and chunks in layers of their own; two experts
        "llama4_text",
        "Llama4ForCausalLM",
        LLAMA4
        | {"no_rope_layers": [0, 1, 1, 0], "layer_types": [CHUNKED, CHUNKED, FULL, FULL]}
        | {"num_hidden_layers": 4, "moe_layers": [0, 1, 2, 3], "num_experts_per_tok": 2}
        | {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
