"""Write hugging_face.json: the config.json of presets, by transformers' own configuration classes.

The classes' defaults are those of a well-known release (GPT2Config of GPT-2 small, and so on);
where another size is meant, only what differs is given. Needs transformers 5.

    python tests/zoo/golden/hugging_face.py
"""

import json
from pathlib import Path

import transformers as t


def rope(base, **more):
    return {"rope_type": "default", "rope_theta": base, **more}


LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA_3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": rope(1e4),
}


def size(width, layers, heads, kv_heads=None, hidden=None):
    fields = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    fields |= {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return fields | ({} if hidden is None else {"intermediate_size": hidden})


CONFIGS = {
    "gpt-1": t.OpenAIGPTConfig(),
    "gpt-2-small": t.GPT2Config(),
    "t5-small": t.T5Config(),
    "t5-11b": t.T5Config(d_model=1024, d_kv=128, d_ff=65_536, num_layers=24, num_heads=128),
    "gpt-j-6b": t.GPTJConfig(),
    "gpt-neox-20b": t.GPTNeoXConfig(hidden_act="gelu_fast"),
    "pythia-6.9b": t.GPTNeoXConfig(**size(4096, 32, 32, hidden=16_384)),
    "bloom-176b": t.BloomConfig(vocab_size=250_880, hidden_size=14_336, n_layer=70, n_head=112),
    "opt-125m": t.OPTConfig(),
    "opt-350m": t.OPTConfig(
        **size(1024, 24, 16), ffn_dim=4096, do_layer_norm_before=False, word_embed_proj_dim=512
    ),
    "falcon-7b": t.FalconConfig(),
    "falcon-40b": t.FalconConfig(
        **size(8192, 60, 128), num_kv_heads=8, new_decoder_architecture=True
    ),
    "falcon-2-11b": t.FalconConfig(
        **size(4096, 60, 32),
        num_kv_heads=8,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
        rope_parameters=rope(500_042.0),
    ),
    "llama-7b": t.LlamaConfig(),
    "llama-2-70b": t.LlamaConfig(**size(8192, 80, 64, 8, 28_672), rms_norm_eps=1e-5),
    "llama-3.1-8b": t.LlamaConfig(
        vocab_size=128_256,
        num_key_value_heads=8,
        intermediate_size=14_336,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters=LLAMA_3_1,
    ),
    "smollm2-1.7b": t.LlamaConfig(
        **size(2048, 24, 32, hidden=8192),
        vocab_size=49_152,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope(130_000.0),
    ),
    "mistral-7b": t.MistralConfig(rms_norm_eps=1e-5),
    "mixtral-8x7b": t.MixtralConfig(),
    "olmo-7b": t.OlmoConfig(),
    "olmo-1b": t.OlmoConfig(**size(2048, 16, 16, hidden=8192), tie_word_embeddings=True),
    "olmo-2-7b": t.Olmo2Config(vocab_size=100_352, rms_norm_eps=1e-6, rope_parameters=rope(5e5)),
    "gemma-2-2b": t.Gemma2Config(),
    "gemma-2-27b": t.Gemma2Config(
        **size(4608, 46, 32, 16, 36_864), head_dim=128, query_pre_attn_scalar=144
    ),
    "gemma-3-1b": t.Gemma3TextConfig(
        **size(1152, 26, 4, 1, 6912), vocab_size=262_144, sliding_window=512
    ),
    "gemma-3-27b": t.Gemma3TextConfig(
        **size(5376, 62, 32, 16, 21_504),
        vocab_size=262_208,
        head_dim=128,
        query_pre_attn_scalar=168,
        sliding_window=1024,
        rope_parameters=GEMMA_3,
    ),
    "nemotron-4-340b": t.NemotronConfig(
        **size(18_432, 96, 96, 8, 73_728), vocab_size=256_000, head_dim=192
    ),
    "qwen-2-72b": t.Qwen2Config(
        **size(8192, 80, 64, 8, 29_568),
        vocab_size=152_064,
        rms_norm_eps=1e-5,
        rope_parameters=rope(1e6),
    ),
    "qwen-3-8b": t.Qwen3Config(**size(4096, 36, 32, 8, 12_288), rope_parameters=rope(1e6)),
    "qwen-3-32b": t.Qwen3Config(**size(5120, 64, 64, 8, 25_600), rope_parameters=rope(1e6)),
    "qwen-3-0.6b": t.Qwen3Config(
        **size(1024, 28, 16, 8, 3072), tie_word_embeddings=True, rope_parameters=rope(1e6)
    ),
    "phi-3-mini": t.Phi3Config(sliding_window=2047),
    "phi-4": t.Phi3Config(
        **size(5120, 40, 40, 10, 17_920),
        vocab_size=100_352,
        pad_token_id=0,
        rope_parameters=rope(250_000.0, partial_rotary_factor=1.0),
    ),
    "command-r": t.CohereConfig(rope_parameters=rope(8e6)),
    "command-r-plus": t.CohereConfig(
        **size(12_288, 64, 96, 8, 33_792),
        use_qk_norm=True,
        logit_scale=0.8333333333333334,
        rope_parameters=rope(75e6),
    ),
    "command-a": t.Cohere2Config(
        **size(12_288, 64, 96, 8, 36_864), logit_scale=0.25, rope_parameters=rope(5e4)
    ),
}

if __name__ == "__main__":
    configs = {name: json.loads(config.to_json_string()) for name, config in CONFIGS.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in configs.items()]
    path = Path(__file__).with_suffix(".json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
