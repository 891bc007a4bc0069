"""BLOOM and MPT: ALiBi, fused queries, keys and values; BLOOM has a norm of the embedding."""

from collections.abc import Callable
from typing import Any

from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    OPTIONAL_NUMBER,
    Derived,
    Field,
    Fixed,
    HeadsField,
    Repeated,
    Unused,
    fixed,
    four_widths,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt_neox import block_rules, two_norms
from jaxformer.interop.families.llama_like import QKV
from jaxformer.interop.family import Family
from jaxformer.zoo.bloom import BLOOM
from jaxformer.zoo.mpt import MPT

LAYER = "transformer.h.{layer}"
BLOCK = "transformer.blocks.{layer}"
LAYER_NORMS = ("low_precision_layernorm", "layernorm")


def _either(other: str) -> Callable[[ConfigReader, str, Any], int]:
    """Read an integer that is stored under either of two names."""

    def read(reader: ConfigReader, name: str, default: Any) -> int:
        reader.get(name)
        return reader.positive_integer(other if other in reader else name)

    return read


def zero_is_none(reader: ConfigReader, name: str, default: Any) -> float | None:
    """Read a number; 0 means None."""
    return reader.optional_number(name) or None


# Fields of released files, such as of ALiBi, that transformers takes for granted.
MPT_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        BLOOM,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim", None, _either("n_embed")),
            Field("n_layer", "num_layers", None, _either("num_hidden_layers")),
            HeadsField("n_head", parse=_either("num_attention_heads")),
            Derived("feed_forward.hidden_dim", four_widths),
            Repeated("n_inner", four_widths),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            Field("layer_norm_epsilon", "embedding.norm.eps", 1e-5),
            Field("tie_word_embeddings", "head.tied", True),
            *fixed(apply_residual_connection_post_layernorm=False),
            # Settings of the training code in early checkpoints.
            Unused(
                *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
                *("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv"),
            ),
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.word_embeddings", "transformer.ln_f"),
            *m.norm_rules("transformer.word_embeddings_layernorm", "embedding/norm"),
            *two_norms(LAYER),
            *block_rules(LAYER, "self_attention"),
        ),
        key_renames=((r"^(?!transformer\.|lm_head\.)", "transformer."),),
    ),
    # As BLOOM, except: no biases, no norm of the embedding, perhaps clipped queries, keys, values.
    Family(
        "mpt",
        "MptForCausalLM",
        MPT,
        (
            Field("vocab_size", "vocab_size"),
            Field("d_model", "model_dim", 2048),
            Field("n_layers", "num_layers", 24),
            HeadsField("n_heads", default=16, width="d_model"),
            Derived("feed_forward.hidden_dim", four_widths),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            Field("attn_config.clip_qkv", "attention.clip_qkv", parse=zero_is_none),
            Field("attn_config.softmax_scale", "attention.scale", parse=OPTIONAL_NUMBER),
            Field("tie_word_embeddings", "head.tied", True),
            *fixed(expansion_ratio=4, no_bias=True, logit_scale=None),
            Fixed("norm_type", LAYER_NORMS),
            *(Fixed(f"attn_config.{name}", (value,)) for name, value in MPT_ATTENTION.items()),
            # With ALiBi there is no position table; the others concern training and kernels.
            Unused("learned_pos_emb", "max_seq_len", "embedding_fraction", "init_device"),
            Unused("init_config", "tokenizer_name", "verbose", "fc_type"),
            Unused("attn_config.attn_impl"),
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.wte", "transformer.norm_f"),
            *m.layer_norm_rules(BLOCK, pre_attention_norm="norm_1", pre_feed_forward_norm="norm_2"),
            *m.fused_rules(f"{BLOCK}.attn.Wqkv", "attention", QKV),
            *m.branch_rules(f"{BLOCK}.attn", "attention", out="out_proj"),
            *m.branch_rules(f"{BLOCK}.ffn", "feed_forward", up="up_proj", down="down_proj"),
        ),
        length_name="max_seq_len",
    ),
)
