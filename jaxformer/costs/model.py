"""Parameters, FLOPs, cache bytes and activation bytes of a whole model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, compress
from typing import Any

import jax

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.checks import require_count
from jaxformer.config.positions import as_transformer_xl
from jaxformer.costs.attention import layer_cache_bytes, layer_flops, visible_keys
from jaxformer.costs.logits import logit_bytes, logit_flops
from jaxformer.layers.parameter_metadata import parameter_metadata

REMAT_POLICIES = ("none", "dots", "full")


def num_parameters(config: c.TransformerConfig) -> int:
    """Number of parameters.

    Args:
        config: The model.

    Returns:
        The exact count; a tied head counts once.

    Example:
        >>> from jaxformer import costs, zoo
        >>> config = zoo.get("llama-2-70b")
        >>> f"{costs.num_parameters(config):,}"
        '68,976,648,192'
    """
    parameters = jax.tree.leaves(parameter_metadata(config))
    return sum(math.prod(parameter.shape) for parameter in parameters)


def num_active_parameters(config: c.TransformerConfig) -> int:
    """Number of parameters used per token: of experts the top_k, of n-grams one row of each head.

    Args:
        config: The model.

    Returns:
        The exact count; `num_parameters` without experts and hashed n-grams.
    """
    unused = 0
    for layer in chain(*config.stacks.values()):
        feed_forward: Any = layer.feed_forward
        if feed_forward.is_moe:
            width = feed_forward.expert_model_dim(config.model_dim)
            expert_size = feed_forward.expert.num_parameters(width)
            unused += (feed_forward.num_experts - feed_forward.top_k) * expert_size
        if layer.ngram_embedding is not None:
            unused += layer.ngram_embedding.num_unread
    return num_parameters(config) - unused


def forward_flops(config: c.TransformerConfig, length: int, source_length: int = 0) -> int:
    """FLOPs of one forward pass over one sequence.

        sum over products of 2 * rows * inputs * outputs

    Attention counts all keys of the window, also keys that the causal mask hides, as is usual for
    MFU (Chowdhery et al., PaLM, 2022. arXiv:2204.02311, appendix B). Of the experts, a token counts
    its top_k.

    Args:
        config: The model.
        length: Tokens of the sequence (of the target, for an encoder-decoder).
        source_length: Tokens of the source.

    Returns:
        FLOPs of the matrix products.
    """
    d, width = config.model_dim, config.embedding.dim
    total = logit_flops(config, length)
    if width is not None:
        total += 2 * length * 2 * width * d
    elif config.head.transform is not None:
        total += 2 * length * d * d
    has_source = config.topology.is_encoder_decoder
    if config.residual is not None:
        total += config.residual.model_flops(d, length + has_source * source_length)
    if width is not None and has_source:
        total += 2 * source_length * width * d
    for layer, reads_source in _layers(config):
        total += layer_flops(layer, d, source_length if reads_source else length)
        if config.layer_embedding is not None:
            total += config.layer_embedding.flops(d, length)
        if layer.ngram_embedding is not None:
            total += layer.ngram_embedding.flops(config.stream_width, d, length)
        total += residual_flops(config, layer, source_length if reads_source else length)
        if has_source and not reads_source:  # cross-attention
            total += layer.attention.attention_flops(d, length, source_length, source_length)
    return total


def residual_flops(config: c.TransformerConfig, layer: c.Layer, length: int) -> int:
    """FLOPs of the residual connections of a layer; 0 without an option."""
    option = config.residual
    if option is None:
        return 0
    has_branch = bool(layer.attention.parts), layer.feed_forward.is_branch
    serial = compress(("attention", "feed_forward"), has_branch)
    branches = ["layer", *(serial if config.block == "serial" else ["branches"])]
    branches += ["layer_embedding"] * (config.layer_embedding is not None)
    joins = filter(None, map(option.of_branch, branches))
    return sum(join.flops(config.model_dim, length) for join in joins)


def _layers(config: c.TransformerConfig) -> Iterator[tuple[c.Layer, bool]]:
    """Layers as often as they run, and whether they read the source (of an encoder-decoder)."""
    for name, layers in config.invocations.items():
        reads_source = config.topology.is_encoder_decoder and name == "encoder"
        yield from ((layer, reads_source) for layer in layers)


def expert_flops(config: c.TransformerConfig, length: int, source_length: int = 0) -> int:
    """FLOPs of the experts within `forward_flops`.

    Args:
        config: The model.
        length: Tokens of the sequence (of the target, for an encoder-decoder).
        source_length: Tokens of the source.

    Returns:
        FLOPs of the experts' products, without the router; 0 without experts.
    """
    total = 0
    for layer, reads_source in _layers(config):
        feed_forward: Any = layer.feed_forward
        tokens = source_length if reads_source else length
        total += feed_forward.expert_flops(config.model_dim, tokens) if feed_forward.is_moe else 0
    return total


def training_flops_per_token(config: c.TransformerConfig, length: int) -> float:
    """FLOPs per token of forward and backward pass, for decoders.

        training_factor(config) * forward_flops(config, length) / length

    With `multi_token_prediction` its module is a part of the forward pass.

    Args:
        config: The model.
        length: Tokens of the sequence.

    Returns:
        FLOPs of the matrix products, without recomputation by `remat`.
    """
    flops = forward_flops(config, length)
    if config.multi_token_prediction:
        projection = 2 * length * 2 * config.model_dim**2
        flops += forward_flops(config.multi_token_model, length) + projection
    return training_factor(config) * flops / length


def training_factor(config: c.TransformerConfig) -> int:
    """FLOPs of forward and backward pass, as a multiple of the forward pass.

    Args:
        config: The model.

    Returns:
        3, since the backward pass multiplies by each kernel twice, for its inputs and for itself; 2
        with adapters, whose frozen kernels have no gradient (their own products are not counted).
    """
    return 3 if config.adapter is None else 2


def cache_bytes(
    config: c.TransformerConfig,
    length: int,
    *,
    batch: int = 1,
    source_length: int = 0,
    bytes_per_number: int = 2,
) -> int:
    """Bytes of the KV cache of a whole model.

        batch * layers * (min(length, window) + source_length) * numbers * bytes_per_number

    with numbers = 2 * kv_heads * head_dim for `MultiHead`, half as many for `SharedKV` (unless RoPE
    rotates only one of key and value), and latent_dim + rope_dim for `Latent`. `Decay` has a
    float32 state of the size of one token's values instead, `LinearAttention` one of heads *
    key_dim * value_dim, and the inputs of its convolutions. Hashed n-grams keep the inputs of their
    convolution, and the last ids.

    Args:
        config: The model.
        length: Tokens of each sequence, including the prompt.
        batch: Number of sequences.
        source_length: Tokens of an encoder-decoder's source, whose keys and values are cached.
        bytes_per_number: 2 for bfloat16, 4 for float32, 1 for 8 bits.

    Returns:
        Bytes of all layers.

    Raises:
        ValueError: `bytes_per_number` is another number; `length` or `batch` is negative, or no
            integer.

    Example:
        >>> from jaxformer import costs, zoo
        >>> costs.cache_bytes(zoo.get("llama-2-70b"), 4096) / 2**30  # GiB, in bfloat16
        1.25
        >>> costs.cache_bytes(zoo.get("gemma-3-27b"), 131_072, batch=8) / 2**30
        83.25
    """
    require_count("length", length, least=0)
    require_count("batch", batch, least=0)
    total = 4 * max(config.ngram_size - 1, 0)  # ids
    width = config.stream_width if config.ngram_size else 0
    for layer in config.invocations.get("decoder", config.layers):
        sizes = config.model_dim, visible_keys(layer.window, length), bytes_per_number
        total += layer_cache_bytes(layer, *sizes, stream_width=width)
    if config.topology.is_encoder_decoder:
        attention: Any = config.layers[0].attention
        cross = replace(config.layers[0], attention=replace(attention, positions=(None,)))
        sizes = config.model_dim, source_length, bytes_per_number
        total += config.num_layers * layer_cache_bytes(cross, *sizes)
    return batch * total


def activation_bytes(
    config: c.TransformerConfig,
    batch: int,
    length: int,
    *,
    source_length: int = 0,
    remat: str = "none",
    bytes_per_number: int = 4,
    tensor: int = 1,
    context: int = 1,
    expert_capacity_factor: float = 1.0,
    platform: str = "cpu",
) -> int:
    """Estimate of the activation bytes a device saves for the backward pass.

    Per token and layer, with D, F, N, K, H as in `shapes`, "full" saves the block's input, D, and
    on TPUs and GPUs attention's output, N H, and a number per head. "dots" also saves results of
    matrix products. "none" also saves the inputs of norms, activation, softmax and experts, and T
    probabilities per head; for blockwise attention, which `attention_implementation="auto"` uses
    for long T, one sum per head instead, and "dots" saves its results. In addition, the backward
    pass needs all intermediate values of one layer.

    `tensor` divides heads and hidden features, `context` divides the tokens. With `context`, a
    device saves all keys and values instead of probabilities, and the partial outputs of the N
    heads before each step of the ring. Temporary memory is masks of its t queries and all T keys,
    t T bytes per sequence, 4 N t T of score biases if there are any, and 20 N b t / 2 for scores
    of a block of b <= 512 queries.

    Args:
        config: The model.
        batch: Sequences per device.
        length: Tokens per sequence, over all devices of `context`.
        source_length: Tokens per source, for an encoder-decoder.
        remat: As in `layers.RuntimeConfig`.
        bytes_per_number: 4 for float32 computation, 2 for bfloat16.
        tensor: Devices over which heads, hidden features and vocabulary are sharded.
        context: Devices over which each sequence is sharded.
        expert_capacity_factor: Rows that experts compute per row that is routed to them.
        platform: Platform of the devices, as in `F.vocab_chunk_size`.

    Returns:
        Bytes of the layers and `logit_bytes`. The compiler may save less (fusion) or more (copies);
        in our tests, with scanned layers, it is within a factor of 2.

    Raises:
        ValueError: An unknown `remat`.
    """
    if remat not in REMAT_POLICIES:
        raise ValueError(f"remat must be one of {REMAT_POLICIES}; got {remat!r}.")
    tokens, source = batch * length // context, batch * source_length // context
    devices = tensor, context, expert_capacity_factor
    peak_layer = 0.0
    d = config.model_dim
    option = config.residual
    further_streams = 0 if option is None else option.saved_width(d)
    saved = 0.0 if option is None else float(tokens * option.shared_width(d))
    for layer, reads_source in _layers(config):
        stack_tokens, keys = (source, source_length) if reads_source else (tokens, length)
        saved += stack_tokens * _saved_per_token(layer, d, keys, remat, *devices, platform)
        saved += stack_tokens * further_streams
        layer_total = _saved_per_token(layer, d, keys, "none", *devices)
        if context > 1:  # keys and values of another device, and their gradients
            widths = layer.attention.activation_widths(d, tensor)
            layer_total += 4 * widths.ring_payload
        if (embedding := config.layer_embedding) is not None:
            saved += stack_tokens * embedding.activation_width(d, remat)
            layer_total += embedding.activation_width(d, "none")
        if (ngrams := layer.ngram_embedding) is not None:
            saved += stack_tokens * ngrams.activation_width(config.stream_width, d, remat)
            layer_total += ngrams.activation_width(config.stream_width, d, "none")
        peak_layer = max(peak_layer, stack_tokens * layer_total)
    logits = logit_bytes(config, tokens, tensor=tensor, platform=platform)
    return round((saved + peak_layer) * bytes_per_number) + logits


def _saved_per_token(
    layer: c.Layer,
    model_dim: int,
    length: int,
    remat: str,
    tensor: int,
    context: int,
    expert_capacity_factor: float,
    platform: str = "cpu",
) -> float:
    d, parts = model_dim, layer.attention.parts
    widths = layer.attention.activation_widths(d, tensor)
    rows = expert_capacity_factor if layer.feed_forward.is_moe else 1
    hidden_width = layer.feed_forward.hidden_width(d) / tensor * rows
    routed_width = layer.feed_forward.routed_width(d) * rows
    products = widths.projections + d + hidden_width + routed_width + d
    blockwise_heads = sum(x.num_heads for x in parts if _is_blockwise(x, length, context)) / tensor
    attention_outputs = widths.head_outputs + blockwise_heads if blockwise_heads else 0
    if remat == "full":
        return float(d + (platform != "cpu") * attention_outputs)
    if remat == "dots":
        return d + products + attention_outputs
    scores = sum(_scores_per_head(x, length, context) * x.num_heads for x in parts) / tensor
    intermediates = 7 * d + widths.intermediates + 2 * hidden_width + 2 * routed_width
    return d + products + intermediates + scores


def _is_blockwise(attention: Any, length: int, context: int) -> bool:
    """Whether attention runs blockwise, without the full score matrix in memory."""
    if not attention.has_scores or as_transformer_xl(attention.positions[0]) is not None:
        return False
    return context > 1 or F.prefer_blockwise(length, length)


def _scores_per_head(attention: Any, length: int, context: int) -> int:
    """Numbers per token and head that scores and their softmax keep."""
    if _is_blockwise(attention, length, context):
        return 1  # the sum of the exponentials
    return 2 * (length if attention.has_scores else min(length, attention.chunk))
