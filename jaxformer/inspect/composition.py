"""How strongly heads read what earlier heads write, from the weights alone."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxformer import config as c
from jaxformer.inspect.model_trace import Params, head_stack
from jaxformer.layers import merge_lora
from jaxformer.layers.block import POST_BRANCH_NORMS
from jaxformer.layers.layouts import unstack_layers
from jaxformer.layers.parameter_metadata import check_parameters

Matrices = tuple[Float[Array, "N D H"], Float[Array, "N H D"]]  # a product, D x D, for each head


class CompositionScores(NamedTuple):
    """Composition scores of each pair of heads, [writing head, reading head].

    Attributes:
        heads: Names of the heads, "layer.head".
        query: How much the queries of a head read of another head; 0 unless it is in a later layer.
        key: How much its keys read.
        value: How much its values read.
    """

    heads: tuple[str, ...]
    query: Float32[Array, "heads heads"]
    key: Float32[Array, "heads heads"]
    value: Float32[Array, "heads heads"]


def composition_scores(config: c.TransformerConfig, params: Params) -> CompositionScores:
    """Q-, K- and V-composition of the heads of the stack before the LM head.

        query   |OV_1 @ QK_2|   / (|OV_1| |QK_2|)         OV = W_value @ W_out
        key     |OV_1 @ QK_2.T| / (|OV_1| |QK_2|)         QK = W_query @ W_key.T
        value   |OV_1 @ OV_2|   / (|OV_1| |OV_2|)

    with Frobenius norms, and scales of norms multiplied into the matrices. Independent random
    matrices score about 1 / sqrt(model_dim), which the paper subtracts. Positions, biases, norms
    of heads and gates are left out. It exists for `config.MultiHead` and `config.SharedKV`, and of
    `config.Decay` for values. Heads of other kinds have projections that are not linear and are
    left out, as are heads that read keys and values of an earlier layer (`cross_layer_kv`).

    Args:
        config: The model.
        params: The parameters.

    Returns:
        The scores.

    Raises:
        ValueError: No layer has such heads, or the parameters do not match the model.

    References:
        Elhage et al., A Mathematical Framework for Transformer Circuits, 2021 (attention head
        composition)
    """
    check_parameters(config, params)
    config, params = merge_lora(config, params)
    kinds: dict[int, Any] = {i: x.attention for i, x in enumerate(config.layers)}
    linear = {i: kind for i, kind in kinds.items() if kind.linear_projections is not None}
    if not linear:
        raise ValueError(
            "Composition scores exist for MultiHead, SharedKV and Decay; the model has "
            f"{', '.join(sorted({type(x).__name__ for x in kinds.values()}))}."
        )
    names = tuple(f"{i}.{head}" for i, kind in linear.items() for head in range(kind.num_heads))
    return CompositionScores(names, *_all_scores(config, tuple(linear), params))


@partial(jax.jit, static_argnums=(0, 1))
def _all_scores(
    config: c.TransformerConfig, numbers: tuple[int, ...], params: Params
) -> list[Float32[Array, "heads heads"]]:
    """Scores of the heads of these layers: of queries, keys and values."""
    layers = unstack_layers(params[head_stack(config)])
    circuits = [_circuits(config, config.layers[i], layers[i]) for i in numbers]
    heads = [len(one["value"][0]) for one in circuits]
    of_layer = jnp.repeat(jnp.array(numbers), jnp.array(heads), total_repeat_length=sum(heads))
    scores = []
    for name in ("query", "key", "value"):
        rows = [
            jnp.concatenate([_pair_scores(one["value"], two[name]) for two in circuits], axis=1)
            for one in circuits
        ]
        scores.append(jnp.where(of_layer[:, None] < of_layer[None], jnp.concatenate(rows), 0.0))
    return scores


def _circuits(config: c.TransformerConfig, options: c.Layer, layer: Params) -> dict[str, Matrices]:
    """What queries, keys and values of a layer read, each as two factors of its matrix."""
    kind: Any = options.attention
    attention, reads_normed = layer["attention"], options.norm_placement in ("pre", "sandwich")
    before = layer.get("pre_attention_norm", layer.get("pre_norm", {}))
    after = layer.get("post_attention_norm", layer.get("post_norm", {}))

    def scaled(x: Array, option: c.Norm, norm: Params, axis: int) -> Array:
        """Multiply the model axis by the scale of a norm, and centre it as LayerNorm does."""
        if "scale" in norm:
            scale = jnp.asarray(norm["scale"], jnp.float32) + option.scale_offset
            x = x * jnp.broadcast_to(scale[:, None, None] if axis == 0 else scale, x.shape)
        return x - jnp.mean(x, axis, keepdims=True) if option.subtracts_mean else x

    def read(name: str | None) -> Float[Array, "N D H"]:
        if name is None:
            return jnp.zeros((kind.num_heads, config.model_dim, 1))
        kernel = jnp.asarray(attention[name]["kernel"], jnp.float32)
        kernel = scaled(kernel, config.norm, before, 0) if reads_normed else kernel
        return jnp.moveaxis(jnp.repeat(kernel, kind.num_heads // kernel.shape[1], axis=1), 1, 0)

    out = jnp.asarray(attention["out"]["kernel"], jnp.float32)
    if options.norm_placement in POST_BRANCH_NORMS:
        out = scaled(out, config.post_norm or config.norm, after, 2)
    query, key, value = map(read, kind.linear_projections)
    return {"query": (query, key.mT), "key": (key, query.mT), "value": (value, out)}


def _pair_scores(writers: Matrices, readers: Matrices) -> Float32[Array, "writers readers"]:
    """Norm of each product of two matrices D x D, over the product of their norms."""
    between = jnp.einsum("ahd,bdk->abhk", writers[1], readers[0])
    first, last = writers[0].mT @ writers[0], readers[1] @ readers[1].mT
    squares = jnp.einsum("abhk,ahi,abij,bjk->ab", between, first, between, last)
    one = jnp.sum(first * (writers[1] @ writers[1].mT), axis=(1, 2))
    two = jnp.sum(last * (readers[0].mT @ readers[0]), axis=(1, 2))
    return jnp.sqrt(jnp.maximum(squares, 0.0) / jnp.outer(one, two))
