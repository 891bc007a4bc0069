"""Marian and FSMT: post-norm encoder-decoders with other sinusoid layouts.

Marian shares one embedding between source, target and head, and adds a bias to the logits. FSMT
has three embeddings, and its positions start at the padding id + 1.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.option_fields import (
    POSITIVE_INTEGER,
    Field,
    FieldTable,
    template,
    with_options,
)
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import Flatten, LinearKernel

ENCODER, DECODER = "model.encoder.layers.{layer}", "model.decoder.layers.{layer}"


def attention_rules(theirs: str, ours: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of an attention branch and its post-norm."""
    return (
        *m.attention_rules(theirs, ours, out="out_proj"),
        *m.norm_rules(f"{theirs}_layer_norm", f"post_{ours}_norm"),
    )


def feed_forward_rules(theirs: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of the feed-forward branch and its post-norm."""
    return (
        *m.branch_rules(theirs, "feed_forward", up="fc1", down="fc2"),
        *m.norm_rules(f"{theirs}.final_layer_norm", "post_feed_forward_norm"),
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
MARIAN_MAPPING = m.ParamMapping(
    top_level=(
        m.MappingRule("model.shared.weight", "embedding/tokens/embedding"),
        m.MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
        m.MappingRule("final_logits_bias", "head/bias", Flatten(leading=1)),
    ),
    stacks=STACKS,
)
FSMT_MAPPING = m.ParamMapping(
    top_level=(
        *m.top_level_rules("model.decoder.embed_tokens", head="model.decoder.output_projection"),
        m.MappingRule("model.encoder.embed_tokens.weight", "source_embedding/tokens/embedding"),
    ),
    stacks=STACKS,
)
SINUSOID_TENSORS = r"model\.(encoder|decoder)\.embed_positions\.weights?"
SIZES = (
    Field("d_model", "model_dim"),
    Field("encoder_layers", "topology.num_encoder_layers"),
    Field("decoder_layers", "num_layers"),
    Field("decoder_attention_heads", "attention.num_heads", None, POSITIVE_INTEGER),
    Field("decoder_ffn_dim", "feed_forward.hidden_dim"),
)
CONSTANTS = {
    **{"is_encoder_decoder": True, "static_position_embeddings": True},
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm"), False),
}
MARIAN = FieldTable(
    template=template(
        c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=1, positions=(None,), biases=ALL_BIASES),
        c.MLP(hidden_dim=1, bias=True),
        topology=c.EncoderDecoder(num_encoder_layers=1),
        norm=c.LayerNorm(eps=1e-5),
        norm_placement="post",
        final_norm=False,
        embedding=c.Embedding(positions=c.Sinusoid(layout="halves")),
        head=c.LMHead(tied=True, bias=True),
    ),
    fields=(
        *SIZES,
        Field("vocab_size", "vocab_size"),
        Field("activation_function", "feed_forward.activation", "gelu"),
    ),
    constants={
        **CONSTANTS,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,  # False also unties source and target
    },
    unused=("extra_pos_embeddings", "add_bias_logits", "_num_labels"),
    written={
        "is_encoder_decoder": True,
        **{"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0},
    },
)
FSMT = replace(
    MARIAN,
    template=replace(
        MARIAN.template,
        embedding=c.Embedding(positions=c.Sinusoid(layout="tensor2tensor")),
        head=c.LMHead(),
    ),
    fields=(
        *SIZES,
        Field("tgt_vocab_size", "vocab_size"),
        Field("src_vocab_size", "topology.source_vocab_size"),
        Field("activation_function", "feed_forward.activation", "relu"),
    ),
    constants={**CONSTANTS, "tie_word_embeddings": False},
    unused=(*MARIAN.unused, "langs", "decoder"),
)


def read_marian(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a marian model."""
    config = _read(reader, MARIAN, reader.boolean("scale_embedding", False))
    reader.require_value("decoder_vocab_size", config.vocab_size)
    return config


def read_fsmt(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of an fsmt model."""
    config = _read(reader, FSMT, reader.boolean("scale_embedding", True))
    offset = reader.integer("pad_token_id", 1) + 1
    return with_options(config, {"embedding.positions.offset": offset})


def _read(reader: ConfigReader, table: FieldTable, scaled: bool) -> c.TransformerConfig:
    scale = math.sqrt(reader.integer("d_model")) if scaled else 1.0
    config = table.read(reader, {"embedding.scale": scale})
    reader.require_value("num_hidden_layers", len(config.encoder_layers))
    heads = reader.positive_integer("encoder_attention_heads")
    if config.model_dim % heads and not reader.problems:
        reader.add_problem(
            "encoder_attention_heads", f"it must divide d_model, {config.model_dim}."
        )
    branch: Any = config.feed_forward[0]
    attention = replace(
        p.heads_of(config),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, config.model_dim // heads),
    )
    branch = replace(branch, hidden_dim=reader.integer("encoder_ffn_dim"))
    options = {
        "topology.attention": None if attention == config.attention else attention,
        "topology.feed_forward": None if (branch,) == config.feed_forward else (branch,),
    }
    return with_options(config, options)


def write_marian(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A marian's configuration from ours."""
    fields = _write(config, MARIAN)
    return fields and {
        **fields,
        "tie_word_embeddings": config.head.tied,
        "pad_token_id": config.vocab_size - 1,
        "decoder_start_token_id": config.vocab_size - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }


def write_fsmt(config: c.TransformerConfig) -> dict[str, Any] | None:
    """An fsmt's configuration from ours."""
    fields, positions = _write(config, FSMT), config.embedding.positions
    if fields is None or not isinstance(positions, c.Sinusoid):
        return None
    return {
        **fields,
        "langs": ["source", "target"],
        "tie_word_embeddings": False,
        "pad_token_id": positions.offset - 1,
    }


def _write(config: c.TransformerConfig, table: FieldTable) -> dict[str, Any] | None:
    fields = table.write(config)
    branches = {layer.feed_forward for layer in config.encoder_layers}
    if fields is None or not isinstance(mlp := branches.pop(), c.MLP) or branches:
        return None
    return {
        **fields,
        "scale_embedding": config.embedding.scale != 1,
        "encoder_attention_heads": config.encoder_layers[0].attention.num_heads,
        "encoder_ffn_dim": mlp.hidden_dim,
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


FAMILIES = (
    Family(
        "marian",
        "MarianMTModel",
        read_marian,
        write_marian,
        MARIAN_MAPPING,
        ignored_tensors=(SINUSOID_TENSORS, r"model\.(encoder|decoder)\.embed_tokens\.weight"),
    ),
    Family(
        "fsmt",
        "FSMTForConditionalGeneration",
        read_fsmt,
        write_fsmt,
        FSMT_MAPPING,
        ignored_tensors=(SINUSOID_TENSORS,),
        constant_tensors=sinusoid_tables,
    ),
)
