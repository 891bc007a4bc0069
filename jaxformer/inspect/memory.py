"""How long the layers without a softmax remember: decays of their states."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int

from jaxformer import config as c
from jaxformer.inspect.model_trace import (
    Arrays,
    Params,
    apply_with_intermediates,
    as_int_tuple,
    attention_traces,
    check_inputs,
)
from jaxformer.layers import Transformer
from jaxformer.layers.attention.core import AttentionTrace
from jaxformer.layers.attention.decay import DecayTrace
from jaxformer.layers.layouts import unstack_layers


class StateMemory(NamedTuple):
    """Decays of the states of recurrent layers, and what they remember.

    Attributes:
        layers: Numbers of the layers.
        decay: Factor of the state before each token; over features of a key, or over the state of a
            feature, their geometric mean.
        tokens: Memory of each head, 1 / (1 - geometric mean of the decays); infinite without decay.
    """

    layers: tuple[int, ...]
    decay: Float32[Array, "layers *batch T N"]
    tokens: Float32[Array, "layers N"]


def state_memory(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    layers: int | tuple[int, ...] | None = None,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> StateMemory:
    """How fast the states of linear attention, selective scans and `config.Decay` decay.

        memory[n] = 1 / (1 - exp(mean over tokens of log decay[t, n]))

    Where attention has maps, these layers have a state; a token is forgotten after about as many
    tokens as the memory says.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        layers: Layers, counted from 0; None is every layer of these kinds.
        dtype: Dtype of the computation up to the decays, which are float32.
        **inputs: Other arrays that the model takes: positions, segments, ...

    Returns:
        The layers, their decays and memories.

    Raises:
        ValueError: There is no such layer, or layers have different numbers of heads.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dataclasses import replace
        >>> from jaxformer import Transformer, inspect, zoo
        >>> from jaxformer.config import LinearAttention
        >>> attention = LinearAttention(num_heads=4, num_key_heads=2, key_dim=8, value_dim=8)
        >>> config = replace(zoo.get("llama-2-7b").tiny(), attention=attention)
        >>> tokens = jnp.arange(5)
        >>> params = jax.jit(Transformer(config).init)(jax.random.key(0), tokens)["params"]
        >>> inspect.state_memory(config, params, tokens).decay.shape
        (2, 5, 4)
    """
    arrays = check_inputs(config, tokens, inputs)
    layer_kinds = (layer.attention.parts for layer in config.layers)
    kinds: list[Any] = [next((x for x in parts if x.has_decays), parts[0]) for parts in layer_kinds]
    recurrent = [i for i, x in enumerate(kinds) if x.has_decays]
    selected = as_int_tuple("layers", layers)
    selected = tuple(recurrent) if selected is None else selected
    if not selected or set(selected) - set(recurrent):
        raise ValueError(
            f"layers must be among {recurrent}, those with a state that decays; got {selected}."
        )
    heads = sorted({kinds[i].num_heads for i in selected})
    if len(heads) > 1:
        raise ValueError(
            f"Layers have different numbers of heads, {heads}; select layers with one number by "
            "layers=(...)."
        )
    log_decay = _log_decays(Transformer(config, dtype=dtype), selected, params, arrays)
    token_axes = tuple(range(1, log_decay.ndim - 1))
    memory = 1 / jnp.abs(jnp.expm1(jnp.mean(log_decay, axis=token_axes)))
    return StateMemory(selected, jnp.exp(log_decay), memory)


@partial(jax.jit, static_argnums=(0, 1))
def _log_decays(
    model: Transformer, layers: tuple[int, ...], params: Params, arrays: Arrays
) -> Float32[Array, "layers *batch T N"]:
    _, intermediates = apply_with_intermediates(model, params, arrays)
    every = unstack_layers(intermediates["decoder"])
    traces = (attention_traces(every[i]["attention"]) for i in layers)
    records = (next(x for x in layer if not isinstance(x, AttentionTrace)) for layer in traces)
    return jnp.stack([_log_decay(record, arrays["tokens"]) for record in records])


def _log_decay(recorded: Any, tokens: Array) -> Float32[Array, "*batch T N"]:
    """Logarithms of a layer's decays, of every token."""
    if isinstance(recorded, DecayTrace):
        logs = jnp.log(recorded.rates.gamma)
        return jnp.broadcast_to(logs, (*tokens.shape, *logs.shape))
    logs = recorded.log_decay
    return logs if logs.ndim == tokens.ndim + 1 else jnp.mean(logs, axis=-1)
