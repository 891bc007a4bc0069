"""Checks of combinations of options of a `TransformerConfig`; each message has the numbers."""

from typing import Any

import jax

from jaxformer.checks import require
from jaxformer.config.attention.checks import check_shared_bias
from jaxformer.config.attention.multi_head import MultiHead
from jaxformer.config.positions import BlockSparse, Sinusoid, TransformerXL
from jaxformer.config.residual.history import History
from jaxformer.config.segments import kv_sources
from jaxformer.config.topology import Decoder


def check_model(config: Any) -> None:
    """Reject impossible combinations.

    Args:
        config: A `TransformerConfig` whose fields have the right types.

    Raises:
        ValueError: Says which options do not fit together.
    """
    check_shared_bias([layer.attention.main for layer in dict.fromkeys(config.layers)])
    check_causal_kinds(config)
    check_sinusoids(config)
    check_cross_attention(config)
    check_branches(config)
    check_norms(config)
    check_residual(config)
    check_loop(config)
    check_multi_token_prediction(config)
    check_kv_sources(config)
    check_ngrams(config)
    check_masked_ids(config)


def check_causal_kinds(config: Any) -> None:
    """Check that causal windows and recurrences stand in a decoder, without attention dropout."""
    layers = dict.fromkeys(config.encoder_layers + config.layers)
    has_block_sparse = any(isinstance(layer.window, BlockSparse) for layer in layers)
    is_decoder, topology = isinstance(config.topology, Decoder), type(config.topology).__name__
    require(
        not has_block_sparse or is_decoder,
        f"BlockSparse windows are causal, so they need a Decoder; got {topology}.",
    )
    parts = (part for layer in layers for part in layer.attention.parts)
    recurrent_kind = next((type(a).__name__ for a in parts if not a.has_scores), None)
    require(
        recurrent_kind is None or is_decoder,
        f"{recurrent_kind} is causal, so it needs a Decoder; got {topology}.",
    )
    require(
        recurrent_kind is None or config.dropout.attention == 0,
        f"{recurrent_kind} has no attention weights, so dropout.attention must be 0; got "
        f"{config.dropout.attention}.",
    )


def check_sinusoids(config: Any) -> None:
    """Check that pairs of sine and cosine fit into the model width."""
    embedded, width = config.embedding.positions, config.model_dim
    layers = config.encoder_layers + config.layers
    for option in dict.fromkeys((embedded, *(layer.positions for layer in layers))):
        require(
            not isinstance(option, Sinusoid | TransformerXL) or width % 2 == 0,
            f"{type(option).__name__} needs an even model_dim for pairs of sine and cosine; "
            f"got {width}.",
        )
    is_tensor2tensor = isinstance(embedded, Sinusoid) and embedded.layout == "tensor2tensor"
    require(
        not is_tensor2tensor or width >= 4,
        "Sinusoid's tensor2tensor layout needs at least 2 pairs of sine and cosine, so "
        f"model_dim must be at least 4; got {width}.",
    )


def check_cross_attention(config: Any) -> None:
    """Check that a decoder beside an encoder has keys and values per head to read."""
    kinds = [type(layer.attention) for layer in dict.fromkeys(config.layers)]
    other_kinds = [kind.__name__ for kind in kinds if kind is not MultiHead]
    require(
        not (other_kinds and config.topology.is_encoder_decoder),
        "The decoder of an EncoderDecoder needs MultiHead, for cross-attention; got "
        f"{', '.join(other_kinds)}. (The encoder may use another kind.)",
    )


def check_branches(config: Any) -> None:
    """Check the branches of each layer, and dropout inside feed-forward networks."""
    for layer in dict.fromkeys(config.layers + config.encoder_layers):
        option = layer.feed_forward
        require(
            option.has_hidden_dropout or config.dropout.feed_forward == 0,
            f"{type(option).__name__} has no hidden dropout, so dropout.feed_forward must be "
            f"0; got {config.dropout.feed_forward}.",
        )
        num_branches = bool(layer.attention.parts) + option.is_branch
        require(
            num_branches > 0, f"A layer needs attention or a feed-forward network; got {layer}."
        )
        require(
            num_branches == 2 or config.block == "serial",
            f"A layer with one branch needs the serial block; got {config.block!r}.",
        )
        require(
            layer.norm_placement != "pre_feed_forward" or config.block != "parallel_shared_norm",
            "norm_placement 'pre_feed_forward' needs a norm for each branch, so block must not be "
            "'parallel_shared_norm'.",
        )
        normalises_sum = option.is_moe and option.output_norm is not None
        require(
            not (option.has_norms or normalises_sum) or config.block == "serial",
            f"MoE.norm and MoE.output_norm need the serial block; got {config.block!r}.",
        )


def check_norms(config: Any) -> None:
    """Check that there is a norm after branches and a last one, if they have kinds of their own."""
    placements = {layer.norm_placement for layer in config.layers + config.encoder_layers}
    require(
        config.post_norm is None or bool(placements & {"sandwich", "res_post"}),
        "post_norm needs a norm after branches, norm_placement 'sandwich' or 'res_post'; got "
        f"{', '.join(sorted(placements))}.",
    )
    require(
        config.last_norm is None or config.final_norm,
        "last_norm is the kind of the final norm, which final_norm=False leaves out; got "
        f"{config.last_norm}.",
    )


def check_residual(config: Any) -> None:
    """Check that what flows through the depth is read once for each sum that is written."""
    option = config.residual
    if option is None or option.is_short:
        return
    depths = {len(layers) for layers in config.stacks.values()}
    require(
        not isinstance(option, History) or depths == {option.num_layers},
        f"{option} needs stacks of so many layers; got {', '.join(map(str, sorted(depths)))}.",
    )
    is_alone = option.of_branch("attention") is not None and option.of_branch("branches") is None
    require(
        config.block == "serial" or not is_alone,
        f"{option} joins attention alone, so block must be 'serial'; got {config.block!r}.",
    )
    placements = {layer.norm_placement for layer in config.layers + config.encoder_layers}
    name = type(option).__name__
    require(
        "post" not in placements,
        f"{name} is no single stream, so norm_placement must not be 'post', a norm of the sum.",
    )
    has_home = option.per == "layer" or option.of_branch("layer_embedding") is not None
    require(
        has_home or not config.layer_embedding,
        f"{name}.of_branch must have an option for the branch 'layer_embedding'; got None.",
    )
    require(
        option.per == "layer" or not config.layer_scalar,
        f"layer_scalar needs one stream, which {name} has not.",
    )
    require(
        config.block != "parallel" or placements == {"pre"} or option.per == "layer",
        f"{name} reads once for all parallel branches, so block='parallel' needs norm_placement "
        f"'pre'; got {', '.join(sorted(placements))}.",
    )


def check_multi_token_prediction(config: Any) -> None:
    """Check that a layer like the last one can stand alone in a decoder."""
    if not config.multi_token_prediction:
        return
    topology, attention = type(config.topology).__name__, config.layers[-1].attention
    require(
        isinstance(config.topology, Decoder),
        f"multi_token_prediction needs a Decoder; got {topology}.",
    )
    require(
        not (attention.cross_layer_kv or attention.value_residual),
        "multi_token_prediction has a layer like the last one, which reads no earlier layer; got "
        f"{attention}.",
    )


def check_loop(config: Any) -> None:
    """Check that a loop has layers, and that nothing in the model needs each layer to run once."""
    loop, num_layers = config.loop, config.num_layers
    if loop is None:
        return
    stop = num_layers if loop.stop is None else loop.stop
    require(
        loop.start < stop <= num_layers,
        f"Loop needs start < stop <= num_layers = {num_layers}; got {loop.start} and {stop}.",
    )
    require(
        not config.topology.is_encoder_decoder,
        "Loop needs a Decoder or an Encoder; got an EncoderDecoder.",
    )
    require(
        not kv_sources(config.layers),
        "Layers with cross_layer_kv read an earlier layer, which in a Loop runs several times.",
    )
    require(
        not isinstance(config.residual, History),
        f"{config.residual} hands on what each layer gives once, so there must be no Loop.",
    )
    require(
        loop.start > 0 or not any(layer.attention.value_residual for layer in config.layers),
        "Layers with value_residual read layer 0, so Loop.start must be at least 1; got 0.",
    )
    require(
        loop.enter == "last" or config.residual is None or config.residual.is_short,
        f"Loop.enter={loop.enter!r} needs a single stream; {type(config.residual).__name__} has "
        "none.",
    )
    require(
        loop.enter != "final_norm" or config.final_norm,
        "Loop.enter='final_norm' needs final_norm=True.",
    )


def check_kv_sources(config: Any) -> None:
    """Check that each layer with `cross_layer_kv` has an earlier layer whose keys it can read."""
    for i, source in kv_sources(config.layers).items():
        layer = config.layers[i]
        require(
            source >= 0,
            f"Layer {i} has cross_layer_kv and the window {layer.window}, but no MultiHead layer "
            "before it has this window and keys of its own.",
        )
        heads, source_heads = (
            (x.positions, x.attention.num_kv_heads, x.attention.head_dim, x.attention.value_width)
            for x in (layer, config.layers[source])
        )
        require(
            heads == source_heads,
            f"Layer {i} reads keys and values of layer {source}, so both need the same positions, "
            f"num_kv_heads, head_dim and value_dim; got {heads} and {source_heads}.",
        )
    check_value_residual(config)
    has_residual = any(layer.attention.value_residual for layer in config.layers)
    uses = [config.layer_embedding is not None, bool(kv_sources(config.layers)), has_residual]
    require(
        not (any(uses) and config.topology.is_encoder_decoder),
        "value_residual, layer_embedding and cross_layer_kv need a Decoder or an Encoder; got an "
        "EncoderDecoder.",
    )


def check_value_residual(config: Any) -> None:
    """Check that each layer with `value_residual` has values, and layer 0 values to add to them."""
    first = config.layers[0].attention
    is_source = isinstance(first, MultiHead) and not first.value_residual
    for attention in {layer.attention for layer in config.layers if layer.attention.value_residual}:
        widths = attention.num_kv_heads, attention.value_width
        source = (first.num_kv_heads, first.value_width) if is_source else type(first).__name__
        require(
            widths == source and not attention.cross_layer_kv,
            "MultiHead.value_residual needs projections to values, and a layer 0 of MultiHead "
            f"without it whose num_kv_heads and value_dim are the same; got {widths} and {source}.",
        )


def check_ngrams(config: Any) -> None:
    """Check that n-grams are of a decoder's tokens, fit into 63 bits, and have streams to join."""
    options = {layer.ngram_embedding for layer in config.layers} - {None}
    for option in options:
        require(
            isinstance(config.topology, Decoder),
            f"ngram_embedding needs a Decoder; got {type(config.topology).__name__}.",
        )
        require(
            option.start_token < config.vocab_size,
            f"NgramEmbedding.start_token must be below vocab_size, {config.vocab_size}; got "
            f"{option.start_token}.",
        )
        require(
            max(option.multipliers) * (config.vocab_size - 1) < 2**63,
            "NgramEmbedding.multipliers times an id must be below 2**63, so with vocab_size "
            f"{config.vocab_size} at most {2**63 // config.vocab_size}; got "
            f"{max(option.multipliers)}.",
        )
    residual = config.residual
    if not options or residual is None:
        return
    shapes = jax.tree.leaves(residual.state_shapes(config.model_dim))
    is_streams = len(shapes) == 1 and shapes[0].shape[-1] == config.model_dim
    require(
        is_streams and not isinstance(residual, History),
        f"ngram_embedding is added to one stream or to each of several; {type(residual).__name__} "
        "hands on something else.",
    )


def check_masked_ids(config: Any) -> None:
    """Check that the head's masked ids are in the vocabulary, and leave one."""
    masked_ids, vocab_size = config.head.masked_ids, config.vocab_size
    out_of_range = [i for i in masked_ids if not 0 <= i < vocab_size]
    require(
        not out_of_range,
        f"head.masked_ids must be from 0 to vocab_size - 1 = {vocab_size - 1}; got {out_of_range}.",
    )
    require(
        len(set(masked_ids)) < vocab_size,
        f"head.masked_ids must leave at least one id; it masks all {vocab_size}.",
    )
