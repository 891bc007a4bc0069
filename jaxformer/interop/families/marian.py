"""Marian and FSMT: post-norm encoder-decoders with other sinusoid layouts.

Marian shares one embedding between source, target and head, and adds a bias to the logits. FSMT
has three embeddings, and its positions start at the padding id + 1.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import Flatten, LinearKernel

ENCODER, DECODER = "model.encoder.layers.{layer}", "model.decoder.layers.{layer}"


def attention_rules(theirs: str, ours: str) -> tuple[MappingRule, ...]:
    """Mapping rules of an attention branch and its post-norm."""
    return (
        *linear_rules(f"{theirs}.q_proj", f"{ours}/query"),
        *linear_rules(f"{theirs}.k_proj", f"{ours}/key"),
        *linear_rules(f"{theirs}.v_proj", f"{ours}/value"),
        *linear_rules(f"{theirs}.out_proj", f"{ours}/out", input_axes=2),
        *norm_rules(f"{theirs}_layer_norm", f"post_{ours}_norm"),
    )


def feed_forward_rules(theirs: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the feed-forward branch and its post-norm."""
    return (
        *linear_rules(f"{theirs}.fc1", "feed_forward/up"),
        *linear_rules(f"{theirs}.fc2", "feed_forward/down"),
        *norm_rules(f"{theirs}.final_layer_norm", "post_feed_forward_norm"),
    )


STACKS = {
    "encoder": (
        *attention_rules(f"{ENCODER}.self_attn", "attention"),
        *feed_forward_rules(ENCODER),
    ),
    "decoder": (
        *attention_rules(f"{DECODER}.self_attn", "attention"),
        *attention_rules(f"{DECODER}.encoder_attn", "cross_attention"),
        *feed_forward_rules(DECODER),
    ),
}
MARIAN_TABLE = ParamMapping(
    top_level=(
        MappingRule("model.shared.weight", "embedding/tokens/embedding"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
        MappingRule("final_logits_bias", "head/bias", Flatten(leading=1)),
    ),
    stacks=STACKS,
)
FSMT_TABLE = ParamMapping(
    top_level=(
        MappingRule("model.decoder.embed_tokens.weight", "embedding/tokens/embedding"),
        MappingRule("model.encoder.embed_tokens.weight", "source_embedding/tokens/embedding"),
        MappingRule("model.decoder.output_projection.weight", "head/kernel", LinearKernel()),
    ),
    stacks=STACKS,
)
SINUSOID_TENSORS = r"model\.(encoder|decoder)\.embed_positions\.weights?"


def read_marian(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a marian model."""
    reader.require_value("share_encoder_decoder_embeddings", True)
    vocab_size = reader.integer("vocab_size")
    reader.require_value("decoder_vocab_size", vocab_size)
    reader.require_value("tie_word_embeddings", True)  # False also unties source and target
    return _read(
        reader,
        vocab_size=vocab_size,
        source_vocab_size=None,
        activation="gelu",
        scaled=reader.boolean("scale_embedding", False),
        positions=c.Sinusoid(layout="halves"),
        head=c.LMHead(tied=True, bias=True),
    )


def read_fsmt(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an fsmt model."""
    reader.get("langs")
    reader.get("decoder")
    reader.require_value("tie_word_embeddings", False)
    padding = reader.integer("pad_token_id", 1)
    return _read(
        reader,
        vocab_size=reader.integer("tgt_vocab_size"),
        source_vocab_size=reader.integer("src_vocab_size"),
        activation="relu",
        scaled=reader.boolean("scale_embedding", True),
        positions=c.Sinusoid(layout="tensor2tensor", offset=padding + 1),
        head=c.LMHead(),
    )


def _read(
    reader: ConfigReader,
    *,
    vocab_size: int,
    source_vocab_size: int | None,
    activation: str,
    scaled: bool,
    positions: c.Sinusoid,
    head: c.LMHead,
) -> c.TransformerConfig:
    reader.require_value("is_encoder_decoder", True)
    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        reader.require_value(name, False)
    reader.require_value("static_position_embeddings", True)
    for name in ("extra_pos_embeddings", "add_bias_logits", "_num_labels"):
        reader.get(name)
    model_dim, layers = reader.integer("d_model"), reader.integer("encoder_layers")
    reader.require_value("num_hidden_layers", layers)
    activation = reader.choice("activation_function", activation, HF_ACTIVATIONS)
    decoder, encoder = (
        _read_stack(reader, stack, model_dim, activation) for stack in ("decoder", "encoder")
    )
    return c.TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=reader.integer("decoder_layers"),
        attention=decoder[0],
        feed_forward=(decoder[1],),
        topology=c.EncoderDecoder(
            num_encoder_layers=layers,
            source_vocab_size=source_vocab_size,
            attention=None if encoder[0] == decoder[0] else encoder[0],
            feed_forward=None if encoder[1] == decoder[1] else (encoder[1],),
        ),
        norm=c.LayerNorm(eps=1e-5),
        norm_placement="post",
        final_norm=False,
        embedding=c.Embedding(scale=math.sqrt(model_dim) if scaled else 1.0, positions=positions),
        head=head,
    )


def _read_stack(
    reader: ConfigReader, stack: str, model_dim: int, activation: Any
) -> tuple[c.MultiHead, c.MLP]:
    """Heads and feed-forward of one stack."""
    heads = reader.positive_integer(f"{stack}_attention_heads")
    attention = c.MultiHead(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, model_dim // heads),
        positions=(None,),
        biases=ALL_BIASES,
    )
    hidden_dim = reader.integer(f"{stack}_ffn_dim")
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


def sinusoid_tables(hf_config: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Sinusoid tables that FSMT files store, by tensor name.

    Args:
        hf_config: The config.json.

    Returns:
        One table per stack; the row of padding is zero.
    """
    padding, width = hf_config["pad_token_id"], hf_config["d_model"]
    rows = jnp.arange(hf_config.get("max_position_embeddings", 1024) + padding + 1)
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
        "activation_function": hf_activation_name(branch.activation),
        "scale_embedding": config.embedding.scale != 1,
        "is_encoder_decoder": True,
        "dropout": 0.0,
        "activation_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    for stack, own in (("encoder", config.encoder_config), ("decoder", config)):
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
        ignored_tensors=(SINUSOID_TENSORS, r"model\.(encoder|decoder)\.embed_tokens\.weight"),
    ),
    Family(
        "fsmt",
        "FSMTForConditionalGeneration",
        read_fsmt,
        write_fsmt,
        FSMT_TABLE,
        ignored_tensors=(SINUSOID_TENSORS,),
        constant_tensors=sinusoid_tables,
    ),
)
