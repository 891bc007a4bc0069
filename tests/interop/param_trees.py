"""Builds parameter trees from tensors with other names."""

import numpy as np


def stack_layers(config, layers):
    """One tree per layer, as the leading axis and the tail that a stack's parameters have."""
    _, period, repeats, rest = config.segments(next(iter(config.stacks)))

    def joined(trees):
        if not isinstance(trees[0], dict):
            return np.stack(trees)
        return {name: joined([tree[name] for tree in trees]) for name in trees[0]}

    out = {}
    if repeats:
        whole = layers[: repeats * period]
        out["layers"] = {f"layer_{i}": joined(whole[i::period]) for i in range(period)}
    if rest:
        out["tail"] = {f"layer_{i}": tree for i, tree in enumerate(layers[-rest:])}
    return out


def norm(tensors, name):
    """Scale, and bias where there is one."""
    out = {"scale": tensors[f"{name}.weight"]}
    if f"{name}.bias" in tensors:
        out["bias"] = tensors[f"{name}.bias"]
    return out


def linear(tensors, name, *, transposed=True):
    """Kernel from inputs to outputs, and bias where there is one."""
    kernel = tensors[f"{name}.weight"]
    out = {"kernel": kernel.T if transposed else kernel}
    if f"{name}.bias" in tensors:
        out["bias"] = tensors[f"{name}.bias"]
    return out


def split_heads(config, *, out, **projections):
    """Split the kernels of query, key and value, and that of the output, into heads."""
    n, h = config.attention.num_heads, config.attention.head_dim
    tree = {
        name: {leaf: x.reshape(*x.shape[:-1], n, h) for leaf, x in projections[name].items()}
        for name in ("query", "key", "value")
    }
    kernel = out["kernel"]
    return tree | {"out": out | {"kernel": kernel.reshape(n, h, kernel.shape[-1])}}


def split_qkv(fused):
    """Query, key and value of one projection, side by side in that order."""
    parts = {leaf: np.split(x, 3, axis=-1) for leaf, x in fused.items()}
    return {
        name: {leaf: parts[leaf][i] for leaf in parts}
        for i, name in enumerate(("query", "key", "value"))
    }
