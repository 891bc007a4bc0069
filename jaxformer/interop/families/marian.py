"""Marian and FSMT: post-norm encoder-decoders with other sinusoid layouts.

Marian shares one token table between source, target and head, and adds a bias to the logits. FSMT
has three matrices, and counts its positions from the id of padding on.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop.families.activations import ACTIVATIONS, name_of
from jaxformer.interop.families.pieces import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import Flat, Kernel

ENCODER, DECODER = "model.encoder.layers.{layer}", "model.decoder.layers.{layer}"


def attention(theirs: str, ours: str) -> tuple[Row, ...]:
    """Mapping rules of an attention branch and its post-norm."""
    return (
        *linear(f"{theirs}.q_proj", f"{ours}/query"),
        *linear(f"{theirs}.k_proj", f"{ours}/key"),
        *linear(f"{theirs}.v_proj", f"{ours}/value"),
        *linear(f"{theirs}.out_proj", f"{ours}/out", input_axes=2),
        *norm(f"{theirs}_layer_norm", f"post_{ours}_norm"),
    )


def feed_forward(theirs: str) -> tuple[Row, ...]:
    """Mapping rules of the feed-forward branch and its post-norm."""
    return (
        *linear(f"{theirs}.fc1", "feed_forward/up"),
        *linear(f"{theirs}.fc2", "feed_forward/down"),
        *norm(f"{theirs}.final_layer_norm", "post_feed_forward_norm"),
    )


STACKS = {
    "encoder": (*attention(f"{ENCODER}.self_attn", "attention"), *feed_forward(ENCODER)),
    "decoder": (
        *attention(f"{DECODER}.self_attn", "attention"),
        *attention(f"{DECODER}.encoder_attn", "cross_attention"),
        *feed_forward(DECODER),
    ),
}
MARIAN_TABLE = Table(
    whole=(
        Row("model.shared.weight", "embedding/tokens/embedding"),
        Row("lm_head.weight", "head/kernel", Kernel()),
        Row("final_logits_bias", "head/bias", Flat(leading=1)),
    ),
    stacks=STACKS,
)
FSMT_TABLE = Table(
    whole=(
        Row("model.decoder.embed_tokens.weight", "embedding/tokens/embedding"),
        Row("model.encoder.embed_tokens.weight", "source_embedding/tokens/embedding"),
        Row("model.decoder.output_projection.weight", "head/kernel", Kernel()),
    ),
    stacks=STACKS,
)
SINUSOIDS = r"model\.(encoder|decoder)\.embed_positions\.weights?"


def read_marian(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a marian's."""
    settings.only("share_encoder_decoder_embeddings", True)
    vocab_size = settings.integer("vocab_size")
    settings.only("decoder_vocab_size", vocab_size)
    settings.only("tie_word_embeddings", True)  # or else source and target are untied too
    return _read(
        settings,
        vocab_size=vocab_size,
        source_vocab_size=None,
        activation="gelu",
        scaled=settings.flag("scale_embedding", False),
        positions=c.Sinusoid(layout="halves"),
        head=c.Head(tied=True, bias=True),
    )


def read_fsmt(settings: Settings) -> c.TransformerConfig:
    """Our configuration from an fsmt's."""
    settings.value("langs")
    settings.value("decoder")
    settings.only("tie_word_embeddings", False)
    padding = settings.integer("pad_token_id", 1)
    return _read(
        settings,
        vocab_size=settings.integer("tgt_vocab_size"),
        source_vocab_size=settings.integer("src_vocab_size"),
        activation="relu",
        scaled=settings.flag("scale_embedding", True),
        positions=c.Sinusoid(layout="tensor2tensor", offset=padding + 1),
        head=c.Head(),
    )


def _read(
    settings: Settings,
    *,
    vocab_size: int,
    source_vocab_size: int | None,
    activation: str,
    scaled: bool,
    positions: c.Sinusoid,
    head: c.Head,
) -> c.TransformerConfig:
    settings.only("is_encoder_decoder", True)
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        settings.only(name, False)
    settings.only("static_position_embeddings", True)
    for name in ("extra_pos_embeddings", "add_bias_logits", "_num_labels"):
        settings.value(name)
    model_dim, layers = settings.integer("d_model"), settings.integer("encoder_layers")
    settings.only("num_hidden_layers", layers)
    activation = settings.choice("activation_function", activation, ACTIVATIONS)
    decoder, encoder = (
        _read_stack(settings, stack, model_dim, activation) for stack in ("decoder", "encoder")
    )
    return c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=settings.integer("decoder_layers"),
        attention=decoder[0],
        feed_forward=(decoder[1],),
        topology=c.EncoderDecoder(
            num_encoder_layers=layers,
            source_vocab_size=source_vocab_size,
            attention=None if encoder[0] == decoder[0] else encoder[0],
            feed_forward=None if encoder[1] == decoder[1] else (encoder[1],),
        ),
        norm=c.LayerNorm(eps=1e-5),
        placement="post",
        final_norm=False,
        embedding=c.Embedding(scale=math.sqrt(model_dim) if scaled else 1.0, positions=positions),
        head=head,
    )


def _read_stack(
    settings: Settings, stack: str, model_dim: int, activation: Any
) -> tuple[c.MultiHead, c.MLP]:
    """Heads and feed-forward of one stack."""
    heads = settings.integer(f"{stack}_attention_heads")
    attention = c.MultiHead(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, model_dim // heads),
        positions=(None,),
        biases=ALL_BIASES,
    )
    hidden_dim = settings.integer(f"{stack}_ffn_dim")
    return attention, c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True)


def write_marian(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A marian's configuration from ours."""
    fields = _write(config)
    return fields and {
        **fields,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.head.tied,
        "pad_token_id": config.vocab_size - 1,
        "decoder_start_token_id": config.vocab_size - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }


def write_fsmt(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An fsmt's configuration from ours."""
    fields, topology = _write(config), config.topology
    positions = config.embedding.positions
    if not isinstance(topology, c.EncoderDecoder) or not isinstance(positions, c.Sinusoid):
        return None
    if fields is None:
        return None
    return {
        **fields,
        "langs": ["source", "target"],
        "src_vocab_size": topology.source_vocab_size,
        "tgt_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "pad_token_id": positions.offset - 1,
    }


def sinusoids(values: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Sinusoid tables that FSMT files store, by tensor name.

    Args:
        values: The config.json.

    Returns:
        One table per stack; the row of padding is zero.
    """
    padding, width = values["pad_token_id"], values["d_model"]
    rows = jnp.arange(values.get("max_position_embeddings", 1024) + padding + 1)
    table = np.array(F.sinusoidal_positions(rows, width, layout="tensor2tensor"))
    table[padding] = 0
    return {f"model.{stack}.embed_positions.weight": table for stack in ("encoder", "decoder")}


def _write(config: c.TransformerConfig) -> dict[str, Any] | None:
    topology, branch = config.topology, config.feed_forward[0]
    if not isinstance(topology, c.EncoderDecoder) or not isinstance(branch, c.MLP):
        return None
    if not isinstance(config.embedding.positions, c.Sinusoid):
        return None
    fields: dict[str, Any] = {
        "d_model": config.model_dim,
        "encoder_layers": topology.num_encoder_layers,
        "decoder_layers": config.num_layers,
        "activation_function": name_of(branch.activation),
        "scale_embedding": config.embedding.scale != 1,
        "is_encoder_decoder": True,
        "dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    for stack, own in (("encoder", config.encoder), ("decoder", config)):
        mlp = own.feed_forward[0]
        if not isinstance(mlp, c.MLP):
            return None
        fields[f"{stack}_attention_heads"] = own.multi_head.num_heads
        fields[f"{stack}_ffn_dim"] = mlp.hidden_dim
    return fields


FAMILIES = (
    Family(
        "marian",
        "MarianMTModel",
        read_marian,
        write_marian,
        MARIAN_TABLE,
        ignored=(SINUSOIDS, r"model\.(encoder|decoder)\.embed_tokens\.weight"),
    ),
    Family(
        "fsmt",
        "FSMTForConditionalGeneration",
        read_fsmt,
        write_fsmt,
        FSMT_TABLE,
        ignored=(SINUSOIDS,),
        constants=sinusoids,
    ),
)
