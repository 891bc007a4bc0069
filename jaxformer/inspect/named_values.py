"""Names of a model's intermediate values, their shapes, and where layers sow them."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer import config as c
from jaxformer.inspect.model_trace import Arrays, Params, apply_with_intermediates, head_stack
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import unstack_layers
from jaxformer.parallel import abstract_parameters

STACK_VALUES: dict[str, tuple[str, ...]] = {
    "embeddings": ("stack_input",),
    "final_normed": ("stack_output",),
}
BRANCHES = (
    *("attention", "cross_attention", "feed_forward", "parallel_branches"),
    *("layer_embedding", "ngram_embedding"),
)
READERS = *BRANCHES[:3], "branches", "layer", "layer_embedding"
LAYER_VALUES: dict[str, tuple[str, ...]] = {
    "stream": ("residual_stream",),
    **{name: (f"from_{name}",) for name in BRANCHES},
    **{f"read_by_{name}": (f"read_by_{name}",) for name in READERS},
    "query": ("attention", "attention_trace", "query"),
    "key": ("attention", "attention_trace", "key"),
    "value": ("attention", "attention_trace", "value"),
    "heads": ("attention", "out", "heads"),
    "cross_query": ("cross_attention", "attention_trace", "query"),
    "cross_key": ("cross_attention", "attention_trace", "key"),
    "cross_value": ("cross_attention", "attention_trace", "value"),
    "cross_heads": ("cross_attention", "out", "heads"),
    "hidden": ("feed_forward", "down", "hidden"),
    "shared_hidden": ("feed_forward", "shared", "down", "hidden"),
}
ENCODER = "encoder/"  # before the names of the encoder of an encoder-decoder
OF_SOURCE = "cross_key", "cross_value"
Layer = int | None  # None of a value outside the layers


class ValueName(NamedTuple):
    """A value that `run` records and patches.

    Attributes:
        name: Its name.
        layers: The layers that have it with this shape; None of a value outside the layers.
        shape: Its shape without batch axes: "T" tokens or "S" source tokens, heads, features.
    """

    name: str
    layers: tuple[int, ...] | None
    shape: tuple[str | int, ...]


class ModelRun(NamedTuple):
    """Logits of a run, and the values that it recorded.

    Attributes:
        logits: Logits of each token.
        values: By name and layer, arrays `[*batch, T, features]` or `[*batch, T, heads, features]`;
            a value outside the layers has layer None.
    """

    logits: Float[Array, "*batch T V"]
    values: dict[str, dict[Layer, Float[Array, "..."]]]


def names(config: c.TransformerConfig) -> tuple[ValueName, ...]:
    """Names of the values that `run` records and patches, with their layers and shapes.

    `embeddings`, `stream`, `final_normed` and the branches are as in `ResidualTrace`. Of a
    residual option with several streams, `stream` has them as an axis like heads, `stream_0` and
    others are each of them, and `read_by_attention` and others are what a branch reads of them.
    `query`, `key` and `value` are what a mixer reads, after RoPE; `heads` is what its output
    projection reads, `hidden` the neurons of a dense feed-forward. Names of an encoder-decoder's
    encoder start with "encoder/". Custom mixers and routed experts have no values but their branch.

    Args:
        config: The model.

    Returns:
        A row for each name and shape.

    Example:
        >>> from jaxformer import inspect, zoo
        >>> inspect.names(zoo.get("llama-2-7b").tiny())[-3]
        ValueName(name='heads', layers=(0, 1), shape=('T', 4, 16))
    """
    rows: list[ValueName] = []
    for name, by_layer in value_shapes(config).items():
        length = "S" if is_of_source(name) else "T"
        for shape in dict.fromkeys(by_layer.values()):
            layers = tuple(i for i, x in by_layer.items() if i is not None and x == shape)
            rows.append(ValueName(name, layers or None, (length, *shape)))
    return tuple(rows)


def is_of_source(name: str) -> bool:
    """Whether the value has a vector for each source token."""
    return name.startswith(ENCODER) or name in OF_SOURCE


@cache
def value_shapes(config: c.TransformerConfig) -> dict[str, dict[Layer, tuple[int, ...]]]:
    """Shape of each value by name and layer, without batch axes and tokens."""
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32)
    texts = ("tokens", "source") if config.topology.is_encoder_decoder else ("tokens",)

    def record(params: Params, arrays: Arrays) -> Any:
        _, intermediates = apply_with_intermediates(Transformer(config), params, arrays)
        return named_values(config, intermediates)

    shapes = abstract_parameters(config, None), dict.fromkeys(texts, tokens)
    values = jax.eval_shape(record, *shapes)
    in_order = ("embeddings", *LAYER_VALUES, "final_normed")
    ordered = [prefix + name for prefix in (ENCODER, "") for name in in_order]
    return {
        name: {layer: x.shape[1:] for layer, x in values[name].items()}
        for name in (*ordered, *values)
        if name in values
    }


def shapes_of(config: c.TransformerConfig, name: str) -> dict[Layer, tuple[int, ...]]:
    """Shape of a value in each layer that has it.

    Raises:
        ValueError: The model has no value of this name.
    """
    shapes = value_shapes(config)
    if name not in shapes:
        raise ValueError(f"The model has no value {name!r}; it has {', '.join(shapes)}.")
    return shapes[name]


def names_with_heads(config: c.TransformerConfig) -> list[str]:
    """Names of the values that have a heads axis."""
    return [name for name, x in value_shapes(config).items() if len(next(iter(x.values()))) == 2]


def named_values(config: c.TransformerConfig, intermediates: Any) -> dict[str, dict[Layer, Array]]:
    """Select the named values from sown intermediates."""
    values: dict[str, dict[Layer, Array]] = {}
    for stack in config.stacks:
        prefix = "" if stack == head_stack(config) else ENCODER
        layers = unstack_layers(intermediates[stack])
        for name, path in STACK_VALUES.items():
            values[prefix + name] = {None: _follow(intermediates[stack], path)}
        streams = {name: (name,) for x in layers for name in x if name.startswith("stream_")}
        for name, path in (LAYER_VALUES | streams).items():
            layer_values: dict[Layer, Any] = {i: _follow(x, path) for i, x in enumerate(layers)}
            if by_layer := {i: x for i, x in layer_values.items() if x is not None}:
                values[prefix + name] = by_layer
    return values


def _follow(tree: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of keys and attributes, or None."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else getattr(tree, part, None)
    return tree


def path_of(config: c.TransformerConfig, name: str) -> tuple[c.Stack, tuple[str, ...], str | None]:
    """Stack of a value, its path in a layer or the stack, and the field of what is sown there."""
    stack: c.Stack = "encoder" if name.startswith(ENCODER) else head_stack(config)
    own_name = name.removeprefix(ENCODER)
    *path, last = (STACK_VALUES | LAYER_VALUES).get(own_name, (own_name,))
    sown_alone = not path or path[-1] != "attention_trace"
    return (stack, (*path, last), None) if sown_alone else (stack, tuple(path), last)
