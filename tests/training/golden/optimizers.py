"""Write optimizers.json: a matrix after each of five updates by torch's optimizers.

Run with the parity extra installed: python tests/training/golden/optimizers.py
Made with torch 2.13.
"""

import json
from pathlib import Path

import numpy as np
import torch

RNG = np.random.default_rng(0)
START = np.round(RNG.normal(size=(7, 3)), 3).tolist()
GRADIENTS = np.round(RNG.normal(size=(5, 7, 3)), 3).tolist()

# torch orthogonalises in bfloat16; float32 shows the algorithm.
torch.Tensor.bfloat16 = torch.Tensor.clone


def run(make):
    x = torch.nn.Parameter(torch.tensor(START))
    optimizer, steps = make([x]), []
    for gradient in GRADIENTS:
        x.grad = torch.tensor(gradient)
        optimizer.step()
        steps.append(x.tolist())
    return steps


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.03, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.7),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.7, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.03),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.03, weight_decay=0.2),
    "muon": lambda p: torch.optim.Muon(
        p, lr=0.03, momentum=0.8, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    ),
}

golden = {
    "start": START,
    "gradients": GRADIENTS,
    **{name: run(make) for name, make in OPTIMIZERS.items()},
}
Path(__file__).with_suffix(".json").write_text(json.dumps(golden) + "\n")
