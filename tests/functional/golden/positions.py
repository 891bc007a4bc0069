"""Write positions.json beside this file from transformers; needs the parity extra.

python tests/functional/golden/positions.py
"""

import itertools
import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_neighbours
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

C = 8  # feature pairs in the scaling cases
LONG = {
    "short_factor": [1.0 + 0.1 * j for j in range(C)],
    "long_factor": [1.0 + 1.5 * j for j in range(C)],
}
# name: (maximum length in the config, current length, rope parameters)
SCALINGS = {
    "linear": (512, None, {"factor": 8.0}),
    "dynamic, short text": (64, 48, {"rope_type": "dynamic", "factor": 4.0}),
    "dynamic, long text": (64, 200, {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (
        512,
        None,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (8192, None, {"factor": 4.0, "original_max_position_embeddings": 2048}),
    "yarn, tiny": (256, None, {"factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn, exact": (
        8192,
        None,
        {
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
    "yarn, deepseek": (
        8192,
        None,
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "longrope, short text": (256, 64, {"original_max_position_embeddings": 64, **LONG}),
    "longrope, long text": (256, 65, {"original_max_position_embeddings": 64, **LONG}),
    "proportional": (512, None, {"factor": 2.0, "partial_rotary_factor": 0.5}),
}
BUCKETS = [(32, 128), (8, 14), (32, 20), (7, 50), (16, 16), (64, 1000), (2, 3), (4, 128)]


def llama(max_length, theta, parameters):
    return LlamaConfig(
        hidden_size=4 * 2 * C,
        num_attention_heads=4,
        head_dim=2 * C,
        max_position_embeddings=max_length,
        rope_parameters={"rope_theta": theta, **parameters},
    )


def scaling(name, theta=500.0):
    max_length, length, parameters = SCALINGS[name]
    kind = parameters.pop("rope_type", name.split(",")[0])
    config = llama(max_length, theta, {"rope_type": kind, **parameters})
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    return {
        "base": theta,
        "max_length": max_length,
        "length": length,
        "parameters": parameters,
        "frequencies": frequencies.tolist(),
        "attention_factor": float(attention_factor),
    }


def buckets(bidirectional, num_buckets, max_distance):
    relative = torch.arange(-2000, 2001)
    bucket_ids = T5Attention._relative_position_bucket(
        relative, bidirectional, num_buckets, max_distance
    )
    runs = [[int(b), len(list(run))] for b, run in itertools.groupby(bucket_ids.tolist())]
    return {
        "bidirectional": bidirectional,
        "num_buckets": num_buckets,
        "max_distance": max_distance,
        "runs": runs,
    }


def rotated():
    """Three positions, two heads of width 8, x = sin(0), sin(1), ..."""
    x = torch.sin(torch.arange(3 * 2 * 8, dtype=torch.float32)).reshape(1, 3, 2, 8)
    positions = torch.tensor([[0, 5, 1000]])
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, head_dim=8)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)
    halves, _ = rotate_halves(x, x, cos, sin, unsqueeze_dim=2)
    pairs = [torch.repeat_interleave(wave[..., :4], 2, dim=-1) for wave in (cos, sin)]
    neighbours, _ = rotate_neighbours(x, x, *pairs, unsqueeze_dim=2)
    # GPT-J with rotary_dim 4 of 8: the caller splits, and passes one number per pair.
    partial = torch.outer(positions[0].float(), 10_000.0 ** -torch.tensor([0.0, 0.5]))[None]
    turned = rotate_gptj(x[..., :4], torch.sin(partial), torch.cos(partial))
    gptj = torch.cat([turned, x[..., 4:]], dim=-1)
    return {
        "positions": positions[0].tolist(),
        "halves": halves[0].tolist(),
        "neighbours": neighbours[0].tolist(),
        "gptj": gptj[0].tolist(),
    }


def main():
    marian = MarianSinusoidalPositionalEmbedding(7, 6).create_weight()
    values = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "scalings": {name: scaling(name) for name in SCALINGS},
        "buckets": [
            buckets(bidirectional, *sizes)
            for bidirectional in (True, False)
            for sizes in BUCKETS
            if sizes[0] // (2 if bidirectional else 1) >= 2
        ],
        "slopes": {n: _get_alibi_slopes(n, "cpu").tolist() for n in (1, 2, 3, 8, 12, 20, 112)},
        "sinusoids": {
            "halves": marian.tolist(),
            "tensor2tensor": SinusoidalPositionalEmbedding.get_embedding(7, 6, None).tolist(),
        },
        "rotated": rotated(),
    }
    path = Path(__file__).with_name("positions.json")
    path.write_text(json.dumps(values, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
