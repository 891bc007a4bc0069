"""BLOOM: ALiBi, embedding norm, fused QKV with heads interleaved."""

from collections.abc import Callable
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt_neox import block_rules, two_norms
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.option_fields import Field, FieldTable, template
from jaxformer.interop.family import Family

LAYER = "transformer.h.{layer}"
MAPPING = m.decoder_mapping(
    (
        *m.top_level_rules("transformer.word_embeddings", "transformer.ln_f"),
        *m.norm_rules("transformer.word_embeddings_layernorm", "embedding/norm"),
    ),
    *two_norms(LAYER),
    *block_rules(LAYER, "self_attention"),
)


def _either(other: str) -> Callable[[ConfigReader, str, Any], int]:
    """Read an integer that is stored under either of two names."""

    def read(reader: ConfigReader, name: str, default: Any) -> int:
        reader.get(name)
        return reader.positive_integer(other if other in reader else name)

    return read


TABLE = FieldTable(
    template=template(
        c.MultiHead(
            num_heads=1, num_kv_heads=1, head_dim=1, positions=(c.Alibi(),), biases=ALL_BIASES
        ),
        c.MLP(hidden_dim=1, bias=True),
        norm=c.LayerNorm(),
        embedding=c.Embedding(norm=c.LayerNorm()),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "model_dim", None, _either("n_embed")),
        Field("n_layer", "num_layers", None, _either("num_hidden_layers")),
        Field("n_head", "attention.num_heads", None, _either("num_attention_heads")),
        Field("layer_norm_epsilon", "norm.eps", 1e-5),
        Field("layer_norm_epsilon", "embedding.norm.eps", 1e-5),
        Field("tie_word_embeddings", "head.tied", True),
    ),
    constants={"apply_residual_connection_post_layernorm": False},
    # Settings of the training code in early checkpoints.
    unused=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("offset_alibi", "seq_length", "skip_bias_add", "skip_bias_add_qkv"),
    ),
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a bloom model."""
    config = TABLE.read(reader)
    reader.require_value("n_inner", 4 * config.model_dim)
    return config


FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        read,
        TABLE.write,
        MAPPING,
        key_renames=((r"^(?!transformer\.|lm_head\.)", "transformer."),),
    ),
)
