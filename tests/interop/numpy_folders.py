"""Small Hugging Face folders written with numpy alone."""

import json

import numpy as np
from safetensors.numpy import save_file

from jaxformer.interop.families import FAMILIES
from jaxformer.interop.load import build_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 11,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": 1,
    "attention_dropout": 0.1,
}

SIZES = {
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config_from_fields(kind, **fields):
    """The configuration of a model_type with these fields; None leaves one out."""
    values = {name: x for name, x in {**SIZES, **fields}.items() if x is not None}
    return build_config(FAMILIES[kind], {"model_type": kind, **values}, where="here")


def llama_shapes(config=LLAMA):
    """Names and shapes that a llama's file has."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    k = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.self_attn.q_proj.weight": (q, d),
            f"{layer}.self_attn.k_proj.weight": (k, d),
            f"{layer}.self_attn.v_proj.weight": (k, d),
            f"{layer}.self_attn.o_proj.weight": (d, q),
            f"{layer}.post_attention_layernorm.weight": (d,),
            f"{layer}.mlp.gate_proj.weight": (f, d),
            f"{layer}.mlp.up_proj.weight": (f, d),
            f"{layer}.mlp.down_proj.weight": (d, f),
        }
    return shapes


def random_tensors(shapes, dtype=np.float32, seed=0):
    """Values for these shapes."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder, config, tensors, shards=1):
    """Write config.json and safetensors, as the safetensors library does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
