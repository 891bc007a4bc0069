"""Position encodings as arrays to plot: added embeddings, rotation angles, score biases."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.checks import require_count
from jaxformer.inspect.model_trace import Params, head_stack
from jaxformer.inspect.sizes import check_bytes
from jaxformer.layers.attention.score_bias import bind_score_bias
from jaxformer.layers.embedding import Embedder
from jaxformer.layers.layouts import unstack_layers
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.runtime import RuntimeConfig


def position_embeddings(
    config: c.TransformerConfig, params: Params, length: int
) -> Float[Array, "T D"]:
    """Position embeddings added at positions 0 to length - 1 (sinusoidal or learned).

    Args:
        config: The model.
        params: The parameters.
        length: Number of positions.

    Returns:
        One row per position.

    Raises:
        ValueError: The embedding adds no positions, `length` is below 1 or above the learned
            positions, or the parameters do not match the model.
    """
    if config.embedding.positions is None:
        kinds = tuple(dict.fromkeys(layer.positions for layer in config.layers))
        raise ValueError(f"The embedding adds no positions; the attention layers have {kinds}.")
    require_count("length", length)
    check_parameters(config, params)
    positions = jnp.arange(length)
    if config.max_length is not None:
        F.check_positions(positions, config.max_length)
    embedder = Embedder(config, config.vocab_size, RuntimeConfig(adapter=config.adapter))
    placed = embedder.apply({"params": params["embedding"]}, positions, method="embed_positions")
    return jnp.asarray(placed)


def rotation_angles(
    config: c.TransformerConfig, length: int, *, layer: int = 0, stack: c.Stack | None = None
) -> Float32[Array, "T C"]:
    """RoPE angle of each position and feature pair, in radians.

        angle[t, i] = t * frequency[i]

    with the frequencies of the layer's RoPE scaling at this length.

    Args:
        config: The model.
        length: Number of positions.
        layer: Index of the layer in the stack.
        stack: "decoder" or "encoder"; None is the stack before the head.

    Returns:
        Angles in radians.

    Raises:
        ValueError: The layer has no RoPE or does not exist, or `length` is below 1.
    """
    layer_config = _layer_config(config, layer, stack)
    require_count("length", length)
    rope = layer_config.rope
    if rope is None:
        raise ValueError(f"Layer {layer} has no RoPE; its positions are {layer_config.positions}.")
    head_dim = layer_config.attention.main.rope_head_dim
    per_token = rope.frequencies(head_dim, jnp.asarray(length))
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), per_token)


def position_bias(
    config: c.TransformerConfig,
    params: Params,
    length: int,
    *,
    layer: int = 0,
    stack: c.Stack | None = None,
    max_bytes: int = 2**30,
) -> Float[Array, "N T T"]:
    """Bias that positions add to the attention scores (ALiBi, T5, ...).

    Args:
        config: The model.
        params: The parameters; {} for ALiBi, which has none.
        length: Number of queries and keys, at positions from 0.
        layer: Index of the layer in the stack.
        stack: "decoder" or "encoder"; None is the stack before the head.
        max_bytes: Maximum size of the result.

    Returns:
        The bias of each head, query and key, without the causal mask.

    Raises:
        ValueError: The layer has no score bias or does not exist, the result exceeds `max_bytes`,
            `length` is below 1, or the parameters do not match the model.
    """
    require_count("length", length)
    heads = _with_score_bias(config, layer, stack).attention.main.num_heads
    positions = jnp.arange(length)
    what = f"The bias of {heads} heads between {length:,} tokens needs"
    advice = "Use a shorter length or score_by_distance, which is linear in it"
    check_bytes(what, 4 * heads * int(length) ** 2, max_bytes, advice)
    return _bias_between(config, params, positions, positions, layer, stack)


def _bias_between(
    config: c.TransformerConfig,
    params: Params,
    queries: Int[Array, " T"],
    keys: Int[Array, " S"],
    layer: int,
    stack: c.Stack | None,
) -> Float[Array, "N T S"]:
    """Score bias between these query and key positions."""
    stack = stack or head_stack(config)
    layer_config = _with_score_bias(config, layer, stack)
    kind: Any = layer_config.score_bias
    heads = layer_config.attention.main.num_heads
    learned: Params = {}
    if kind.parameters(heads):
        if stack not in params:
            raise ValueError(
                f"The bias of {type(kind).__name__} is learned; pass the model's parameters, "
                "params=."
            )
        check_parameters(config, params)
        shared, layers = params[stack], unstack_layers(params[stack])
        learned = (shared if kind.shared_across_layers else layers[layer])["relative_bias"]
    causal = stack != "encoder"
    return bind_score_bias(kind, learned, heads, queries, keys, causal=causal).materialize()


def score_by_distance(
    config: c.TransformerConfig,
    length: int,
    *,
    params: Params | None = None,
    layer: int = 0,
    stack: c.Stack | None = None,
) -> Float32[Array, "heads T"]:
    """Effect of distance on the attention score, from positions alone.

        RoPE       mean over feature pairs of cos(distance * frequency), 1 for unrotated pairs: the
                   score of equal query and key with pairs of equal norm, relative to distance 0
        a bias     the bias, for the last query

    Args:
        config: The model.
        length: Number of distances, from 0.
        params: The parameters, for a learned bias.
        layer: Index of the layer in the stack.
        stack: "decoder" or "encoder"; None is the stack before the head.

    Returns:
        One row for all heads (RoPE), or one per head.

    Raises:
        ValueError: The layer has neither RoPE on both queries and keys nor a score bias, or does
            not exist, `length` is below 1, or the parameters do not match the model.

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.4.3 (a bound that decreases with distance)
    """
    layer_config = _layer_config(config, layer, stack)
    require_count("length", length)
    attention, rope = layer_config.attention.main, layer_config.rope
    if rope is not None and {"q", "k"} <= set(rope.targets):
        rotated_fraction = rope.rotary_dim(attention.rope_head_dim) / attention.key_dim
        cosines = jnp.cos(rotation_angles(config, length, layer=layer, stack=stack))
        return (rotated_fraction * jnp.mean(cosines, axis=-1) + 1 - rotated_fraction)[None]
    if layer_config.score_bias is not None:
        distances = length - 1 - jnp.arange(length)  # from the last token to the first
        bias = _bias_between(config, params or {}, distances[:1], distances, layer, stack)
        return bias[:, 0].astype(jnp.float32)
    raise ValueError(
        f"Layer {layer} has no score that depends on distance alone; its positions are "
        f"{layer_config.positions}."
    )


def _with_score_bias(config: c.TransformerConfig, layer: int, stack: c.Stack | None) -> c.Layer:
    """Options of one layer of a stack, which has a score bias."""
    stack = stack or head_stack(config)
    layer_config = _layer_config(config, layer, stack)
    if layer_config.score_bias is None:
        raise ValueError(
            f"Layer {layer} of the {stack} has no position bias; its positions are "
            f"{layer_config.positions}."
        )
    return layer_config


def _layer_config(config: c.TransformerConfig, layer: int, stack: c.Stack | None) -> c.Layer:
    """Options of one layer of a stack."""
    stacks = config.stacks
    if stack is not None and stack not in stacks:
        raise ValueError(f"stack must be among {', '.join(stacks)} for this model; got {stack!r}.")
    layers = stacks[stack or head_stack(config)]
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer must be in [0, {len(layers) - 1}]; got {layer}.")
    return layers[layer]
