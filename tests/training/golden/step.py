"""Write step.json: three AdamW updates computed without the train step.

The gradient is `jax.grad` of the mean over the whole batch; AdamW is written out in float64 numpy
with the decay on kernels alone.

Run: PYTHONPATH=. python tests/training/golden/step.py
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

from jaxformer import functional as F
from jaxformer.config import MLP, LayerNorm, MultiHead, TransformerConfig, to_json
from jaxformer.layers import Transformer

RATE, B1, B2, EPS, DECAY = 0.01, 0.9, 0.95, 1e-8, 0.1

config = TransformerConfig(
    vocab_size=31,
    model_dim=14,
    num_layers=2,
    attention=MultiHead(num_heads=2, num_kv_heads=1, head_dim=6),
    feed_forward=(MLP(hidden_dim=11, bias=True),),
    norm=LayerNorm(),
)

rng = np.random.default_rng(0)
ROWS, T = 5, 7
batch = {
    "tokens": rng.integers(0, 31, (ROWS, T)),
    "targets": rng.integers(0, 31, (ROWS, T)),
    "positions": np.tile([0, 1, 2, 0, 1, 2, 3], (ROWS, 1)),
    "segments": np.tile([1, 1, 1, 2, 2, 2, 2], (ROWS, 1)),
    "loss_mask": np.arange(T) < np.array([[7], [1], [4], [0], [6]]),
}


def start(path, x):
    """Parameters from their name and shape alone."""
    wave = np.cos(np.arange(x.size) * 0.7 + len(keystr(path))).reshape(x.shape)
    return 0.3 * wave + float(path[-1].key == "scale")


model = Transformer(config)
shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))
params = tree_map_with_path(start, shapes["params"])


@jax.jit
def loss_and_gradient(params):
    def loss(params):
        inputs = {name: batch[name] for name in ("positions", "segments")}
        logits = model.apply({"params": params}, batch["tokens"], **inputs)
        return F.cross_entropy(logits, batch["targets"], mask=batch["loss_mask"])

    return jax.value_and_grad(loss)(params)


def narrow(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def clipped(gradient, norm):
    return jax.tree.map(lambda g: np.asarray(g, np.float64) * min(1, 1 / norm), gradient)


def adamw(n, params, mean, square):
    def updated(path, x, m, v):
        decay = DECAY * x if path[-1].key == "kernel" else 0.0
        return x - RATE * (m / (1 - B1**n) / (np.sqrt(v / (1 - B2**n)) + EPS) + decay)

    return tree_map_with_path(updated, params, mean, square)


mean = jax.tree.map(np.zeros_like, params)
square = jax.tree.map(np.zeros_like, params)
steps = []
for n in (1, 2, 3):
    loss, gradient = loss_and_gradient(narrow(params))
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradient)))
    gradient = clipped(gradient, norm)
    mean = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mean, gradient)
    square = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, square, gradient)
    params = adamw(n, params, mean, square)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    entries = {keystr(p, simple=True, separator="/"): x.ravel()[:3].tolist() for p, x in leaves}
    steps.append({"loss": float(loss), "gradient_norm": float(norm), "entries": entries})

golden = {
    "config": json.loads(to_json(config)),
    "batch": {name: rows.tolist() for name, rows in batch.items()},
    "optimizer": {"peak": RATE, "b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY},
    "steps": steps,
}
Path(__file__).with_suffix(".json").write_text(json.dumps(golden) + "\n")
