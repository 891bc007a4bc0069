"""How a model knows where a token stands, as arrays to draw."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.inspect.trace import Params, stacks_of
from jaxformer.layers.embedding import Embedder
from jaxformer.layers.guide import frequencies
from jaxformer.layers.mode import Mode


def added_positions(
    config: c.TransformerConfig, params: Params, length: int
) -> Float[Array, "T D"]:
    """What the embedding adds at positions 0 to length - 1: a sinusoid or a learned table.

    Args:
        config: The model.
        params: Its parameters.
        length: How many positions.

    Returns:
        A row for each position.

    Raises:
        ValueError: The embedding adds nothing, or its table has fewer rows.
    """
    if config.embedding.positions is None:
        kinds = ", ".join(sorted({type(p).__name__ for p in config.attention.positions}))
        raise ValueError(f"This model adds no positions to its embedding; attention has {kinds}.")
    positions = jnp.arange(length)
    if config.max_length is not None:
        F.check_positions(positions, config.max_length)
    embedder = Embedder(config, config.vocab_size, Mode())
    placed = embedder.apply({"params": params["embedding"]}, positions, method="place")
    return jnp.asarray(placed)


def rotation_angles(
    config: c.TransformerConfig, length: int, *, layer: int = 0
) -> Float32[Array, "T C"]:
    """By how much rotary positions turn each feature pair, in radians, full turns included.

        angle[t, i] = t * frequency[i]

    with frequencies stretched as the configuration says, for a text of this length.

    Args:
        config: The model.
        length: How many positions.
        layer: Of the decoder, or of an encoder that stands alone.

    Returns:
        An angle for each position and pair.

    Raises:
        ValueError: The layer has no rotary positions, or does not exist.
    """
    rope = _positions(config, layer)
    if not isinstance(rope, c.Rope):
        raise ValueError(f"Layer {layer} has no rotary positions to draw; it has {rope}.")
    per_token = frequencies(rope, config.attention.rotary_dim, jnp.asarray(length))
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), per_token)


def position_bias(
    config: c.TransformerConfig,
    params: Params,
    length: int,
    *,
    layer: int = 0,
    stack: str = "decoder",
) -> Float[Array, "N T T"]:
    """What ALiBi or T5 buckets add to the scores of each head.

    Args:
        config: The model.
        params: Its parameters; ALiBi has none and takes {}.
        length: How many queries and keys, from 0 on.
        layer: Of the stack.
        stack: "decoder" or "encoder".

    Returns:
        The bias of each head, query and key; a causal mask is not part of it.

    Raises:
        ValueError: The layer has no such bias, or does not exist.
    """
    stacks = stacks_of(config)
    if stack not in stacks:
        raise ValueError(f"stack is one of {', '.join(stacks)} in this model; got {stack!r}.")
    own, at = stacks[stack][0], jnp.arange(length)
    match kind := _positions(config, layer, stack):
        case c.Alibi(scale=scale):
            return F.AlibiRule(at, at, scale * F.alibi_slopes(own.attention.num_heads)).whole()
        case c.T5Bias(max_distance=distance):
            table = jnp.asarray(params[stack]["relative_bias"]["embedding"])
            sorting = F.Buckets(bidirectional=stack == "encoder", max_distance=distance)
            return F.BucketRule(at, at, table, sorting).whole()
    raise ValueError(f"Layer {layer} of the {stack} adds no bias by position; it has {kind}.")


def score_by_distance(
    config: c.TransformerConfig, length: int, *, params: Params | None = None, layer: int = 0
) -> Float32[Array, "heads T"]:
    """How the score of a query falls with the distance of its key, by positions alone.

        rotary     mean over feature pairs of cos(distance * frequency), 1 for pairs not turned:
                   the score of a query and a key that are equal, in units of that at distance 0
        ALiBi, T5  the bias

    Args:
        config: The model.
        length: How many distances, from 0 on.
        params: Its parameters, where the bias is learned.
        layer: Of the decoder, or of an encoder that stands alone.

    Returns:
        One row for all heads (rotary), or one for each.

    Raises:
        ValueError: The layer has no positions that change scores by distance, or does not exist.

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
        arXiv:2104.09864, section 3.4.3 (decay with distance)
    """
    match _positions(config, layer):
        case c.Rope() as rope:
            width = config.attention.rotary_dim
            turned = rope.width(width) / width
            cosines = jnp.cos(rotation_angles(config, length, layer=layer))
            return (turned * jnp.mean(cosines, axis=-1) + 1 - turned)[None]
        case c.Alibi() | c.T5Bias():
            stack = next(reversed(stacks_of(config)))
            bias = position_bias(config, params or {}, length, layer=layer, stack=stack)
            return bias[:, -1, ::-1].astype(jnp.float32)  # of the last query, from itself back
        case kind:
            raise ValueError(f"Layer {layer} has no score that follows from distance; got {kind}.")


def _positions(
    config: c.TransformerConfig, layer: int, stack: str | None = None
) -> c.Positions | None:
    """The positions of a layer; by default of the stack that the head reads."""
    own, depth = stacks_of(config)[stack or next(reversed(stacks_of(config)))]
    if not 0 <= layer < depth:
        raise ValueError(f"Layers are counted from 0 to {depth - 1}; got layer={layer}.")
    return own.layer(layer).positions
