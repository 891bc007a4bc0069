"""Write basics.json: what torch and transformers compute for norms, activations, losses, sampling.

Run with the parity extra installed: python tests/functional/golden/basics.py
Made with torch 2.13 and transformers 5.23.
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as tf
from transformers import activations, generation

RNG = np.random.default_rng(0)


def draw(*shape, scale=1.0):
    return torch.tensor(np.round(scale * RNG.normal(size=shape), 4), dtype=torch.float32)


def norms():
    x, scale, bias = draw(2, 3, 7), 1 + draw(7, scale=0.1), draw(7)
    return {
        "x": x,
        "scale": scale,
        "bias": bias,
        "layer_norm": tf.layer_norm(x, (7,), scale, bias),
        "rms_norm": tf.rms_norm(x, (7,), scale, eps=1e-6),
    }


def batch_norm():
    first, second = 2 + draw(3, 5, 2), 3 * draw(3, 5, 2)
    module = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        module.weight.copy_(1 + draw(2, scale=0.1))
        module.bias.copy_(draw(2))
        outputs = [module(x.mT).mT for x in (first, second)]
        statistics = [module.running_mean.clone(), module.running_var.clone()]
        evaluated = module.eval()(first.mT).mT
    return {
        "first": first,
        "second": second,
        "scale": module.weight,
        "bias": module.bias,
        "outputs": outputs,
        "running": statistics,
        "evaluated": evaluated,
    }


def elementwise():
    x = torch.tensor([-30.0, -4.0, -1.7, -0.75, -0.1, 0.0, 0.1, 0.5, 1.0, 2.3, 5.0, 30.0])
    return {
        "x": x,
        "relu": tf.relu(x),
        "relu_squared": activations.ACT2FN["relu2"](x),
        "sigmoid": torch.sigmoid(x),
        "silu": tf.silu(x),
        "gelu": tf.gelu(x),
        "gelu_tanh": tf.gelu(x, approximate="tanh"),
        "quick_gelu": activations.ACT2FN["quick_gelu"](x),
        "glu": tf.glu(torch.cat([x.flip(0), x])),
    }


def losses():
    logits = draw(2, 3, 11, scale=3.0)
    targets = torch.tensor([[0, 10, 4], [7, 7, 2]])
    rows, ids = logits.reshape(-1, 11), targets.reshape(-1)
    ignored = ids.clone()
    ignored[[1, 5]] = -100
    return {
        "logits": logits,
        "targets": targets,
        "per_token": tf.cross_entropy(rows, ids, reduction="none"),
        "smoothed": tf.cross_entropy(rows, ids, label_smoothing=0.1),
        "ignoring_1_and_5": tf.cross_entropy(rows, ignored, label_smoothing=0.1),
    }


def sampling():
    logits = draw(3, 13, scale=2.0)
    tokens = torch.tensor([[1, 1, 4, 12], [0, 3, 3, 5], [12, 11, 10, 9]])
    processors = {
        "temperature_0.7": generation.TemperatureLogitsWarper(0.7),
        "top_k_4": generation.TopKLogitsWarper(4),
        "top_p_0.6": generation.TopPLogitsWarper(0.6),
        "top_p_0.9": generation.TopPLogitsWarper(0.9),
        "top_p_0.01": generation.TopPLogitsWarper(0.01),
        "min_p_0.1": generation.MinPLogitsWarper(0.1),
        "repetition_1.3": generation.RepetitionPenaltyLogitsProcessor(1.3),
    }
    results = {name: process(tokens, logits.clone()) for name, process in processors.items()}
    return {"logits": logits, "tokens": tokens, **results}


def plain(value):
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.detach().numpy().tolist()


if __name__ == "__main__":
    makers = [norms, batch_norm, elementwise, losses, sampling]
    golden = {make.__name__: plain(make()) for make in makers}
    Path(__file__).with_suffix(".json").write_text(json.dumps(golden, indent=None) + "\n")
