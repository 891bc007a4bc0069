"""Write golden/*.npz from torch and transformers; needs the extra parity.

python -m tests.interop.make_golden [names]

A file holds `config` (the folder's config.json), `layout` (JSON: name on disk to shape), `weights`
(all tensors in that order, as signed bytes: 64 times the values), and for inputs 0, 1, ...
`tokens_0`, `source_0` where there is an encoder, and `logits_0`.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.interop.references.build import (
    NAMES,
    STEPS_PER_UNIT,
    TORCH_MODELS,
    build,
    logits,
    tokens,
)

GOLDEN = Path(__file__).parent / "golden"
LENGTH, SOURCE_LENGTH = 13, 9
# These choose their frequencies by length: once below their threshold, once above.
LENGTHS = {"llama_dynamic": (7, 13), "phi3_longrope": (7, 13), "ref_phi3_small": (20,)}
UNUSED = (
    *("mask_emb", "seg_embed", "r_s_bias"),  # parameters of XLNet that plain text never meets
    # tables of MiniMax, which follow from its configuration
    *("self_attn.slope_rate", "query_decay", "key_decay", "diagonal_decay"),
    *("act_fn.beta", "act_fn.eps"),  # of xIELU, which are not learned
)


def folder(name, model):
    """What a folder of this model holds: its config, and its tensors by their names on disk."""
    if name in TORCH_MODELS:
        config = model.config
        config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        return config, model.state_dict()
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        config = json.loads(Path(path, "config.json").read_text())
        tensors = load_file(Path(path, "model.safetensors"))
    return qwen1(config, tensors) if name == "qwen1_14b" else (config, tensors)


def qwen1(config, tensors):
    """A Qwen 2 folder under the names of the first Qwen."""
    layers = {
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
    }
    top = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    out = {"lm_head.weight": tensors["lm_head.weight"]}
    for new, old in ((f"{b}.weight", f"{a}.weight") for a, b in top.items()):
        out[new] = tensors[old]
    for i in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{i}.", f"transformer.h.{i}."
        for a, b in layers.items():
            out[f"{new}{b}.weight"] = tensors[f"{old}{a}.weight"]
        for leaf in ("weight", "bias"):
            parts = [tensors[f"{old}self_attn.{name}_proj.{leaf}"] for name in "qkv"]
            out[f"{new}attn.c_attn.{leaf}"] = torch.cat(parts)
    heads, d = config["num_attention_heads"], config["hidden_size"]
    return {
        "model_type": "qwen",
        "vocab_size": config["vocab_size"],
        "hidden_size": d,
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "kv_channels": d // heads,
        "intermediate_size": 2 * config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
    }, out


def golden(name):
    """The arrays of one file."""
    model = build(name)
    config, tensors = folder(name, model)
    tensors = {
        key: x.float().numpy()
        for key, x in tensors.items()
        if not key.endswith("embed_positions.weight") or name.startswith(("opt", "biogpt"))
        if not any(part in key for part in UNUSED)
    }
    steps = {key: x * STEPS_PER_UNIT for key, x in tensors.items()}
    inexact = [key for key, x in steps.items() if (x != x.astype(np.int8)).any()]
    if inexact:
        raise ValueError(f"{name}: not whole numbers of steps of 1/{STEPS_PER_UNIT}: {inexact}")
    arrays = {
        "config": json.dumps(config),
        "layout": json.dumps({key: x.shape for key, x in tensors.items()}),
        "weights": np.concatenate([x.astype(np.int8).ravel() for x in steps.values()]),
    }
    for i, length in enumerate(LENGTHS.get(name, (LENGTH,))):
        ids = tokens(model, length, source_length=SOURCE_LENGTH, seed=i)
        if "decoder_input_ids" in ids:
            arrays[f"source_{i}"] = ids["input_ids"].numpy().astype(np.int8)
        target = ids.get("decoder_input_ids", ids["input_ids"])
        arrays[f"tokens_{i}"] = target.numpy().astype(np.int8)
        arrays[f"logits_{i}"] = logits(model, ids)
    return arrays


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.disable_progress_bar()
    GOLDEN.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for name in sys.argv[1:] or NAMES:
        arrays = golden(name)
        np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
        size = (GOLDEN / f"{name}.npz").stat().st_size
        spread = np.abs(arrays["logits_0"])
        print(f"{name:20} {size:6} bytes, |logits| {spread.mean():.2f} up to {spread.max():.2f}")
