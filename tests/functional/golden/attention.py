"""Write attention.npz beside this file from torch and transformers; needs the parity extra.

python tests/functional/golden/attention.py
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

B, T, S, K, G, H, HV = 2, 5, 7, 3, 2, 11, 13
N = K * G
torch.manual_seed(0)


def normal(*shape):
    return torch.randn(shape, requires_grad=True)


# torch puts heads in front of time
query, key, value, output_gradient = (
    normal(B, N, T, H),
    normal(B, K, S, H),
    normal(B, K, S, HV),
    normal(B, N, T, HV),
)
mask = torch.rand(B, T, S) < 0.6
mask[..., 0] = True  # torch answers a query without keys with NaN
bias = torch.randn(N, T, S)
golden = {"query": query, "key": key, "value": value, "output_gradient": output_gradient}
golden["full"] = scaled_dot_product_attention(query, key, value, enable_gqa=True)
forbidden = torch.where(mask, 0.0, -torch.inf)[:, None]
golden["masked"] = scaled_dot_product_attention(
    query, key, value, attn_mask=forbidden + bias, scale=0.2, enable_gqa=True
)
golden["masked"].backward(output_gradient)
for name in ("query", "key", "value"):
    golden[f"{name}_gradient"] = golden[name].grad
module = SimpleNamespace(num_key_value_groups=G, training=False)
capped, weights = eager_attention_forward(
    module, 3 * query, key, value, forbidden, scaling=0.2, softcap=2.0
)
saved = {name: array.detach().transpose(1, 2) for name, array in golden.items()}
saved |= {"capped": capped, "capped_weights": weights, "mask": mask, "bias": bias}

layer = torch.nn.MultiheadAttention(3 * 8, 3, batch_first=True)
x = torch.randn(B, T, 24)
causal = torch.ones(T, T, dtype=torch.bool).tril()
y, weights = layer(x, x, x, attn_mask=~causal, average_attn_weights=False)
saved |= {"x": x, "mha": y, "mha_weights": weights}
saved |= {name: parameter.detach() for name, parameter in layer.named_parameters()}

window = sliding_window_causal_mask_function(3)
positions = torch.arange(11)
saved["window_3"] = window(0, 0, positions[:, None], positions[None, :])

arrays = {
    name.replace(".", "_"): np.asarray(array.detach().contiguous()) for name, array in saved.items()
}
np.savez_compressed(Path(__file__).with_suffix(".npz"), **arrays)
