"""BLOOM: ALiBi, embedding norm, fused QKV with heads interleaved."""

from collections.abc import Callable
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    Derived,
    Field,
    HeadsField,
    Repeated,
    Unused,
    fixed,
    four_widths,
    heads,
    template,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt_neox import block_rules, two_norms
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.family import Family

LAYER = "transformer.h.{layer}"


def _either(other: str) -> Callable[[ConfigReader, str, Any], int]:
    """Read an integer that is stored under either of two names."""

    def read(reader: ConfigReader, name: str, default: Any) -> int:
        reader.get(name)
        return reader.positive_integer(other if other in reader else name)

    return read


FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        template(
            norm=c.LayerNorm(),
            embedding=c.Embedding(norm=c.LayerNorm()),
            attention=heads(positions=(c.Alibi(),), biases=ALL_BIASES),
            feed_forward=(c.MLP(hidden_dim=1, bias=True),),
        ),
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
)
