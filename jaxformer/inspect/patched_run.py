"""One forward pass with patches of intermediate values."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxformer import config as c
from jaxformer.inspect.bound_patches import BoundPatch, bind_patches, perturbations
from jaxformer.inspect.model_trace import Arrays, Params, apply_with_intermediates, check_inputs
from jaxformer.inspect.named_values import ModelRun, named_values, shapes_of, value_shapes
from jaxformer.inspect.patches import At, Change
from jaxformer.layers import Transformer
from jaxformer.layers.layouts import layout_of


def run(
    config: c.TransformerConfig,
    params: Params,
    tokens: Int[Array, "*batch T"],
    *,
    patches: Mapping[At | str, Change] | None = None,
    record: Sequence[str] | None = None,
    dtype: DTypeLike = jnp.float32,
    **inputs: Array,
) -> ModelRun:
    """Run the model with patches of its intermediate values, and compute what follows from them.

    Arrays of patches, positions, heads, and layers among repetitions of one block are arguments of
    the compiled program, which is compiled once for all of them.

    A patch of keys or values changes what its own layer attends to: layers that read them
    (`cross_layer_kv`) have patches of their own. A patch of "embeddings" leaves a `LayerEmbedding`
    as it is.

    Args:
        config: The model.
        params: The parameters.
        tokens: Token ids, of the decoder in an encoder-decoder.
        patches: By place, what happens there: `Replace`, `Zero`, `Mean` or `Add`. A name alone is
            the value everywhere.
        record: Names of the values to return, as they are after the patches; None is all.
        dtype: Dtype of the computation.
        **inputs: As in `trace`.

    Returns:
        The logits and the recorded values.

    Raises:
        ValueError: A name, layer, position or head does not exist, two patches change one place, or
            a value does not fit its place.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxformer import Transformer, inspect, zoo
        >>> config, tokens = zoo.get("llama-2-7b").tiny(), jnp.arange(5)
        >>> params = jax.jit(Transformer(config).init)(jax.random.key(0), tokens)["params"]
        >>> patches = {inspect.At("heads", layer=1, position=-1, head=3): inspect.Zero()}
        >>> patched = inspect.run(config, params, tokens, patches=patches, record=["stream"])
        >>> patched.logits.shape, patched.values["stream"][1].shape
        ((5, 128), (5, 64))

    References:
        Meng et al., Locating and Editing Factual Associations in GPT, 2022. arXiv:2202.05262,
        section 2 (activation patching); Turner et al., Steering Language Models With Activation
        Engineering, 2023. arXiv:2308.10248 (adding a direction)
    """
    arrays = check_inputs(config, tokens, inputs)
    recorded = tuple(value_shapes(config) if record is None else record)
    for name in recorded:
        shapes_of(config, name)
    bound = bind_patches(config, patches or {}, arrays)
    return run_bound(Transformer(config, dtype=dtype), recorded, params, arrays, bound)


@partial(jax.jit, static_argnums=(0, 1))
def run_bound(
    model: Transformer,
    record: tuple[str, ...],
    params: Params,
    arrays: Arrays,
    patches: tuple[BoundPatch, ...],
) -> ModelRun:
    """Run a model with patches of `bind_patches`."""
    changes = perturbations(model.config, patches, layout_of(params))
    logits, intermediates = apply_with_intermediates(model, params, arrays, changes)
    values = named_values(model.config, intermediates)
    return ModelRun(logits, {name: values[name] for name in record})
