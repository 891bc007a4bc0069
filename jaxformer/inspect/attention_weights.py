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
    Arrays,
    Params,
    apply_with_intermediates,
    as_int_tuple,
    attention_traces,
    check_inputs,
    head_stack,
)
from jaxformer.inspect.sizes import check_bytes
from jaxformer.layers import Transformer
from jaxformer.layers.attention.core import AttentionTrace
from jaxformer.layers.attention.decay import DecayTrace
from jaxformer.layers.layouts import unstack_layers

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
    gain * gamma ** (t - s), which leaves out the rotation R.

    Memory includes the queries and keys of all layers, also unselected ones, and T x S numbers per
    layer for Transformer-XL positions; `max_bytes` counts neither.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids, of the decoder in an encoder-decoder.
        layers: Layers of each stack, counted from 0; None is all.
        heads: Query heads; None is all.
        window: First query and last query + 1; None is all. Keys are not selected.
        parts: Maps among "decoder", "encoder" and "cross"; None is all it has.
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
    arrays = check_inputs(config, tokens, inputs)
    choice = MapSelection(
        as_int_tuple("layers", layers), as_int_tuple("heads", heads), as_int_tuple("window", window)
    )
    lengths = _map_lengths(config, arrays)
    requested_parts = tuple(lengths) if parts is None else tuple(parts)
    if isinstance(parts, str) or not requested_parts or set(requested_parts) - set(lengths):
        raise ValueError(f"parts must be among {tuple(lengths)} for this model; got {parts!r}.")
    rows = arrays["tokens"].size // arrays["tokens"].shape[-1]
    total = sum(_check_and_count(config, part, lengths[part], choice) for part in requested_parts)
    ways = zip(choice, ("layers=(0,)", "heads=(0, 1)", "window=(0, 128)"), strict=True)
    fewer = ", ".join(way for selected, way in ways if selected is None)
    advice = f"Select fewer, for example by {fewer or 'fewer layers, heads and queries'}"
    check_bytes("These attention maps need", 4 * rows * total, max_bytes, advice)
    model = Transformer(config, dtype=dtype)
    return AttentionMaps(**_compute_maps(model, choice, requested_parts, params, arrays))


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


def _map_lengths(config: c.TransformerConfig, arrays: Arrays) -> dict[MapKind, tuple[int, int]]:
    """(queries, keys) of each kind of attention the model has."""
    num_tokens = arrays["tokens"].shape[-1]
    lengths: dict[MapKind, tuple[int, int]] = {head_stack(config): (num_tokens, num_tokens)}
    if config.topology.is_encoder_decoder:
        source = arrays["source"].shape[-1]
        lengths |= {"encoder": (source, source), "cross": (num_tokens, source)}
    return lengths


def _check_and_count(
    config: c.TransformerConfig, part: MapKind, lengths: tuple[int, int], choice: MapSelection
) -> int:
    """Return elements per batch row of the selected maps; the selection must exist."""
    stack = config.stacks["encoder" if part == "encoder" else "decoder"]
    layers = range(len(stack)) if choice.layers is None else choice.layers
    kinds = {stack[i].attention.main for i in layers if 0 <= i < len(stack)}
    with_weights = [i for i, layer in enumerate(stack) if layer.attention.main.has_weights]
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
    ranges = ("layers", choice.layers, len(stack)), ("heads", choice.heads, num_heads)
    for name, selected, limit in ranges:
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
    heads = range(num_heads) if choice.heads is None else choice.heads
    return len(layers) * len(heads) * queries * keys


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compute_maps(
    model: Transformer,
    choice: MapSelection,
    parts: tuple[MapKind, ...],
    params: Params,
    arrays: Arrays,
) -> dict[str, Array]:
    """The maps of each part."""
    _, intermediates = apply_with_intermediates(model, params, arrays)
    maps: dict[str, Array] = {}
    for part in parts:
        stack, branch = ("decoder", "cross_attention") if part == "cross" else (part, "attention")
        layers = unstack_layers(intermediates[stack])
        selected_layers = range(len(layers)) if choice.layers is None else choice.layers
        traces = (attention_traces(layers[i][branch]) for i in selected_layers)
        records = (next((x for x in t if isinstance(x, AttentionTrace)), t[0]) for t in traces)
        maps[part] = jnp.stack([_layer_weights(x, arrays["tokens"], choice) for x in records])
    return maps


def _layer_weights(
    recorded: AttentionTrace | DecayTrace, tokens: Int[Array, "*batch time"], choice: MapSelection
) -> Float32[Array, "*batch N T S"]:
    """Attention weights of one layer for the selected heads and queries."""
    if isinstance(recorded, DecayTrace):
        return _decay_weights(recorded, tokens, choice)
    query, key, sinks = recorded.query, recorded.key, recorded.sinks
    mask, bias = recorded.mask, recorded.bias
    if choice.heads is not None:
        heads, group = jnp.asarray(choice.heads), query.shape[-2] // key.shape[-2]
        query, key = query[..., heads, :], key[..., heads // group, :]
        sinks = None if sinks is None else sinks[heads]
        mask, bias = (_select_heads(x, query.ndim, heads) for x in (mask, bias))
    if choice.window is not None:
        rows = slice(*choice.window)
        query = query[..., rows, :, :]
        mask, bias = (_select_queries(x, rows) for x in (mask, bias))
    options = vars(recorded.score_options)
    return F.attention_weights(query, key, mask, bias, sinks=sinks, **options)


def _select_heads(x: Any, num_axes: int, heads: Int[Array, " n"]) -> Any:
    """Select heads of a mask or bias; one without a head axis is unchanged."""
    if isinstance(x, F.AttentionBias):
        return x.map_heads(lambda part, axis: part if axis is None else part.take(heads, axis))
    if x is None or isinstance(x, F.AttentionMask):
        return x
    by_head = x.ndim >= num_axes or jnp.issubdtype(x.dtype, jnp.floating)
    return x[..., heads, :, :] if by_head and x.shape[-3] > 1 else x


def _select_queries(x: Any, rows: slice) -> Any:
    """Select queries of a mask or bias."""
    if x is None:
        return None
    if not isinstance(x, F.AttentionMask | F.AttentionBias):
        return x[..., rows, :] if x.shape[-2] > 1 else x
    x = x._replace(query_positions=x.query_positions[..., rows])
    if isinstance(x, F.AttentionMask) and x.query_segments is not None:
        x = x._replace(query_segments=x.query_segments[..., rows])
    return x


def _decay_weights(
    recorded: DecayTrace, tokens: Int[Array, "*batch time"], choice: MapSelection
) -> Float32[Array, "*batch N T S"]:
    """Decay weights times the gain."""
    rates = recorded.rates
    if choice.heads is not None:
        rates = F.DecayRates(*(rate[jnp.asarray(choice.heads)] for rate in rates))
    rows = slice(None) if choice.window is None else slice(*choice.window)
    steps = token_steps(tokens[..., None, None], recorded.segments, None)
    decays = decay_weights(rates.gamma, steps, rows)
    shape = (*tokens.shape[:-1], *decays.shape[-3:])
    gain = jnp.broadcast_to(rates.gain[:, None, None], shape)
    return jnp.broadcast_to(decays, shape) * gain
