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
GEMMA_4_EDGE = {"final_logit_softcapping": 30.0, "sliding_window": 512}
GEMMA_4 = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 1024,
}


def yarn(factor, original_length, base=1e4, **more):
    fields = {"factor": factor, "original_max_position_embeddings": original_length}
    return {"rope_type": "yarn", "rope_theta": base, **fields, **more}


QWEN_3_NEXT = rope(1e7, partial_rotary_factor=0.25)
OLMO_3 = {
    "full_attention": yarn(8.0, 8192, 5e5, attention_factor=1.2079441541679836),
    "sliding_attention": rope(5e5),
}

GRANITE_3 = {
    "vocab_size": 49_159,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "rope_parameters": rope(1e7),
}
SWITCH = {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6}


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
    "gpt-neo-1.3b": t.GPTNeoConfig(),
    "gpt-neo-2.7b": t.GPTNeoConfig(
        hidden_size=2560, num_layers=32, num_heads=20, attention_types=[[["global", "local"], 16]]
    ),
    "codegen-350m": t.CodeGenConfig(
        vocab_size=51_200, n_embd=1024, n_layer=20, n_head=16, rotary_dim=32
    ),
    "codegen-2b": t.CodeGenConfig(vocab_size=51_200, n_embd=2560, n_layer=32, n_head=32),
    "codegen-6b": t.CodeGenConfig(vocab_size=51_200, n_layer=33),
    "santacoder": t.GPTBigCodeConfig(
        vocab_size=49_280, n_positions=2048, n_embd=2048, n_layer=24, n_head=16
    ),
    "starcoder": t.GPTBigCodeConfig(
        vocab_size=49_152,
        n_positions=8192,
        n_embd=6144,
        n_layer=40,
        n_head=48,
        activation_function="gelu",
    ),
    "mpt-7b": t.MptConfig(vocab_size=50_432, d_model=4096, n_heads=32, n_layers=32),
    "mpt-30b": t.MptConfig(vocab_size=50_432, d_model=7168, n_heads=64, n_layers=48),
    "xglm-564m": t.XGLMConfig(),
    "xglm-7.5b": t.XGLMConfig(d_model=4096, ffn_dim=16_384, num_layers=32, attention_heads=32),
    "m2m-100-418m": t.M2M100Config(),
    "nllb-200-600m": t.M2M100Config(vocab_size=256_206),
    "nllb-200-3.3b": t.M2M100Config(
        vocab_size=256_206,
        d_model=2048,
        encoder_layers=24,
        decoder_layers=24,
        encoder_ffn_dim=8192,
        decoder_ffn_dim=8192,
    ),
    "pegasus-large": t.PegasusConfig(
        vocab_size=96_103,
        encoder_layers=16,
        decoder_layers=16,
        activation_function="relu",
        scale_embedding=True,
    ),
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
    "gemma-2b": t.GemmaConfig(**size(2048, 18, 8, 1, 16_384)),
    "gemma-7b": t.GemmaConfig(),
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
    "gemma-3n-e2b": t.Gemma3nTextConfig(**size(2048, 30, 8, 2, 8192), num_kv_shared_layers=10),
    "gemma-3n-e4b": t.Gemma3nTextConfig(),
    "gemma-4-31b": t.Gemma4TextConfig(
        **size(5376, 60, 32, 16, 21_504), **GEMMA_4, num_global_key_value_heads=4
    ),
    "gemma-4-e2b": t.Gemma4TextConfig(
        **size(1536, 35, 8, 1, 6144),
        **GEMMA_4_EDGE,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    ),
    "gemma-4-e4b": t.Gemma4TextConfig(
        **size(2560, 42, 8, 2, 10_240), **GEMMA_4_EDGE, num_kv_shared_layers=18
    ),
    "gemma-4-26b-a4b": t.Gemma4TextConfig(
        **size(2816, 30, 16, 8, 2112),
        **GEMMA_4,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
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
    "phi-1.5": t.PhiConfig(),
    "phi-2": t.PhiConfig(
        **size(2560, 32, 32, hidden=10_240), rope_parameters=rope(1e4, partial_rotary_factor=0.4)
    ),
    "starcoder2-3b": t.Starcoder2Config(
        sliding_window=4096, rope_parameters=rope(999_999.4420358813)
    ),
    "starcoder2-15b": t.Starcoder2Config(
        **size(6144, 40, 48, 4, 24_576),
        sliding_window=4096,
        tie_word_embeddings=False,
        rope_parameters=rope(1e5),
    ),
    "exaone-3.0-7.8b": t.ExaoneConfig(),
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
    "olmo-3-7b": t.Olmo3Config(
        **size(4096, 32, 32, 32, 11_008),
        vocab_size=100_278,
        max_position_embeddings=65_536,
        rms_norm_eps=1e-6,
        rope_parameters=OLMO_3,
    ),
    "olmo-3-32b": t.Olmo3Config(
        **size(5120, 64, 40, 8, 27_648),
        vocab_size=100_278,
        max_position_embeddings=65_536,
        rms_norm_eps=1e-6,
        rope_parameters=OLMO_3,
    ),
    "olmoe-1b-7b": t.OlmoeConfig(intermediate_size=1024, rms_norm_eps=1e-5),
    "qwen-1.5-moe-a2.7b": t.Qwen2MoeConfig(rope_parameters=rope(1e6)),
    "deepseek-v2-lite": t.DeepseekV2Config(
        **size(2048, 27, 16, 16, 10_944),
        vocab_size=102_400,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        max_position_embeddings=163_840,
        rope_parameters=yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v2": t.DeepseekV2Config(
        **size(5120, 60, 128, 128, 12_288),
        vocab_size=102_400,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        routed_scaling_factor=16.0,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        max_position_embeddings=163_840,
        rope_parameters=yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek-v3": t.DeepseekV3Config(
        max_position_embeddings=163_840,
        rope_parameters=yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    "dbrx": t.DbrxConfig(
        d_model=6144,
        n_heads=48,
        n_layers=40,
        vocab_size=100_352,
        max_seq_len=32_768,
        attn_config={"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        ffn_config={
            "hidden_size": 6144,
            "ffn_hidden_size": 10_752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        },
        rope_parameters=rope(5e5),
    ),
    "stablelm-2-1.6b": t.StableLmConfig(
        **size(2048, 24, 32, 32, 5632), vocab_size=100_352, use_qkv_bias=True
    ),
    "stablelm-2-12b": t.StableLmConfig(
        **size(5120, 40, 32, 8, 13_824),
        vocab_size=100_352,
        use_parallel_residual=True,
        qk_layernorm=True,
    ),
    "glm-4-9b": t.Glm4Config(
        **size(4096, 40, 32, 2, 13_696), attention_bias=True, rms_norm_eps=1e-5
    ),
    "glm-4.5-air": t.Glm4MoeConfig(
        attention_bias=True, head_dim=128, rope_parameters=rope(1e6, partial_rotary_factor=0.5)
    ),
    "glm-4.5": t.Glm4MoeConfig(
        **size(5120, 92, 96, 8, 12_288),
        attention_bias=True,
        head_dim=128,
        use_qk_norm=True,
        first_k_dense_replace=3,
        n_routed_experts=160,
        moe_intermediate_size=1536,
        routed_scaling_factor=2.5,
        rope_parameters=rope(1e6, partial_rotary_factor=0.5),
    ),
    "ernie-4.5-0.3b": t.Ernie4_5Config(),
    "smollm3-3b": t.SmolLM3Config(max_position_embeddings=65_536, rope_parameters=rope(5e6)),
    "exaone-4-32b": t.Exaone4Config(
        **size(5120, 64, 40, 8, 27_392),
        max_position_embeddings=131_072,
        rope_parameters={**LLAMA_3_1, "factor": 16.0, "rope_theta": 1e6},
    ),
    "arcee-4.5b": t.ArceeConfig(
        **size(2560, 36, 20, 4, 18_432),
        vocab_size=128_004,
        max_position_embeddings=65_536,
        rope_parameters=yarn(20.0, 4096),
    ),
    "trinity-mini": t.AfmoeConfig(
        **size(2048, 32, 32, 4, 6144),
        moe_intermediate_size=1024,
        num_dense_layers=2,
        num_experts=128,
        num_experts_per_tok=8,
        num_shared_experts=1,
        route_scale=2.826,
        sliding_window=2048,
        max_position_embeddings=131_072,
        mup_enabled=True,
        rope_parameters=rope(1e4),
    ),
    "seed-oss-36b": t.SeedOssConfig(hidden_size=5120, rope_parameters=rope(1e7)),
    "minimax-m2": t.MiniMaxM2Config(rope_parameters=rope(5e6, partial_rotary_factor=0.5)),
    "nanochat-d32": t.NanoChatConfig(
        **size(2048, 32, 16, 16, 8192), vocab_size=65_536, rope_parameters=rope(1e4)
    ),
    "hunyuan-3": t.HYV3Config(),
    "switch-base-8": t.SwitchTransformersConfig(**SWITCH),
    "switch-base-64": t.SwitchTransformersConfig(**SWITCH, num_experts=64),
    "ministral-3-8b": t.Ministral3Config(),
    "glm-4.7-flash": t.Glm4MoeLiteConfig(rope_parameters=rope(1e6)),
    "ernie-4.5-21b-a3b": t.Ernie4_5_MoeConfig(),
    "hunyuan-a13b": t.HunYuanMoEV1Config(
        **size(4096, 32, 32, 8, 3072),
        vocab_size=128_167,
        head_dim=128,
        num_experts=64,
        moe_topk=8,
        tie_word_embeddings=True,
        rope_parameters={**rope(1e4), "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "granite-3.3-2b": t.GraniteConfig(
        **size(2048, 40, 32, 8, 8192), **GRANITE_3, attention_multiplier=1 / 64, logits_scaling=8.0
    ),
    "granite-3.3-8b": t.GraniteConfig(
        **size(4096, 40, 32, 8, 12_800),
        **GRANITE_3,
        attention_multiplier=1 / 128,
        logits_scaling=16.0,
    ),
    "mamba-130m": t.MambaConfig(num_hidden_layers=24),
    "mamba-2.8b": t.MambaConfig(hidden_size=2560, num_hidden_layers=64),
    "falcon-mamba-7b": t.FalconMambaConfig(
        vocab_size=65_024, hidden_size=4096, num_hidden_layers=64, tie_word_embeddings=False
    ),
    "jamba-v0.1": t.JambaConfig(),
    "recurrentgemma-2b": t.RecurrentGemmaConfig(num_key_value_heads=1, intermediate_size=15_360),
    "recurrentgemma-9b": t.RecurrentGemmaConfig(
        hidden_size=4096,
        num_hidden_layers=38,
        num_attention_heads=16,
        num_key_value_heads=1,
        intermediate_size=24_576,
    ),
    "mamba-2-2.7b": t.Mamba2Config(
        vocab_size=50_288,
        hidden_size=2560,
        num_hidden_layers=64,
        num_heads=80,
        n_groups=1,
        tie_word_embeddings=True,
    ),
    "bamba-9b": t.BambaConfig(
        vocab_size=128_256, attn_layer_indices=[9, 18, 27], mamba_d_state=128
    ),
    "granite-4.0-h-small": t.GraniteMoeHybridConfig(
        **size(4096, 40, 32, 8, 768),
        **GRANITE_3 | {"vocab_size": 100_352},
        attention_multiplier=1 / 128,
        logits_scaling=16.0,
        layer_types=["full_attention" if i % 10 == 5 else "linear_attention" for i in range(40)],
        mamba_d_state=128,
        num_local_experts=72,
        num_experts_per_tok=10,
        shared_intermediate_size=1536,
        position_embedding_type="nope",
    ),
    "nemotron-3-nano": t.NemotronHConfig(
        hidden_size=2688,
        hybrid_override_pattern="MEMEM*E" * 5 + "ME" * 3 + "M*E" + "ME" * 4,
        num_key_value_heads=2,
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "qwen-3-next-80b-a3b": t.Qwen3NextConfig(rope_parameters=QWEN_3_NEXT),
    "qwen-3.5-9b": t.Qwen3_5TextConfig(rope_parameters=QWEN_3_NEXT),
    "qwen-3.5-27b": t.Qwen3_5TextConfig(
        **size(5120, 64, 24, 4, 17_408), linear_num_value_heads=48, rope_parameters=QWEN_3_NEXT
    ),
    "qwen-3.5-35b-a3b": t.Qwen3_5MoeTextConfig(rope_parameters=QWEN_3_NEXT),
    "lfm-2.5-1.2b": t.Lfm2Config(
        **size(2048, 16, 32, 8, 12_288), full_attn_idxs=[2, 5, 8, 10, 12, 14]
    ),
}

if __name__ == "__main__":
    configs = {name: json.loads(config.to_json_string()) for name, config in CONFIGS.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in configs.items()]
    path = Path(__file__).with_suffix(".json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
