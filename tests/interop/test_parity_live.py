"""The same against transformers and torch themselves, at other sizes; needs the parity extra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer
from jaxformer.interop import load_pretrained, save_pretrained
from tests.interop.golden_files import NAMES, GoldenReference, tolerance, write_folder
from tests.interop.references_without_family import REFERENCES_WITHOUT_FAMILY

pytest.importorskip("torch", reason="compares with torch: pip install 'jaxformer[parity]'")
transformers = pytest.importorskip(
    "transformers", reason="compares with transformers: pip install 'jaxformer[parity]'"
)

from tests.interop import make_golden  # noqa: E402  (imports torch)
from tests.interop.references import build as references  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

SEED = 11
# Only how fast it compiles.
COMPILER = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}
LENGTH, SOURCE_LENGTH, BATCH = 21, 16, 2
REFERENCES_HERE = ("ref_phi3_small", "ref_baichuan2_7b", "ref_baichuan2_13b", "muse_glimmer_text")
FLOAT32_ONLY = "fsmt", "xglm", "ref_gopher"  # torch refuses their masks and positions in float64
REKEYED = ("qwen1_14b", *REFERENCES_HERE)

WIDE = {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6}
GROUPED = WIDE | {"num_key_value_heads": 3, "intermediate_size": 29}
ALONE = WIDE | {"num_key_value_heads": 6, "intermediate_size": 29}
NARROW = GROUPED | {"hidden_size": 24}
GEMMA4 = GROUPED | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 7,
}
GPT = {"vocab_size": 53, "n_positions": 24, "n_embd": 36, "n_layer": 3, "n_head": 6}
TRANSLATOR = {
    "d_model": 18,
    "encoder_layers": 3,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 25,
    "decoder_ffn_dim": 21,
}
T5 = {"vocab_size": 53, "d_model": 14, "d_kv": 5, "num_heads": 3, "d_ff": 25, "num_layers": 3}
OPT = WIDE | {"hidden_size": 30, "num_attention_heads": 5, "max_position_embeddings": 24}
NEOX = WIDE | {"hidden_size": 48}
PLAIN = {"vocab_size": 53, "d": 18, "heads": 3, "ff": 25, "layers": 3}
PHIMOE_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5],
    "long_factor": [1.0, 2.0, 6.0],
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "marian": TRANSLATOR | {"vocab_size": 53},
    "lfm3": GROUPED
    | {"num_hidden_layers": 5, "layer_types": None, "rope_parameters": None, "head_dim": 8},
    "lfm3_plain": GROUPED | {"layer_types": ["full_attention", "conv", "sliding_attention"]},
    "lara_mini": WIDE
    | {"num_hidden_layers": 5, "num_key_value_heads": 3, "layer_types": None}
    | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": False},
    "gemma4_unified_text": GEMMA4
    | {"attention_k_eq_v": False, "attention_bias": True, "rope_parameters": None},
    "cohere_compass_text": GROUPED
    | {"layer_types": None, "logit_scale": 0.5}
    | {"rope_parameters": {"full_attention": {"rope_theta": 1e5, "mrope_interleaved": True}}},
    "cohere_compass_nope": GROUPED
    | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "aria_text": GROUPED | {"moe_num_shared_experts": 1, "mlp_bias": False},
    "diffllama": GROUPED | {"num_key_value_heads": 2, "attention_bias": True},
    "diffllama_biased": ALONE | {"attention_bias": False, "head_dim": None},
    "llama4_text": GROUPED
    | {"num_hidden_layers": 4, "interleave_moe_layer_step": 1, "attn_temperature_tuning": False},
    "llama4_mixed": GROUPED
    | {"num_hidden_layers": 4, "moe_layers": [], "attention_chunk_size": None}
    | {"layer_types": None, "no_rope_layers": None},
    "m2m_100": TRANSLATOR | {"vocab_size": 53, "scale_embedding": False},
    "pegasus": TRANSLATOR | {"vocab_size": 53, "scale_embedding": True},
    "gpt_bigcode": GPT | {"n_inner": None, "scale_attn_weights": False},
    "gpt_bigcode_mha": GPT | {"activation_function": "relu"},
    "mpt": {"vocab_size": 53, "d_model": 36, "n_heads": 6, "n_layers": 3, "attn_config": None}
    | {"layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
    "codegen": GPT | {"n_head": 12, "n_embd": 48, "tie_word_embeddings": True},
    "biogpt": OPT | {"intermediate_size": 29, "scale_embedding": False, "layer_norm_eps": 1e-2},
    "xglm": {"vocab_size": 53, "d_model": 30, "num_layers": 3, "attention_heads": 5}
    | {"ffn_dim": 29, "scale_embedding": False, "activation_function": "relu"},
    "ctrl": GPT | {"dff": 29, "tie_word_embeddings": False},
    "fsmt": TRANSLATOR | {"src_vocab_size": 61, "tgt_vocab_size": 53, "pad_token_id": 3},
    "t5": T5,
    "t5_v1_1": T5,
    "switch_transformers": T5
    | {"num_layers": 5, "num_decoder_layers": 3, "num_sparse_decoder_layers": 1}
    | {"encoder_sparse_step": 3, "dense_act_fn": "gelu_new", "router_bias": False},
    "mt5": T5 | {"num_decoder_layers": 1},
    "openai_gpt": GPT | {"afn": "silu"},
    "gpt2": GPT | {"n_inner": None, "scale_attn_weights": False},
    "gpt2_scales": GPT | {"n_layer": 4, "scale_attn_weights": False},
    "gpt3_banded": GPT | {"n_layer": 5},
    "gpt_neo": {"hidden_size": 36, "num_heads": 6, "intermediate_size": 29}
    | {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}
    | {"max_position_embeddings": 24},
    "gptj": GPT | {"rotary_dim": 4, "activation_function": "relu"},
    "gpt_neox": NEOX,
    "gpt_neox_serial": NEOX | {"attention_bias": True},
    "bloom": {"vocab_size": 53, "hidden_size": 30, "n_layer": 3, "n_head": 5},
    "opt": OPT | {"enable_bias": False},
    "opt_350m": OPT | {"word_embed_proj_dim": 7},
    "xlnet_uni": {"vocab_size": 53, "d_model": 18, "n_head": 3, "d_inner": 25, "n_layer": 3},
    "palm_like": ALONE | {"num_key_value_heads": 1},
    "mixtral": GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen3_moe": GROUPED
    | {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": False},
    "smollm3": GROUPED
    | {"num_hidden_layers": 5, "no_rope_layers": None, "layer_types": None}
    | {"use_sliding_window": False},
    "gemma4": GEMMA4 | {"attention_bias": True, "tie_word_embeddings": False},
    "gemma4_kv": GEMMA4 | {"head_dim": 8},
    "gemma4_edge": GEMMA4
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 11, "vocab_size_per_layer_input": 53}
    | {"use_double_wide_mlp": False},
    "gemma3n": GROUPED
    | {"num_hidden_layers": 5, "layer_types": None, "num_kv_shared_layers": 0}
    | {"activation_sparsity_pattern": None, "altup_num_inputs": 2, "laurel_rank": 3}
    | {"vocab_size_per_layer_input": 47, "hidden_size_per_layer_input": 4},
    "gemma3n_biased": GEMMA4
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    | {"activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.2], "intermediate_size": 23}
    | {"vocab_size_per_layer_input": 53, "attention_bias": False, "tie_word_embeddings": False},
    "gemma4_moe": GEMMA4 | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 11},
    "exaone4": GROUPED | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "olmo3": GROUPED | {"num_hidden_layers": 5, "sliding_window": 7},
    "olmoe": GROUPED | {"norm_topk_prob": True, "num_experts_per_tok": 4},
    "seed_oss": GROUPED | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": GROUPED | {"use_bias": False, "tie_word_embeddings": False},
    "stablelm": GROUPED
    | {"hidden_size": 48, "use_qkv_bias": False, "use_parallel_residual": False},
    "vaultgemma": GROUPED | {"num_hidden_layers": 4},
    "nanochat": GROUPED | {"attention_bias": False, "tie_word_embeddings": True},
    "dbrx": {"vocab_size": 53, "d_model": 36, "n_heads": 6, "n_layers": 3}
    | {"attn_config": {"kv_n_heads": 3, "clip_qkv": 8, "rope_theta": 1e4}}
    | {"ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 2}},
    "qwen2_moe": GROUPED | {"norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False},
    "deepseek_v2_moe": ALONE
    | {"topk_method": "greedy", "first_k_dense_replace": 1, "mlp_bias": True},
    "deepseek_v3_moe": ALONE | {"first_k_dense_replace": 2, "norm_topk_prob": False},
    "glm4_moe": GROUPED | {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2},
    "dots1": GROUPED | {"sliding_window": None, "norm_topk_prob": False},
    "exaone_moe": GROUPED
    | {"sliding_window": 7, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    | {"mlp_layer_types": ["dense", "dense", "sparse"], "num_shared_experts": 2},
    "granite": GROUPED | {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "granitemoe": GROUPED | {"num_local_experts": 6, "attention_bias": True},
    "granitemoeshared": GROUPED | {"num_local_experts": 6, "shared_intermediate_size": 11},
    "hunyuan_v1_dense": GROUPED
    | {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "hunyuan_v1_moe": GROUPED | {"attention_bias": False, "moe_topk": [2, 2, 2]},
    "ministral3": GROUPED | {"head_dim": 6, "sliding_window": 7},
    "lfm2": GROUPED
    | {"num_hidden_layers": 4, "layer_types": None, "full_attn_idxs": [1, 3]}
    | {"conv_L_cache": 5, "conv_bias": False, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": GROUPED
    | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    | {"num_dense_layers": 1, "use_expert_bias": False, "norm_topk_prob": False},
    "helium": GROUPED | {"head_dim": 6, "attention_bias": False, "mlp_bias": True},
    "qwen3_next": GROUPED
    | {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 2}
    | {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 3, "linear_value_head_dim": 7}
    | {"mlp_only_layers": [], "norm_topk_prob": False},
    "qwen3_5": GROUPED | {"num_hidden_layers": 4, "layer_types": None, "linear_num_key_heads": 6},
    "qwen3_5_moe": GROUPED | {"linear_num_key_heads": 1},
    "kimi_linear": ALONE
    | {"num_hidden_layers": 5, "layer_types": None, "q_lora_rank": 11, "attention_bias": True}
    | {"num_experts": 6, "num_expert_group": 3, "topk_group": 2, "moe_renormalize": False}
    | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3},
    "minimax": GROUPED | {"layer_types": None, "block_size": 7, "num_local_experts": 5},
    "hy_v3": GROUPED | {"mlp_bias": True, "attention_bias": True},
    "afmoe": GROUPED
    | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    | {"num_dense_layers": 0, "mup_enabled": False, "attention_bias": True},
    "cohere2_moe": GROUPED
    | {"num_hidden_layers": 4, "expert_selection_fn": "softmax", "rms_norm_eps": 1e-6}
    | {"shared_expert_combination_strategy": "sum", "prefix_dense_sliding_window_pattern": 2}
    | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "layer_types": None},
    "phimoe": GROUPED
    | {"attention_bias": False, "lm_head_bias": False, "sliding_window": None}
    | {"num_local_experts": 5, "router_jitter_noise": 0.4, "rope_parameters": PHIMOE_ROPE},
    "glm4_moe_lite": ALONE
    | {"q_lora_rank": None, "rope_interleave": False, "n_group": 2, "topk_group": 1}
    | {"n_routed_experts": 8, "mlp_layer_types": ["dense", "dense", "sparse"]},
    "ernie4_5_moe": GROUPED
    | {"num_hidden_layers": 7, "moe_layer_interval": 2, "moe_layer_end_index": 4}
    | {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    "bamba": GROUPED
    | {"hidden_size": 48, "num_hidden_layers": 5, "attn_layer_indices": [1, 4]}
    | {"time_step_limit": (0.0, float("inf")), "mamba_proj_bias": False, "mamba_n_heads": 6}
    | {"mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_conv_bias": False, "mlp_bias": False},
    "falcon_h1": GROUPED
    | {"mamba_norm_before_gate": True, "mamba_n_groups": 2, "rms_norm_eps": 1e-2}
    | {"mlp_multipliers": None, "ssm_multipliers": None, "tie_word_embeddings": True},
    "falcon_h1_without_norm": GROUPED
    | {"mamba_d_head": 12, "time_step_limit": (0.0, 0.9), "mamba_proj_bias": True},
    "olmo_hybrid": GROUPED
    | {"num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention"] * 2}
    | {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "attention_bias": False},
    "olmo_hybrid_nope": GROUPED
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    | {"linear_value_head_dim": 7, "linear_allow_neg_eigval": True},
    "granitemoehybrid": GROUPED
    | {"layers_block_type": ["mamba", "mamba", "attention"], "layer_types": None}
    | {"mamba_d_head": "auto", "mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_d_conv": 4},
    "granitemoehybrid_dense": GROUPED
    | {"layer_types": ["full_attention"] * 3, "attention_bias": False, "mamba_d_head": "auto"},
    "nemotron_h": {"vocab_size": 53, "hidden_size": 36, "num_attention_heads": 6}
    | {"layers_block_type": None, "hybrid_override_pattern": "MM*E-", "mlp_bias": True}
    | {"use_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "nemotron_h_latent": {"vocab_size": 53, "hidden_size": 36, "num_attention_heads": 6}
    | {"mlp_bias": False, "moe_latent_size": 13},
    "mamba2": {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2, "head_dim": 12}
    | {"n_groups": 3, "use_bias": True, "use_conv_bias": True, "time_step_limit": (0.2, 0.9)},
    "mamba": {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2}
    | {"use_bias": False, "conv_kernel": 3, "time_step_rank": "auto"},
    "mamba_wide": {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2}
    | {"intermediate_size": 29, "use_conv_bias": True, "use_bias": True},
    "falcon_mamba": {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2}
    | {"expand": 1, "mixer_rms_eps": 1e-2, "tie_word_embeddings": False},
    "jamba": GROUPED
    | {"num_hidden_layers": 7, "num_experts": 5, "expert_layer_period": 2}
    | {"attn_layer_period": 3, "attn_layer_offset": 0, "mamba_conv_bias": False},
    "jamba_dense": GROUPED
    | {"attn_layer_offset": 1, "mamba_dt_rank": "auto", "mamba_proj_bias": False},
    "rwkv": {"vocab_size": 53, "hidden_size": 36, "num_hidden_layers": 2}
    | {"attention_hidden_size": None, "intermediate_size": None, "tie_word_embeddings": True},
    "recurrent_gemma": GROUPED
    | {"hidden_size": 48, "num_hidden_layers": 7, "lru_width": 30, "attention_window_size": 7}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1}},
    "recurrent_gemma_biased": GROUPED
    | {"hidden_size": 24, "block_types": ["recurrent", "recurrent", "attention"]}
    | {"num_key_value_heads": None, "attention_bias": False, "conv1d_width": 2},
    "falcon": WIDE | {"num_kv_heads": 3, "bias": True},
    "falcon_40b": WIDE | {"num_kv_heads": 6},
    "falcon_7b": WIDE | {"multi_query": False},
    "falcon_rw": WIDE | {"hidden_size": 32, "num_attention_heads": 8, "parallel_attn": True},
    "phi3_longrope": GROUPED | {"hidden_size": 48},
    "command_r": GROUPED | {"sliding_window": None},
    "deepseek_v2": ALONE | {"first_k_dense_replace": 3, "v_head_dim": 7},
    "deepseek_v2_lite": ALONE | {"first_k_dense_replace": 3, "attention_bias": True},
    "deepseek_v3": ALONE | {"first_k_dense_replace": 3, "kv_lora_rank": 5},
    "deepseek_v3_halves": ALONE | {"first_k_dense_replace": 3, "q_lora_rank": 7},
    "ref_transformer2017": PLAIN,
    "lamda_like": T5,
    "ref_gopher": PLAIN,
    "ref_baichuan2_7b": WIDE | {"intermediate_size": 29},
    "ref_baichuan2_13b": WIDE | {"intermediate_size": 29, "num_attention_heads": 9},
    "ref_phi3_small": WIDE | {"num_key_value_heads": 2, "ff_intermediate_size": 25},
}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
SIZES["granitemoe_swa"] = GROUPED | WINDOWS | {"layer_rope_theta": [0, 1e4, 5e2]}
SIZES["mellum"] = GROUPED | WINDOWS | {"mlp_layer_types": None, "norm_topk_prob": False}
SIZES["flint"] = GROUPED | WINDOWS | {"mlp_only_layers": [1], "norm_topk_prob": False}
SIZES["minicpm3"] = ALONE | {"scale_depth": None, "dim_model_base": None, "mlp_bias": True}
SIZES["sarvam_mla"] = SIZES["youtu"] = SIZES["youtu_biased"] = ALONE
SIZES["cwm"] = GROUPED | {"head_dim": 8}
SIZES["jais2"] = GROUPED | {"attention_bias": False, "mlp_bias": False}
SIZES["mistral4"] = ALONE | {"first_k_dense_replace": 0, "q_lora_rank": None, "n_group": 1}
SIZES["mistral4"] |= {"topk_group": 1, "norm_topk_prob": False}
SIZES["axk1"] = ALONE | {"mlp_layer_types": ["dense", "dense", "sparse"], "n_shared_experts": 2}
SIZES["bitnet"] = GROUPED | {"attention_bias": False, "tie_word_embeddings": True}
SIZES["laguna"] = GROUPED | WINDOWS | {"mlp_layer_types": ["dense", "sparse", "dense"]}
SIZES["laguna"] |= {"num_attention_heads_per_layer": [6, 3, 9]}
SIZES["laguna_elements"] = GROUPED | {"layer_types": None, "mlp_layer_types": None}
SIZES["laguna_elements"] |= {"moe_router_logit_softcapping": 0.4, "attention_bias": False}
SIZES["mimo_v2_flash"] = GROUPED | WINDOWS | {"mlp_layer_types": None}
SIZES["mimo_v2_flash_biased"] = GROUPED | {"layer_types": None, "mlp_layer_types": None}
SIZES["mimo_v2_flash_biased"] |= {"attention_value_scale": 0.5, "n_group": 1, "topk_group": 1}
SIZES["beam"] = GROUPED | {"layer_types": None, "num_hidden_layers": 4, "n_group": 1}
SIZES["beam"] |= {"topk_group": 1, "mlp_layer_types": None, "attention_bias": True}
SIZES["beam_turned"] = GROUPED | WINDOWS | {"mlp_layer_types": ["sparse", "dense", "dense"]}
SIZES["modernbert_decoder"] = WIDE | {"intermediate_size": 29, "layer_types": None}
SIZES["modernbert_decoder"] |= {"rope_parameters": None, "norm_bias": True}
SIZES["modernbert_decoder_biased"] = WIDE | WINDOWS | {"intermediate_size": 29, "mlp_bias": False}
SIZES["kolibri1"] = WIDE | WINDOWS | {"num_key_value_heads": 3, "norm_topk_prob": False}
SIZES["gpt_neox_japanese"] = WIDE | {"hidden_size": 48, "intermediate_multiple_size": 3}
SIZES["gpt_neox_japanese"] |= {"tie_word_embeddings": False}
SIZES["muse_glimmer_text"] = GROUPED | {"layer_types": None, "layer_rope_theta": None}
EVEN_HALVES = {"hidden_size": 48}  # half of a head of 8 is a whole number of pairs
for name in ("phi", "phi_qk_norm", "persimmon", "glm"):
    SIZES[name] = GROUPED | EVEN_HALVES
SIZES["persimmon"] = WIDE | EVEN_HALVES | {"intermediate_size": 29, "qk_layernorm": False}
for name in ("llama", "llama_linear", "llama_biased", "smollm2", "olmo", "olmo_clip", "olmo_1b"):
    SIZES[name] = ALONE
for name in ("llama_yarn", "llama_dynamic", "qwen1_14b"):
    SIZES[name] = ALONE
for name in ("reka_flash3", "gemma2", "gemma3", "nemotron"):
    SIZES[name] = NARROW
SIZES["gemma2"] = NARROW | {"num_hidden_layers": 4}
SIZES["gemma3"] = NARROW | {"num_hidden_layers": 9}


def ours(config, params, ids):
    """Our logits for the keywords of a reference's forward."""
    tokens, *source = reversed([jnp.asarray(x.numpy(), jnp.int32) for x in ids.values()])
    read_too = {"source": source[0]} if source else {}
    return jax.jit(Transformer(config).apply, compiler_options=COMPILER)(
        {"params": params}, tokens, **read_too
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_both_ways(name, tmp_path):
    model = references.build(name, seed=SEED, **SIZES.get(name, GROUPED))
    ids = references.tokens(model, LENGTH, source_length=SOURCE_LENGTH, batch=BATCH, seed=SEED)
    expected = references.logits(model, ids)
    bound = 1e-5 * np.abs(expected).max()
    if name not in FLOAT32_ONLY:  # twice what the reference itself errs
        bound += 2 * np.abs(references.logits(model.double(), ids) - expected).max()
        model = model.float()
    if name in REFERENCES_WITHOUT_FAMILY or name in REKEYED:
        config, tensors = make_golden.folder(name, model)
        golden = GoldenReference(config, {key: x.numpy() for key, x in tensors.items()}, [])
    if name in REFERENCES_WITHOUT_FAMILY:
        config, params = REFERENCES_WITHOUT_FAMILY[name](golden.config, golden.tensors)
    elif name in REKEYED:
        config, params = load_pretrained(write_folder(golden, tmp_path / "theirs"))
    else:
        model.save_pretrained(tmp_path / "theirs")
        config, params = load_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(ours(config, params, ids), expected, rtol=0, atol=bound)
    if name in REFERENCES_WITHOUT_FAMILY or name in REFERENCES_HERE:
        return  # transformers has no class for these
    save_pretrained(tmp_path / "ours", config, params)
    again = load_by_transformers(tmp_path / "ours", model)
    np.testing.assert_allclose(references.logits(again, ids), expected, rtol=0, atol=bound)


LAYERS = {"F": "full_attention", "S": "sliding_attention"}
IRREGULAR = [(name, order) for name in ("olmo3", "gemma3") for order in ("SFSS", "SFSSS", "SFFF")]


@pytest.mark.parametrize(
    "name, changes",
    [
        *((name, {"layer_types": [LAYERS[x] for x in order]}) for name, order in IRREGULAR),
        ("gpt_oss", {"swiglu_alpha": 1.1}),
        ("nemotron_h", {"attention_bias": True}),  # which transformers ignores
        ("nemotron_h", {"tie_word_embeddings": True}),
    ],
)
def test_other_values_of_fields_have_their_logits(name, changes, tmp_path):
    """RoPE for each kind of layer in patterns without a period, and options of single fields."""
    if "layer_types" in changes:
        changes |= {"num_hidden_layers": len(changes["layer_types"])}
    model = references.build(name, seed=SEED, **changes)
    ids = references.tokens(model, LENGTH, source_length=SOURCE_LENGTH, batch=BATCH, seed=SEED)
    expected = references.logits(model, ids)
    bound = tolerance(name, expected)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(ours(config, params, ids), expected, rtol=0, atol=bound)
    save_pretrained(tmp_path / "ours", config, params)
    again = load_by_transformers(tmp_path / "ours", model)
    np.testing.assert_allclose(references.logits(again, ids), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name, kind", [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")])
def test_the_text_model_of_qwen_with_images(name, kind, tmp_path):
    text = references.build(name, seed=SEED)
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2}
    vision |= {"patch_size": 2, "num_position_embeddings": 16}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(),
        vision_config=vision | {"out_hidden_size": text.config.hidden_size},
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "theirs")
    ids = references.tokens(text, LENGTH, source_length=SOURCE_LENGTH, batch=BATCH, seed=SEED)
    expected = references.logits(text, ids)
    bound = tolerance(name, expected)
    config, params = load_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(ours(config, params, ids), expected, rtol=0, atol=bound)
    save_pretrained(tmp_path / "ours", config, params)
    again = load_by_transformers(tmp_path / "ours", text)
    np.testing.assert_allclose(references.logits(again, ids), expected, rtol=0, atol=bound)


def test_the_text_model_of_muse_glimmer(tmp_path):
    """The whole folder is read; what is written is the text model, without a head there."""
    text = references.build("muse_glimmer_text", seed=SEED)
    text.whole[0].save_pretrained(tmp_path / "theirs")
    ids = references.tokens(text, LENGTH, batch=BATCH, seed=SEED)
    expected = references.logits(text, ids)
    config, params = load_pretrained(tmp_path / "theirs")
    bound = tolerance("muse_glimmer_text", expected)
    np.testing.assert_allclose(ours(config, params, ids), expected, rtol=0, atol=bound)
    save_pretrained(tmp_path / "ours", config, params)
    again, info = type(text.model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert {name: [*x] for name, x in info.items() if x} == {"unexpected_keys": ["lm_head.weight"]}
    text.whole[0].model.language_model = again.eval()
    np.testing.assert_allclose(references.logits(text, ids), expected, rtol=0, atol=bound)


def load_by_transformers(folder, model):
    """What transformers makes of a folder that we wrote, without a word of complaint."""
    config = transformers.AutoConfig.from_pretrained(folder)  # several types have Llama's class
    is_own = config.model_type == model.config.model_type
    again, loading_info = type(model).from_pretrained(
        folder,
        **({"config": config} if is_own else {}),
        output_loading_info=True,
        attn_implementation=model.config._attn_implementation,
        experts_implementation="eager",
    )
    assert not {word: names for word, names in loading_info.items() if names}
    return again.eval()
