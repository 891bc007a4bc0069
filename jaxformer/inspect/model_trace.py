"""Residual stream of every layer, from one forward pass with sown intermediates."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import unstack_layers
from jaxformer.layers.parameter_metadata import check_parameters
from jaxformer.layers.runtime import INTERMEDIATES, PERTURBATIONS

Params = Any
Arrays = dict[str, Any]  # what the model takes, by name: tokens, source, positions, ...


class ResidualTrace(NamedTuple):
    """Residual stream of one stack.

    Attributes:
        embeddings: Input of the first layer.
        stream: The stream after each layer.
        branches: Output of each branch, which is added to the stream, by name: "attention",
            "cross_attention", "feed_forward", or "parallel_branches" for the sum of parallel
            branches with one norm after it; "layer_embedding" if each layer has embeddings, and
            "ngram_embedding", of each stream, if layers look up n-grams. With `norm_placement`
            "post" a norm follows each sum.
        final_normed: The stream after the final norm, the input of the head; None without it.
        passes: The stream after each pass through a loop; None without one. The streams and
            branches of its layers are those of the last pass.
    """

    embeddings: Float[Array, "*batch T D"]
    stream: Float[Array, "layers *batch T D"]
    branches: dict[str, Float[Array, "layers *batch T D"]]
    final_normed: Float[Array, "*batch T D"]
    passes: Float[Array, "passes *batch T D"] | None = None


class ModelTrace(NamedTuple):
    """Residual streams of all stacks, and the logits.

    Attributes:
        decoder: Streams of the decoder; None without a decoder.
        encoder: Streams of the encoder; None without an encoder.
        logits: Logits of each token.
    """

    decoder: ResidualTrace | None
    encoder: ResidualTrace | None
    logits: Float[Array, "*batch T V"]


def trace(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> ModelTrace:
    """Run the model and record the residual stream of each stack.

        stream[l] = stream[l - 1] + sum of branches[...][l]         stream[-1] = embedded

    except with `norm_placement` "post", where a norm follows each sum, and at the start of a loop.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids, of the decoder in an encoder-decoder.
        dtype: Dtype of the computation.
        **inputs: Other arrays that the model takes: source, positions, segments, ...

    Returns:
        The streams and the logits.

    Raises:
        ValueError: As in `Transformer`.
    """
    arrays = check_inputs(config, tokens, inputs)
    return _trace(Transformer(config, dtype=dtype), params, arrays)


@partial(jax.jit, static_argnums=0)
def _trace(model: Transformer, params: Params, arrays: Arrays) -> ModelTrace:
    logits, intermediates = apply_with_intermediates(model, params, arrays)
    stacks = {name: _stack_trace(intermediates[name]) for name in model.config.stacks}
    return ModelTrace(stacks.get("decoder"), stacks.get("encoder"), logits)


def head_stack(config: c.TransformerConfig) -> c.Stack:
    """Return the stack whose output is the input of the LM head."""
    return "decoder" if config.topology.has_decoder else "encoder"


def apply_with_intermediates(
    model: Transformer, params: Params, arrays: Arrays, perturbations: Any = None
) -> tuple[Float[Array, "*batch T V"], Any]:
    """Logits and all sown intermediates, by module path.

    Args:
        model: The model.
        params: The parameters.
        arrays: From `check_inputs`.
        perturbations: Functions of intermediates (see `layers.runtime.sow_and_perturb`).

    Raises:
        ValueError: The parameters do not match the model.
    """
    check_parameters(model.config, params)
    changes = {} if perturbations is None else {PERTURBATIONS: perturbations}
    logits, sown = model.apply({"params": params, **changes}, **arrays, mutable=[INTERMEDIATES])
    return logits, sown[INTERMEDIATES]


def attention_traces(branch: Any) -> list[Any]:
    """What an attention module has sown for `inspect`, or each of several kinds side by side."""
    kinds = [branch, *(branch[name] for name in sorted(branch) if name.startswith("kind_"))]
    return [kind["attention_trace"] for kind in kinds if "attention_trace" in kind]


INPUTS = ("source", "positions", "segments", "source_positions", "source_segments")


def check_inputs(config: c.TransformerConfig, tokens: Any, inputs: dict[str, Any]) -> Arrays:
    """Return tokens and inputs as arrays by name, after checking names and shapes."""
    if unknown := set(inputs) - set(INPUTS):
        raise ValueError(
            f"Model inputs must be among {', '.join(INPUTS)}; got {', '.join(sorted(unknown))}."
        )
    ids = {"tokens": tokens} | {name: x for name, x in inputs.items() if x is not None}
    arrays = {name: as_id_array(name, values) for name, values in ids.items()}
    tokens = arrays["tokens"]
    Transformer(config).check_inputs(arrays.get("source"), None, None)
    F.check_token_ids(tokens, config.vocab_size)
    texts = {"": tokens}
    if config.topology.is_encoder_decoder:
        source = texts["source_"] = arrays["source"]
        F.check_token_ids(source, config.topology.source_vocab_size or config.vocab_size)
        if source.shape[:-1] != tokens.shape[:-1]:
            raise ValueError(
                f"tokens and source must have the same batch axes; got shapes {tokens.shape} and "
                f"{source.shape}."
            )
    elif source_inputs := [name for name in arrays if name.startswith("source_")]:
        raise ValueError(f"This model has no encoder, so it takes no {', '.join(source_inputs)}.")
    for prefix, text in texts.items():
        for name in (prefix + "positions", prefix + "segments"):
            if name in arrays:
                arrays[name] = broadcast_to_tokens(name, arrays[name], text)
        if config.max_length is not None:
            positions = arrays.get(prefix + "positions", jnp.arange(text.shape[-1]))
            F.check_positions(positions, config.max_length)
    return arrays


def broadcast_to_tokens(name: str, values: Array, tokens: Array) -> Array:
    """Broadcast `values` to one number per token."""
    try:
        return jnp.broadcast_to(values, tokens.shape)
    except ValueError as error:
        raise ValueError(
            f"{name} must have the shape of the tokens, {tokens.shape}; got {values.shape}."
        ) from error


def as_id_array(name: str, values: Any) -> Array:
    """Return `values` as an integer array."""
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim == 0 or not array.size:
        raise ValueError(
            f"{name} must be a non-empty integer array [..., time]; got shape {array.shape}, "
            f"{array.dtype}."
        )
    return array


def as_int_tuple(name: str, values: Any) -> tuple[int, ...] | None:
    """Return a selection as a tuple of integers, or None."""
    if values is None:
        return None
    array = np.atleast_1d(np.asarray(values))
    if array.size and (array.ndim != 1 or not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} must be an integer or a sequence of integers; got {values!r}.")
    return tuple(array.tolist())


def _stack_trace(intermediates: Any) -> ResidualTrace:
    """ResidualTrace from a stack's sown intermediates."""
    layers = unstack_layers(intermediates)
    names = dict.fromkeys(name for layer in layers for name in layer)
    branches = [name for name in names if name.startswith("from_")]
    zeros = jnp.zeros_like(intermediates["stack_input"])  # of layers without the branch

    def stacked(name: str) -> Array:
        return jnp.stack([layer.get(name, zeros) for layer in layers])

    return ResidualTrace(
        intermediates["stack_input"],
        stacked("residual_stream"),
        {name.removeprefix("from_"): stacked(name) for name in branches},
        intermediates["stack_output"],
        jnp.stack(intermediates["pass_outputs"]) if "pass_outputs" in intermediates else None,
    )
