"""Parameters, FLOPs, cache bytes and activation bytes of a whole model."""

import math

import jax

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.config.attention import RECURRENT
from jaxformer.costs.attention import (
    attention_flops,
    attention_widths,
    kept_bytes,
    keys_seen,
    made_of_a_token,
)
from jaxformer.costs.logits import head_flops, logit_bytes
from jaxformer.layers.declarations import declarations

REMAT = ("none", "dots", "full")
TRAINING_FACTOR = 3  # the backward pass multiplies by each kernel twice: for inputs and for kernels


def parameters(config: c.TransformerConfig) -> int:
    """Number of parameters.

    Args:
        config: The model.

    Returns:
        The exact count; a tied head counts once.

    Example:
        >>> from jaxformer import costs, zoo
        >>> config = zoo.get("llama-2-70b")
        >>> f"{costs.parameters(config):,}"
        '68,976,648,192'
    """
    return sum(math.prod(metadata.shape) for metadata in jax.tree.leaves(declarations(config)))


def active_parameters(config: c.TransformerConfig) -> int:
    """Number of parameters used per token: of the experts, only the top_k.

    Args:
        config: The model.

    Returns:
        The exact count; that of `parameters` where there are no experts.
    """
    unused = 0
    layers = [config.layer(i) for i in range(config.num_layers)]
    layers += [config.encoder.layer(i) for i in range(_encoder_layers(config))]
    for _, _, feed_forward in layers:
        if isinstance(feed_forward, c.Experts):
            expert_size = feed_forward.expert.flops(config.model_dim, 1) // 2
            unused += (feed_forward.num_experts - feed_forward.top_k) * expert_size
    return parameters(config) - unused


def forward_flops(config: c.TransformerConfig, length: int, source_length: int = 0) -> int:
    """FLOPs of one forward pass over one sequence.

        sum over products of 2 * rows * inputs * outputs

    Attention counts every key a window holds, without the half that causality would save, as is
    usual in reports of utilisation (Chowdhery et al., PaLM, 2022. arXiv:2204.02311, appendix B).
    Of many experts those count that a token is sent to.

    Args:
        config: The model.
        length: Tokens of the sequence (of the target, for an encoder-decoder).
        source_length: Tokens of the source.

    Returns:
        FLOPs of the matrix products.
    """
    d, width = config.model_dim, config.embedding.dim
    total = head_flops(config, length)
    if width is not None:
        total += 2 * length * 2 * width * d
    cross = isinstance(config.topology, c.EncoderDecoder)
    for i in range(config.num_layers):
        total += _layer_flops(config.at(i), config.layer(i), length)
        total += attention_flops(config, length, source_length, None) if cross else 0
    if isinstance(config.topology, c.EncoderDecoder):
        total += 0 if width is None else 2 * source_length * width * d
        for i in range(config.topology.num_encoder_layers):
            encoder_config = config.encoder
            total += _layer_flops(encoder_config.at(i), encoder_config.layer(i), source_length)
    return total


def expert_flops(config: c.TransformerConfig, length: int, source_length: int = 0) -> int:
    """FLOPs of the experts within `forward_flops`.

    Args:
        config: The model.
        length: Tokens of the sequence (of the target, for an encoder-decoder).
        source_length: Tokens of the source.

    Returns:
        FLOPs of the experts' products, without the router's; 0 where there are no experts.
    """
    layers = [(config.layer(i).feed_forward, length) for i in range(config.num_layers)]
    encoder_layers = map(config.encoder.layer, range(_encoder_layers(config)))
    layers += [(layer.feed_forward, source_length) for layer in encoder_layers]
    mixtures = [(x, tokens) for x, tokens in layers if isinstance(x, c.Experts)]
    return sum(experts.expert_flops(config.model_dim, tokens) for experts, tokens in mixtures)


def training_flops_per_token(config: c.TransformerConfig, length: int) -> float:
    """FLOPs per token of forward and backward pass, for decoders.

        TRAINING_FACTOR * forward_flops(config, length) / length

    Args:
        config: The model.
        length: Tokens of the sequence.

    Returns:
        FLOPs of the matrix products; what `remat` computes again is not counted.
    """
    return TRAINING_FACTOR * forward_flops(config, length) / length


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

    with numbers = 2 * kv_heads * head_dim, half as many where keys are the values (`SharedKV`,
    unless only one of them is turned), and latent_dim + rope_dim where keys and values come from a
    `Latent`.
    `Decay` keeps a state instead, as if of one token, in float32.

    Args:
        config: The model.
        length: Tokens so far, prompt included.
        batch: Sequences side by side.
        source_length: Tokens of an encoder-decoder's source, which cross-attention keeps.
        bytes_per_number: 2 for bfloat16.

    Returns:
        Bytes over all layers; layers with a window keep no more than it.

    Example:
        >>> from jaxformer import costs, zoo
        >>> costs.cache_bytes(zoo.get("llama-2-70b"), 4096) / 2**30  # GiB, in bfloat16
        1.25
        >>> costs.cache_bytes(zoo.get("gemma-3-27b"), 131_072, batch=8) / 2**30
        83.25
    """
    total = 0
    for i in range(config.num_layers):
        positions, window, _ = config.layer(i)
        num_tokens = keys_seen(window, length)
        total += kept_bytes(config.at(i), positions, num_tokens, bytes_per_number)
    if isinstance(config.topology, c.EncoderDecoder):
        total += config.num_layers * kept_bytes(config, None, source_length, bytes_per_number)
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
    expert: float = 1.0,
    kernels: bool = False,
) -> int:
    """Estimate of the activation bytes a device saves for the backward pass.

    Per token and layer, with D, F, N, K, H as in `shapes`: "full" keeps the block's input, D, and
    what attention's kernel makes where it is one, N H, and a number for each head;
    "dots" also the results of its products, but not those of experts; "none" also what the norms,
    the activation and the softmax need, and the T probabilities of each head: a sum instead where
    T is long enough for attention by blocks, whose results "dots" keeps (as
    `attention_implementation="auto"` has it; "xla" always has the probabilities). The backward pass
    works on one layer at a time, all of whose values are there while it does, whatever was kept.
    Devices along `tensor` divide what has heads or hidden width, those along `context` the tokens;
    there each keeps the keys and values of all instead of probabilities, and what the N heads have
    gathered before each of the ring's steps. It works with masks of its t queries and all T keys,
    t T bytes a sequence, with 4 N t T of biases where positions are told by those, and with the
    scores of a block of b <= 512 queries, 20 N b t / 2.

    Args:
        config: The model.
        batch: Sequences of a device.
        length: Tokens of each, on all devices that share it.
        source_length: Tokens of each source, for an encoder-decoder.
        remat: As in `layers.Mode`.
        bytes_per_number: 4 for float32 computation, 2 for bfloat16.
        tensor: Devices that share heads, hidden width and vocabulary.
        context: Devices that share each sequence.
        expert: Rows for which experts have room, for each row that is sent to them.
        kernels: Whether attention is a kernel's, as on TPUs and GPUs.

    Returns:
        Bytes of the layers, with `logit_bytes`. The compiler may keep less (it fuses) or more
        (copies); within a factor of 2 in our tests, where layers run as one loop.

    Raises:
        ValueError: An unknown `remat`.
    """
    if remat not in REMAT:
        raise ValueError(f"remat must be one of {REMAT}; got {remat!r}.")
    tokens, source = batch * length // context, batch * source_length // context
    devices = tensor, context, expert
    saved, peak_layer = 0.0, 0.0
    for stack, count, stack_tokens, keys in (
        (config, config.num_layers, tokens, length),
        (config.encoder, _encoder_layers(config), source, source_length),
    ):
        for i in range(count):
            layer_config, layer = stack.at(i), stack.layer(i)
            saved += stack_tokens * _kept_per_token(
                layer_config, layer, keys, remat, *devices, kernels
            )
            layer_total = _kept_per_token(layer_config, layer, keys, "none", *devices)
            if context > 1:  # keys and values of another device, and their gradients
                layer_total += 4 * attention_widths(layer_config, layer.positions, tensor).around
            peak_layer = max(peak_layer, stack_tokens * layer_total)
    platform = "gpu" if kernels else "cpu"
    logits = logit_bytes(config, tokens, tensor=tensor, platform=platform)
    return round((saved + peak_layer) * bytes_per_number) + logits


def _kept_per_token(
    config: c.TransformerConfig,
    choice: c.LayerChoice,
    length: int,
    remat: str,
    tensor: int,
    context: int,
    expert: float,
    kernels: bool = False,
) -> float:
    a, d = config.kind, config.model_dim
    widths = attention_widths(config, choice.positions, tensor)
    routed = isinstance(choice.feed_forward, c.Experts)
    hidden_width = _inner(choice.feed_forward, d) / tensor * (expert if routed else 1)
    products = widths.products + d + hidden_width + d
    is_blockwise = _by_blocks(config, choice, length, context)
    attention_outputs = widths.heads + a.num_heads / tensor if is_blockwise else 0
    if remat == "full":
        return float(d + kernels * attention_outputs)
    if remat == "dots":
        return d + products - (hidden_width if routed else 0) + attention_outputs
    num_keys = min(length, F.RECURRENCE_CHUNK) if isinstance(a, RECURRENT) else length
    scores = (1 if is_blockwise else 2 * num_keys) * a.num_heads / tensor
    return d + products + 7 * d + widths.beside + 2 * hidden_width + scores


def _by_blocks(
    config: c.TransformerConfig, choice: c.LayerChoice, length: int, context: int
) -> bool:
    """Whether attention runs blockwise, so that its scores are never in memory all at once."""
    a = config.kind
    is_excluded = isinstance(a, RECURRENT) or isinstance(choice.window, c.BlockSparse)
    is_excluded = is_excluded or any(isinstance(kind, c.TransformerXL) for kind in a.positions)
    return not is_excluded and (context > 1 or F.many_scores(length, length))


def _layer_flops(config: c.TransformerConfig, choice: c.LayerChoice, length: int) -> int:
    total = attention_flops(config, length, length, choice.window)
    total += choice.feed_forward.flops(config.model_dim, length)
    if isinstance(choice.positions, c.TransformerXL):
        heads = config.multi_head.num_heads * config.multi_head.head_dim
        total += 2 * length * config.model_dim * heads  # W times one sinusoid per distance
        total += 2 * length * keys_seen(choice.window, length) * heads  # scores of distances
    return total


def _inner(choice: c.FeedForward, model_dim: int) -> int:
    """Outputs per token of the input projections of a feed-forward."""
    match choice:
        case c.Experts(expert=expert, top_k=top_k):
            return top_k * _inner(expert, model_dim)
        case c.MLP(hidden_dim=hidden):
            return hidden
        case c.GLU(hidden_dim=hidden) | c.ClampedGEGLU(hidden_dim=hidden):
            return 2 * hidden
    return made_of_a_token(choice.parameters(model_dim))


def _encoder_layers(config: c.TransformerConfig) -> int:
    topology = config.topology
    return topology.num_encoder_layers if isinstance(topology, c.EncoderDecoder) else 0
