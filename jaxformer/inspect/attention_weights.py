"""Attention weights of every layer and head."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.functional.decay import decay_weights, token_steps
from jaxformer.inspect.model_trace import (
    Params,
    apply_with_intermediates,
    as_int_tuple,
    attention_traces,
    check_inputs,
    head_stack,
)
from jaxformer.inspect.sizes import format_bytes
from jaxformer.layers import Transformer
from jaxformer.layers.attention.core import AttentionTrace
from jaxformer.layers.attention.decay import DecayTrace
from jaxformer.layers.stack import unstack_layers

MapKind = Literal["decoder", "encoder", "cross"]


class AttentionMaps(NamedTuple):
    """Attention weights; row t of a map are the weights of query t.

    Attributes:
        decoder: Self-attention of the decoder; None without a decoder.
        encoder: Self-attention of the encoder; None without an encoder.
        cross: Cross-attention of the decoder to the source; None without it.
    """

    decoder: Float32[Array, "layers *batch N T S"] | None = None
    encoder: Float32[Array, "layers *batch N T S"] | None = None
    cross: Float32[Array, "layers *batch N T S"] | None = None


class MapSelection(NamedTuple):
    """Selected layers, heads and queries; None is all."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    window: tuple[int, ...] | None


def attention_maps(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    window: Sequence[int] | None = None,
    parts: Sequence[MapKind] | None = None,
    max_bytes: int = 2**30,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> AttentionMaps:
    """Attention weights of the selected layers and heads.

        maps[l, n, t] = softmax(scale * query[t, n] @ key[:, n // (N // K)].T + bias[n, t])

    They are computed from the queries and keys of the forward pass, and do not depend on the
    attention implementation. Layers of `config.Decay` have no softmax: their weights are
    gain * gamma ** (t - s), without the rotation of the values.

    Memory includes the queries and keys of all layers, also unselected ones, and T x S numbers per
    layer for Transformer-XL positions; `max_bytes` counts neither.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids, of the decoder in an encoder-decoder.
        layers: Layers of each stack, counted from 0; None is all.
        heads: Query heads; None is all.
        window: First query and last query + 1; None is all. Keys are not selected.
        parts: Maps among "decoder", "encoder" and "cross"; None is all of the model.
        max_bytes: Maximum size of the result.
        dtype: Dtype of the computation up to the scores, which are float32.
        **inputs: Other arrays that the model takes: source, positions, segments, ...

    Returns:
        The maps. Rows of softmax attention sum to 1, or to 0 if all keys are masked; with sinks to
        less than 1.

    Raises:
        ValueError: A layer, head, query or part does not exist, or the maps exceed `max_bytes`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer import Transformer, inspect, zoo
        >>> config, tokens = zoo.get("llama-2-7b").tiny(), jnp.arange(5)
        >>> params = jax.jit(Transformer(config).init)(jax.random.key(0), tokens)["params"]
        >>> inspect.attention_maps(config, params, tokens, heads=(0, 2)).decoder.shape
        (2, 2, 5, 5)
    """
    tokens, inputs = check_inputs(config, tokens, inputs)
    choice = MapSelection(
        as_int_tuple("layers", layers), as_int_tuple("heads", heads), as_int_tuple("window", window)
    )
    lengths = _map_lengths(config, tokens, inputs)
    requested_parts = tuple(lengths) if parts is None else tuple(parts)
    if isinstance(parts, str) or not requested_parts or set(requested_parts) - set(lengths):
        raise ValueError(f"parts must be among {tuple(lengths)} for this model; got {parts!r}.")
    rows = tokens.size // tokens.shape[-1]
    total = sum(_check_and_count(config, part, lengths[part], choice) for part in requested_parts)
    _check_bytes(4 * rows * total, max_bytes, choice)
    maps = _compute_maps(
        Transformer(config, dtype=dtype), choice, requested_parts, params, tokens, inputs
    )
    return AttentionMaps(**maps)


def attention_entropy(
    maps: Float[Array, "layers *batch N T S"],
) -> Float32[Array, "layers *batch N T"]:
    """Entropy of each query's attention weights: 0 for one key, log n for n equal weights.

        entropy[t] = -sum over s of maps[t, s] * log(maps[t, s])

    Args:
        maps: Attention weights, such as `attention_maps(...).decoder`.

    Returns:
        Entropies in nats.

    Raises:
        ValueError: `maps` is an `AttentionMaps`, not one of its arrays.
    """
    if isinstance(maps, AttentionMaps):
        raise ValueError("Choose one part of the maps first, for example maps.decoder.")
    wide = maps.astype(jnp.float32)
    return -jnp.sum(jax.scipy.special.xlogy(wide, wide), axis=-1)


def _map_lengths(
    config: c.TransformerConfig, tokens: Array, inputs: dict[str, Array]
) -> dict[MapKind, tuple[int, int]]:
    """(queries, keys) of each kind of attention the model has."""
    num_tokens = tokens.shape[-1]
    lengths: dict[MapKind, tuple[int, int]] = {head_stack(config): (num_tokens, num_tokens)}
    if config.topology.is_encoder_decoder:
        source = inputs["source"].shape[-1]
        lengths |= {"encoder": (source, source), "cross": (num_tokens, source)}
    return lengths


def _check_and_count(
    config: c.TransformerConfig, part: MapKind, lengths: tuple[int, int], choice: MapSelection
) -> int:
    """Return elements per batch row of the selected maps; the selection must exist."""
    stack_config, depth = config.stacks["encoder" if part == "encoder" else "decoder"]
    layers = range(depth) if choice.layers is None else choice.layers
    kinds = {stack_config.layer(i).attention for i in layers if 0 <= i < depth}
    with_weights = [i for i in range(depth) if stack_config.layer(i).attention.has_weights]
    for kind in kinds:
        if not kind.has_weights:
            raise ValueError(
                f"{type(kind).__name__} computes no attention weights; layers of the {part} that "
                f"do are {with_weights}: select some by layers=(...)."
            )
    num_heads, *other_counts = sorted({kind.num_heads for kind in kinds}) or [0]
    if other_counts:
        raise ValueError(
            f"Layers have different numbers of heads ({num_heads} and {other_counts[0]}), so their "
            "maps cannot be stacked; select layers with one number by layers=(...)."
        )
    for name, selected, limit in (
        ("layers", choice.layers, depth),
        ("heads", choice.heads, num_heads),
    ):
        outside = [i for i in selected or () if not 0 <= i < limit]
        if outside or selected == ():
            raise ValueError(
                f"{name} of the {part} must be in [0, {limit - 1}]; got {selected}. "
                "To select other maps only, pass parts=(...)."
            )
    queries, keys = lengths
    if choice.window is not None:
        first, stop = (*choice.window, -1, -1)[:2]
        if len(choice.window) != 2 or not 0 <= first < stop <= queries:
            raise ValueError(
                f"window must be (first query, last query + 1) within the {queries} queries of the "
                f"{part}; got {choice.window}."
            )
        queries = stop - first
    of_layers = depth if choice.layers is None else len(choice.layers)
    return of_layers * (num_heads if choice.heads is None else len(choice.heads)) * queries * keys


def _check_bytes(needed: int, max_bytes: int, choice: MapSelection) -> None:
    """Check the size of the maps; the error suggests a smaller selection."""
    if needed <= max_bytes:
        return
    ways = {"layers": "layers=(0,)", "heads": "heads=(0, 1)", "window": "window=(0, 128)"}
    ways = {name: way for name, way in ways.items() if getattr(choice, name) is None}
    fewer = ", ".join(ways.values()) or "fewer layers, heads and queries"
    raise ValueError(
        f"These attention maps need {format_bytes(needed)}, but max_bytes is "
        f"{format_bytes(max_bytes)}. Select fewer, for example by {fewer}, or raise max_bytes to "
        f"{needed}."
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compute_maps(
    model: Transformer,
    choice: MapSelection,
    parts: tuple[MapKind, ...],
    params: Params,
    tokens: Array,
    inputs: dict[str, Array],
) -> dict[str, Array]:
    """The maps of each part."""
    _, intermediates = apply_with_intermediates(model, params, tokens, inputs)
    maps: dict[str, Array] = {}
    for part in parts:
        stack, branch = ("decoder", "cross_attention") if part == "cross" else (part, "attention")
        layers = unstack_layers(intermediates[stack])
        selected_layers = range(len(layers)) if choice.layers is None else choice.layers
        traces = (attention_traces(layers[i][branch]) for i in selected_layers)
        records = [
            next((x for x in layer if isinstance(x, AttentionTrace)), layer[0]) for layer in traces
        ]
        maps[part] = jnp.stack(
            [_layer_weights(layer_record, tokens, choice) for layer_record in records]
        )
    return maps


def _layer_weights(
    recorded: AttentionTrace | DecayTrace, tokens: Int[Array, "*batch time"], choice: MapSelection
) -> Float32[Array, "*batch N T S"]:
    """Attention weights of one layer for the selected heads and queries."""
    if isinstance(recorded, DecayTrace):
        return _decay_weights(recorded, tokens, choice)
    mask, bias, group = (
        recorded.mask,
        recorded.bias,
        recorded.query.shape[-2] // recorded.key.shape[-2],
    )
    query, key, sinks = recorded.query, recorded.key, recorded.sinks
    if choice.heads is not None:
        heads = jnp.asarray(choice.heads)
        query, key = query[..., heads, :], key[..., heads // group, :]
        sinks = None if sinks is None else sinks[heads]
        mask, bias = (_select_heads(x, query.ndim, heads) for x in (mask, bias))
    if choice.window is not None:
        rows = slice(*choice.window)
        query = query[..., rows, :, :]
        mask, bias = (_select_queries(x, rows) for x in (mask, bias))
    options = vars(recorded.score_options)
    return F.attention_weights(query, key, mask, bias, sinks=sinks, **options)


def _select_heads(mask_or_bias: Any, num_axes: int, heads: Int[Array, " n"]) -> Any:
    """Select heads of a mask or bias; one without a head axis is unchanged."""
    if isinstance(mask_or_bias, F.AttentionBias):
        return mask_or_bias.map_heads(
            lambda x, axis: x if axis is None else jnp.take(x, heads, axis)
        )
    if mask_or_bias is None or isinstance(mask_or_bias, F.AttentionMask):
        return mask_or_bias
    by_head = mask_or_bias.ndim >= num_axes or jnp.issubdtype(mask_or_bias.dtype, jnp.floating)
    return (
        mask_or_bias[..., heads, :, :] if by_head and mask_or_bias.shape[-3] > 1 else mask_or_bias
    )


def _select_queries(mask_or_bias: Any, rows: slice) -> Any:
    """Select queries of a mask or bias."""
    if mask_or_bias is None:
        return None
    if not isinstance(mask_or_bias, F.AttentionMask | F.AttentionBias):
        return mask_or_bias[..., rows, :] if mask_or_bias.shape[-2] > 1 else mask_or_bias
    mask_or_bias = mask_or_bias._replace(query_positions=mask_or_bias.query_positions[..., rows])
    if isinstance(mask_or_bias, F.AttentionMask) and mask_or_bias.query_segments is not None:
        mask_or_bias = mask_or_bias._replace(query_segments=mask_or_bias.query_segments[..., rows])
    return mask_or_bias


def _decay_weights(
    recorded: DecayTrace, tokens: Int[Array, "*batch time"], choice: MapSelection
) -> Float32[Array, "*batch N T S"]:
    """Decay weights times the gain."""
    rates = recorded.rates
    if choice.heads is not None:
        rates = F.DecayRates(*(rate[jnp.asarray(choice.heads)] for rate in rates))
    rows = slice(None) if choice.window is None else slice(*choice.window)
    decay_matrix = decay_weights(
        rates.gamma, token_steps(tokens[..., None, None], recorded.segments, None), rows
    )
    shape = (*tokens.shape[:-1], *decay_matrix.shape[-3:])
    return jnp.broadcast_to(decay_matrix, shape) * jnp.broadcast_to(
        rates.gain[:, None, None], shape
    )
