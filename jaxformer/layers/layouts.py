"""How the layers of a decoder lie in memory: stacked for `nn.scan`, or each by itself.

The parameters say which; a model computes the same from both. In a scan over layers, XLA for CPUs
and GPUs (not for TPUs) copies each layer's parameters out of the stacked arrays for every token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer import config as c
from jaxformer.functional.platforms import target_platform

LAYER_GROUPS = "first_layers", "layers", "tail"  # parts of a stack, in order
STACKED_LAYERS = "decoder/layers/"
MAX_COMPILED_LAYERS = 100  # each adds 0.2 to 0.4 s to compilation, on two CPU cores
Layout = Literal["stacked", "by_layer"]


def layout_of(params: Any) -> Layout:
    """Layout of a model's parameters, or of a tree of their structure."""
    decoder = params.get("decoder", {})
    return "by_layer" if "first_layers" in decoder and "layers" not in decoder else "stacked"


def decoding_layout(config: c.TransformerConfig) -> Layout:
    """The layout that decodes faster here, if its layers compile in less than a minute."""
    layers = config.invocations.get("decoder", ())
    if target_platform() == "tpu" or len(layers) > MAX_COMPILED_LAYERS:
        return "stacked"
    repeats = layers and config.segments("decoder").repeats > 1
    return "by_layer" if repeats else "stacked"


def segments_of(
    config: c.TransformerConfig, stack: c.Stack, layout: Layout, *, by_invocation: bool = False
) -> c.Segments:
    """The parts of a stack in this layout; an encoder is always stacked.

    `by_invocation` is that of `TransformerConfig.segments`.
    """
    if layout == "by_layer" and stack == "decoder":
        layers = config.invocations[stack] if by_invocation else config.layers
        return c.Segments(len(layers), 0, 0, 0)
    return config.segments(stack, by_invocation=by_invocation)


def split_layers(
    config: c.TransformerConfig,
    arrays: Mapping[str, Any],
    take: Callable[[Any, int], Any] | None = None,
) -> dict[str, Any]:
    """Return parameters by layer, from some of the stacked ones.

    Args:
        config: The model.
        arrays: Parameters by path, such as "decoder/layers/layer_0/attention/query/kernel".
        take: From a stacked parameter and an index to a layer's part; None slices arrays.

    Returns:
        Each layer's part of parameters that are stacked over layers; the other ones themselves.
    """
    take = _take_layer if take is None else take
    return {
        part: take(arrays[path], i) if path.startswith(STACKED_LAYERS) else arrays[path]
        for path, parts in _parts_by_path(config, arrays).items()
        for i, part in enumerate(parts)
    }


def arrange_layers(
    config: c.TransformerConfig, params: Any, layout: Layout, *, donate: bool = False
) -> Any:
    """Return the parameters in a layout.

    Args:
        config: The model.
        params: Its parameters, in either layout.
        layout: Layout of the result.
        donate: Whether to delete each array of `params` once its copy is complete, so that memory
            for two models is not needed.
    """
    if layout_of(params) == layout:
        return params
    arrays, arranged = flatten_dict(params, sep="/"), dict[str, Any]()
    uses = Counter(map(id, arrays.values()))  # two paths may share an array
    for path, parts in _parts_by_path(config, arrays).items():
        is_stacked = path.startswith(STACKED_LAYERS)
        if layout == "by_layer":
            sources = [arrays[path]]
            result = split_layers(config, {path: arrays[path]})
        else:
            sources = [arrays[part] for part in parts]
            result = {path: _stack(*sources) if is_stacked else sources[0]}
        arranged |= result
        if donate and is_stacked:
            uses.subtract(map(id, sources))
            jax.block_until_ready(result)
            for array in sources:
                if not uses[id(array)] and _is_concrete(array) and not array.is_deleted():
                    array.delete()
    return unflatten_dict(arranged, sep="/")


def _parts_by_path(config: c.TransformerConfig, paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths of parameters in the stacked layout, with the paths of their parts by layer.

    `paths` are of either layout.
    """
    segments, blocks = config.segments("decoder"), dict[str, list[str]]()
    for layer in range(config.num_layers):
        block, _ = segments.locate(layer)
        blocks.setdefault(f"decoder/{block}", []).append(f"decoder/first_layers/layer_{layer}")
    block_of = {layer: block for block, layers in blocks.items() for layer in layers}
    parts = dict[str, list[str]]()
    for path in paths:
        *names, name = path.split("/", 3)
        block = block_of.get(module := "/".join(names), module)
        parts[f"{block}/{name}"] = [f"{layer}/{name}" for layer in blocks.get(block, [block])]
    return parts


@jax.jit
def _take_layer(array: Any, index: Any) -> Any:
    """One layer's part of a stacked array, by one program for all layers."""
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


@jax.jit
def _stack(*layers: Any) -> Any:
    return jnp.stack(layers)


def _is_concrete(array: Any) -> bool:
    """Whether an array has memory to delete; NumPy's is freed by itself."""
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def unstack_layers(stack: Any) -> list[Any]:
    """Return one tree per layer from parameters or intermediates of a stack.

    Args:
        stack: Parameters of a stack, such as `params["decoder"]`, or a tree of the same structure:
            repetitions of the pattern are stacked under "layers", other layers are under
            "first_layers" and "tail".

    Returns:
        A tree for each layer, in order.
    """

    def in_order(layers: dict[str, Any]) -> list[Any]:
        return [layers[f"layer_{i}"] for i in range(len(layers))]

    pattern = in_order(stack.get("layers", {}))
    repeats = jax.tree.leaves(pattern)[0].shape[0] if pattern else 0
    return [
        *in_order(stack.get("first_layers", {})),
        *(jax.tree.map(lambda x, i=i: x[i], layer) for i in range(repeats) for layer in pattern),
        *in_order(stack.get("tail", {})),
    ]
