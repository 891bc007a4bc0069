"""Marian, FSMT, M2M-100 (NLLB), Pegasus and XGLM: ReLU or GELU, biases, sinusoids.

Marian and Pegasus share one embedding between source, target and head, and add a bias to the
logits. FSMT has three embeddings, and its positions start at the padding id + 1, as in M2M-100.
Marian and FSMT are post-norm. XGLM is a decoder like the decoder of M2M-100.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    FactorField,
    Field,
    Fields,
    Fixed,
    HeadsField,
    Options,
    Repeated,
    Unused,
    Written,
    fixed,
    read_options,
    root_of_width,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.family import Family
from jaxformer.interop.transforms import LINEAR
from jaxformer.zoo.sizes import like
from jaxformer.zoo.translators import M2M_100, PEGASUS, XGLM

ENCODER, DECODER = "model.encoder.layers.{layer}", "model.decoder.layers.{layer}"


def attention_rules(theirs: str, ours: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of an attention branch and its norm, which may stand before or after it."""
    return (
        *m.attention_rules(theirs, ours, out="out_proj"),
        *m.norm_rules(f"{theirs}_layer_norm", f"pre_{ours}_norm"),
        *m.norm_rules(f"{theirs}_layer_norm", f"post_{ours}_norm"),
    )


def feed_forward_rules(theirs: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of the feed-forward branch and its norm."""
    return (
        *m.branch_rules(theirs, "feed_forward", up="fc1", down="fc2"),
        *m.norm_rules(f"{theirs}.final_layer_norm", "pre_feed_forward_norm"),
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
SHARED_EMBEDDING = m.ParamMapping(
    top_level=(
        m.MappingRule("model.shared.weight", "embedding/tokens/embedding"),
        m.MappingRule("lm_head.weight", "head/kernel", LINEAR),
        m.MappingRule("final_logits_bias", "head/bias", "x -> 1 x"),
        *m.norm_rules("model.encoder.layer_norm", "encoder/final_norm"),
        *m.norm_rules("model.decoder.layer_norm", "decoder/final_norm"),
    ),
    stacks=STACKS,
)
IGNORED_TENSORS = (
    r"model\.((encoder|decoder)\.)?embed_positions\.weights?",  # sinusoids
    r"model\.(encoder|decoder)\.embed_tokens\.weight",
)
XGLM_LAYER = "model.layers.{layer}"
MARIAN = like(PEGASUS, norm_placement="post", final_norm=False)
FSMT = like(
    MARIAN, embedding=c.Embedding(positions=c.Sinusoid(layout="tensor2tensor")), head=c.LMHead()
)
ENCODER_FIELDS = (
    HeadsField("encoder_attention_heads", width="d_model"),
    Field("encoder_ffn_dim", "feed_forward.hidden_dim"),
)


class PaddingField(Field):
    """The id of padding, at which the rows of the positions start, after one that is zero."""

    def read_value(self, reader: ConfigReader, options: Options) -> int:
        return int(super().read_value(reader, options)) + 1

    def write_value(self, value: int) -> int:
        return value - 1


@dataclass(frozen=True)
class Encoder:
    """Heads and width of the encoder's layers, where they differ from the decoder's.

    Attributes:
        template: Template of the family.
    """

    template: c.TransformerConfig

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The encoder's attention and network; None are the decoder's."""
        encoder_options = read_options(reader, ENCODER_FIELDS, options)
        decoder = with_options(self.template, options)
        encoder = with_options(decoder, encoder_options)
        parts = {name: getattr(encoder, name) for name in ("attention", "feed_forward")}
        return {
            f"topology.{name}": None if part == getattr(decoder, name) else part
            for name, part in parts.items()
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        return write_options(model.encoder_layers[0], ENCODER_FIELDS)


def last_token(model: c.TransformerConfig) -> int:
    """The id of the last token, which is padding in Marian."""
    return model.vocab_size - 1


def fields(*, activation: str, scaled: bool, pre_norm: bool = False) -> Fields:
    """Fields of all encoder-decoders, with these defaults."""
    return (
        Field("d_model", "model_dim"),
        Field("encoder_layers", "topology.num_encoder_layers"),
        Repeated("num_hidden_layers", lambda x: x["topology.num_encoder_layers"]),
        Field("decoder_layers", "num_layers"),
        HeadsField("decoder_attention_heads", width="d_model"),
        Field("decoder_ffn_dim", "feed_forward.hidden_dim"),
        Field("activation_function", "feed_forward.activation", activation),
        FactorField("scale_embedding", "embedding.scale", scaled, factor=root_of_width),
        *fixed(is_encoder_decoder=True, static_position_embeddings=True),
        *fixed(normalize_before=pre_norm, add_final_layer_norm=pre_norm, normalize_embedding=False),
        Unused("extra_pos_embeddings", "add_bias_logits", "_num_labels"),
        Written(is_encoder_decoder=True),
        Written(dropout=0.0, activation_dropout=0.0, attention_dropout=0.0),
    )


def sinusoid_tables(hf_config: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Sinusoid tables that FSMT files store, by tensor name.

    Args:
        hf_config: The config.json.

    Returns:
        One table per stack; the row of padding is zero.
    """
    padding = hf_config["pad_token_id"]
    table = _sinusoids(hf_config, "tensor2tensor", further_rows=padding + 1)
    table[padding] = 0
    return _of_both_stacks(table)


def pegasus_tables(hf_config: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Sinusoid tables that Pegasus files store, by tensor name."""
    return _of_both_stacks(_sinusoids(hf_config, "halves"))


def _sinusoids(hf_config: Mapping[str, Any], layout: Any, further_rows: int = 0) -> np.ndarray:
    rows = jnp.arange(hf_config.get("max_position_embeddings", 1024) + further_rows)
    return np.array(F.sinusoidal_positions(rows, hf_config["d_model"], layout=layout))


def _of_both_stacks(table: np.ndarray) -> Mapping[str, np.ndarray]:
    return {f"model.{stack}.embed_positions.weight": table for stack in ("encoder", "decoder")}


FAMILIES = (
    Family(
        "marian",
        "MarianMTModel",
        MARIAN,
        (
            *fields(activation="gelu", scaled=False),
            Field("vocab_size", "vocab_size"),
            Repeated("decoder_vocab_size", lambda options: options["vocab_size"]),
            # A head of its own also has an embedding of its own for the source.
            *fixed(tie_word_embeddings=True, share_encoder_decoder_embeddings=True),
            Written(pad_token_id=last_token, decoder_start_token_id=last_token),
            Written(eos_token_id=0, forced_eos_token_id=0, tie_word_embeddings=True),
            Encoder(MARIAN),
        ),
        SHARED_EMBEDDING,
        ignored_tensors=IGNORED_TENSORS,
    ),
    # As Marian, except: embeddings and head of their own, positions that start after padding.
    Family(
        "fsmt",
        "FSMTForConditionalGeneration",
        FSMT,
        (
            *fields(activation="relu", scaled=True),
            Field("tgt_vocab_size", "vocab_size"),
            Field("src_vocab_size", "topology.source_vocab_size"),
            PaddingField("pad_token_id", "embedding.positions.offset", 1),
            *fixed(tie_word_embeddings=False),
            Unused("langs", "decoder"),
            Written(langs=["source", "target"], tie_word_embeddings=False),
            Encoder(FSMT),
        ),
        m.ParamMapping(
            top_level=(
                *m.top_level_rules(
                    "model.decoder.embed_tokens", head="model.decoder.output_projection"
                ),
                m.MappingRule(
                    "model.encoder.embed_tokens.weight", "source_embedding/tokens/embedding"
                ),
            ),
            stacks=STACKS,
        ),
        ignored_tensors=IGNORED_TENSORS[:1],
        constant_tensors=sinusoid_tables,
    ),
    # As FSMT, except: norms before the branches, the embedding of Marian.
    Family(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        M2M_100,
        (
            *fields(activation="relu", scaled=True, pre_norm=True),
            Field("vocab_size", "vocab_size"),
            PaddingField("pad_token_id", "embedding.positions.offset", 1),
            *fixed(tie_word_embeddings=True),
            Encoder(M2M_100),
        ),
        SHARED_EMBEDDING,
        ignored_tensors=IGNORED_TENSORS,
    ),
    # As Marian, except: norms before the branches.
    Family(
        "pegasus",
        "PegasusForConditionalGeneration",
        PEGASUS,
        (
            *fields(activation="gelu", scaled=False, pre_norm=True),
            Field("vocab_size", "vocab_size"),
            *fixed(tie_word_embeddings=True),
            Unused("force_bos_token_to_be_generated"),
            Written(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0),
            Encoder(PEGASUS),
        ),
        SHARED_EMBEDDING,
        ignored_tensors=IGNORED_TENSORS,
        constant_tensors=pegasus_tables,
    ),
    # The decoder of M2M-100, whose positions start at 2.
    Family(
        "xglm",
        "XGLMForCausalLM",
        XGLM,
        (
            Field("vocab_size", "vocab_size"),
            Field("d_model", "model_dim", 1024),
            Field("num_layers", "num_layers", 24),
            HeadsField("attention_heads", default=16, width="d_model"),
            Field("ffn_dim", "feed_forward.hidden_dim", 4096),
            Field("activation_function", "feed_forward.activation", "gelu"),
            FactorField("scale_embedding", "embedding.scale", True, factor=root_of_width),
            Field("tie_word_embeddings", "head.tied", True),
            # The row of the padding id is zero; the first two are not used.
            Fixed("pad_token_id", (0, 1)),
            Written(dropout=0.0, attention_dropout=0.0),
        ),
        m.decoder_mapping(
            *m.top_level_rules("model.embed_tokens", "model.layer_norm"),
            *attention_rules(f"{XGLM_LAYER}.self_attn", "attention"),
            *feed_forward_rules(XGLM_LAYER),
        ),
        ignored_tensors=IGNORED_TENSORS,
    ),
)
