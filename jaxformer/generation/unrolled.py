"""Parameters as they decode faster: each layer's by itself, not stacked for a scan."""

import warnings
from typing import Any

from jaxformer import config as c
from jaxformer import costs
from jaxformer.layers.layouts import arrange_layers, decoding_layout, layout_of
from jaxformer.layers.parameter_metadata import check_parameters

MAX_COPIED_PARAMETERS = 250_000_000  # at each call


def unroll(config: c.TransformerConfig, params: Any, *, donate: bool = False) -> Any:
    """Return the parameters with a tree for each layer instead of arrays of stacked layers.

    In a scan over layers, XLA for CPUs and GPUs (not for TPUs) copies each layer's parameters out
    of the stacked arrays for every token. Times unrolled and scanned: on an H100, 256 tokens of
    eight rows, 12 layers of width 1024 in bfloat16, 0.17 and 0.28 s; on two CPU cores, 64 tokens of
    one row, 12 layers of width 512, 0.73 and 0.86 s, but 128 tokens of four rows, 8 layers of width
    256, 1.6 and 1.25 s. Compile time of the unrolled model grows with depth: by 0.2 to 0.4 s per
    layer on two CPU cores.

    Args:
        config: A decoder or an encoder-decoder; the encoder is not unrolled.
        params: The parameters, which are copied.
        donate: Whether to delete each stacked array of `params` once its layers are copied, so that
            memory for two models is not needed.

    Returns:
        Parameters of the same model, with the same logits.

    Raises:
        ValueError: The model is an encoder, or the parameters do not match it.
    """
    if not config.topology.has_decoder:
        raise ValueError(f"unroll needs a Decoder or an EncoderDecoder; got {config.topology}.")
    check_parameters(config, params)
    return arrange_layers(config, params, "by_layer", donate=donate)


def unroll_to_decode(config: c.TransformerConfig, params: Any) -> Any:
    """Return the parameters as they decode faster; of a large model, which is not copied, say how.

    They match the model.
    """
    if layout_of(params) == "by_layer" or decoding_layout(config) == "stacked":
        return params
    num_parameters = costs.num_parameters(config)
    if num_parameters <= MAX_COPIED_PARAMETERS:
        return arrange_layers(config, params, "by_layer")
    warnings.warn(
        f"This model decodes faster with parameters of its own for each layer. It has "
        f"{num_parameters:.2g} parameters, more than the {MAX_COPIED_PARAMETERS:.2g} that each "
        "call copies, so unroll it once: `params = jaxformer.generation.unroll(config, params, "
        "donate=True)`.",
        stacklevel=4,  # the caller of `generate` or `stream`
    )
    return params
