"""What each head and branch adds to a logit directly."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Integer

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.generation.prompts import pad_right
from jaxformer.inspect.model_trace import (
    Arrays,
    Params,
    apply_with_intermediates,
    as_id_array,
    check_inputs,
    head_stack,
)
from jaxformer.inspect.named_values import BRANCHES, named_values
from jaxformer.layers import RuntimeConfig, Transformer, merge_lora
from jaxformer.layers.block import POST_BRANCH_NORMS
from jaxformer.layers.embedding import LMHead
from jaxformer.layers.layouts import unstack_layers

TINY = 1e-15


class LogitAttribution(NamedTuple):
    """Parts of the logit of each token; their sum is the logit.

    Attributes:
        embeddings: Part of the token embedding.
        heads: Part of each head; 0 in layers without `heads`, in layers with a norm after the sum
            of parallel branches, and beyond a layer's heads.
        branches: Parts of the branches by name; of `attention`, what its heads do not account for,
            such as the bias of the output projection.
        bias: Part of the biases of the final norm and the LM head.
        logit: The logit, before a soft cap.
    """

    embeddings: Float32[Array, "*batch T"]
    heads: Float32[Array, "layers *batch T N"]
    branches: dict[str, Float32[Array, "layers *batch T"]]
    bias: Float32[Array, "*batch T"]
    logit: Float32[Array, "*batch T"]


def logit_attribution(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    right: int | Integer[Array, "*any"],
    wrong: int | Integer[Array, "*any"] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> LogitAttribution:
    """Direct attribution of a logit, or of a difference of two, to embedding, heads and branches.

        logit[t] = sum over parts of norm(part)[t] @ head[:, right[t]]

    with the statistics of the final norm, and of norms after branches, taken from the run, so that
    norms are linear. It exists where the stream is a sum and the head is linear: not with
    `norm_placement` "post", a custom residual connection, a loop, or a transform of the head.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids.
        right: Token id whose logit is taken, one or an array that broadcasts to `tokens`.
        wrong: Token id whose logit is subtracted; None subtracts nothing.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        The parts of each token's logit.

    Raises:
        ValueError: The stream is not a sum, the head is not linear, or an id is outside the
            vocabulary.

    References:
        Elhage et al., A Mathematical Framework for Transformer Circuits, 2021 (path expansion);
        Wang et al., Interpretability in the Wild, 2022. arXiv:2211.00593, section 3
    """
    is_post = any(layer.norm_placement == "post" for layer in config.layers)
    if is_post or config.residual is not None or config.loop is not None:
        how = f"a norm follows each sum (norm_placement={config.norm_placement!r})"
        if config.loop is not None:
            how = f"its layers run {config.loop.passes} times"
        if config.residual is not None:
            how = f"branches are joined by {type(config.residual).__name__}"
        raise ValueError(f"The residual stream is not the sum of its parts: {how}.")
    if config.head.transform is not None:
        raise ValueError(f"The LM head is not linear: it has a transform, {config.head.transform}.")
    config, params = merge_lora(config, params)
    arrays = check_inputs(config, tokens, inputs)
    ids = []
    for name, value in (("right", right), ("wrong", wrong)):
        if value is not None:
            each = as_id_array(name, jnp.asarray(value)[None])[0]
            ids.append(jnp.broadcast_to(each, arrays["tokens"].shape))
            F.check_token_ids(ids[-1], config.vocab_size)
    return _attribute(Transformer(config, dtype=dtype), params, arrays, tuple(ids))


@partial(jax.jit, static_argnums=0)
def _attribute(
    model: Transformer, params: Params, arrays: Arrays, ids: tuple[Array, ...]
) -> LogitAttribution:
    config, stack = model.config, head_stack(model.config)
    _, intermediates = apply_with_intermediates(model, params, arrays)
    trees = unstack_layers(params[stack]), named_values(config, intermediates)
    layers, values = jax.tree.map(lambda x: x.astype(jnp.float32), trees)
    signs = jnp.array([1.0, -1.0])[: len(ids)]
    select = jnp.einsum("i,i...v->...v", signs, jax.nn.one_hot(jnp.stack(ids), config.vocab_size))
    runtime = RuntimeConfig()
    head = LMHead(replace(config, head=replace(config.head, softcap=None, masked_ids=())), runtime)
    table = params["embedding"]["tokens"]["embedding"].astype(jnp.float32)

    def logit(x: Array) -> Array:
        logits: Any = head.apply({"params": params.get("head", {})}, x, table)
        return jnp.sum(logits * select, axis=-1)

    normed = values["final_normed"][None]
    direction = jax.grad(lambda x: jnp.sum(logit(x)))(normed)  # the head is linear
    bias = logit(jnp.zeros_like(normed))
    if config.final_norm:
        norm = params[stack].get("final_norm", {})
        if "bias" in norm:
            bias += jnp.sum(direction * jnp.broadcast_to(norm["bias"], direction.shape), axis=-1)
        stream = values["stream"][len(layers) - 1]
        direction = _before_norm(config.last_norm or config.norm, norm, stream, direction)

    def part(x: Array, direction: Array = direction) -> Array:
        return jnp.sum(x * direction, axis=-1)

    scalars = jnp.stack([layer.get("layer_scalar", jnp.ones(1))[0] for layer in layers])
    factors = jnp.cumprod(scalars[::-1])[::-1]  # of what enters the stream in each layer
    shape, branches = arrays["tokens"].shape, {}
    for name in BRANCHES:
        if by_layer := values.get(name):
            parts = [
                factor * part(by_layer[i]) if i in by_layer else jnp.zeros(shape)
                for i, factor in enumerate(factors)
            ]
            branches[name] = jnp.stack(parts)
    heads = [jnp.zeros((*shape, 0))] * len(layers)
    for i in values.get("heads", {}).keys() & values.get("attention", {}).keys():
        placement = config.layers[i].norm_placement
        onward = factors[i] * direction
        heads[i] = _head_parts(config, placement, layers[i], values["heads"][i], onward)
    most = max(x.shape[-1] for x in heads)
    padded = jnp.stack([pad_right(x, most) for x in heads])
    if "attention" in branches:
        branches["attention"] -= jnp.sum(padded, axis=-1)
    embeddings = factors[0] * part(values["embeddings"][None])
    return LogitAttribution(embeddings, padded, branches, bias, logit(normed))


def _head_parts(
    config: c.TransformerConfig, norm_placement: str, layer: Params, heads: Array, direction: Array
) -> Float32[Array, "*batch T N"]:
    """Products of the direction with what each head of a layer adds to the stream."""
    out = layer["attention"]["out"]
    if norm_placement in POST_BRANCH_NORMS:
        branch = F.linear(heads, out["kernel"], axes=2)
        if "bias" in out:
            branch += jnp.broadcast_to(out["bias"], branch.shape)
        norm = layer.get("post_attention_norm", {})
        direction = _before_norm(config.post_norm or config.norm, norm, branch, direction)
    products = jnp.einsum("...nh,nhd,...d->...n", heads, out["kernel"], direction)
    return config.residual_multiplier * products


def _before_norm(
    norm: c.Norm, params: Params, x: Float[Array, "*batch D"], direction: Float[Array, "*batch D"]
) -> Float[Array, "*batch D"]:
    """A direction after a norm, as a direction before it; the statistics of x stay as they are."""

    def centre(x: Array) -> Array:
        return x - jnp.mean(x, axis=-1, keepdims=True) if norm.subtracts_mean else x

    # Vectors of zeros get the factor of tiny vectors, whose squares are still numbers.
    is_tiny = jnp.max(jnp.abs(centre(x)), axis=-1, keepdims=True) < TINY
    tiny = jnp.asarray(np.resize([TINY, -TINY], x.shape[-1]), x.dtype)
    x = jnp.where(is_tiny, jnp.broadcast_to(tiny, x.shape), x)
    squares = jnp.sum(centre(x) ** 2, axis=-1, keepdims=True)
    factor = jnp.sum(norm(x, None, None) * centre(x), axis=-1, keepdims=True) / squares
    if "scale" in params:
        scale = params["scale"] + norm.scale_offset
        direction = direction * jnp.broadcast_to(scale, direction.shape)
    return centre(factor * direction)
