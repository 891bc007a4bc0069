"""Write shared_kv.npz beside this file from transformers' DeepSeek V4; needs the parity extra.

python -m tests.layers.golden.shared_kv

It holds the attention of a layer with a window alone, which has neither compressed keys nor a
choice among them: one vector a token for key and value, normalised, turned in part, and the output
turned back. Its sinks are set so low that no weight goes to them.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

NO_SINK = -1e4
EPS = 1e-12  # so small that the norm of the query's latent goes under in that of the query


@torch.no_grad()
def attention(seed, *, length=9, batch=2, heads=4, head_dim=8, rotated=4, window=4, dim=12):
    """Parameters, inputs and outputs of one layer, as numpy arrays."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(
        hidden_size=dim,
        num_attention_heads=heads,
        head_dim=head_dim,
        partial_rotary_factor=rotated / head_dim,
        q_lora_rank=6,
        o_groups=2,
        o_lora_rank=5,
        sliding_window=window,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        rms_norm_eps=EPS,
    )
    config._attn_implementation = "eager"
    layer = v4.DeepseekV4Attention(config, 0).eval()
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape)
        if name == "sinks":
            parameter.fill_(NO_SINK)
        elif "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    x, places = torch.randn(batch, length, dim), torch.arange(length)[None]
    distance = places[0, :, None] - places[0]
    mask = torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None]
    turned = {"main": v4.DeepseekV4RotaryEmbedding(config)(x, places, layer_type="main")}
    y, _ = layer(x, turned, places, mask)
    arrays = {name: parameter.numpy() for name, parameter in layer.named_parameters()}
    sizes = {"heads": heads, "head_dim": head_dim, "rotated": rotated, "window": window}
    return arrays | {"x": x.numpy(), "y": y.numpy()} | sizes


if __name__ == "__main__":
    arrays = attention(0)
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **arrays)
    print({name: np.shape(x) for name, x in arrays.items()})
