"""BLOOM: ALiBi, embedding norm, fused QKV with heads interleaved."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt2 import fused_qkv_rules
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import FusedQKVPerGroup, LinearKernel

LAYER = "transformer.h.{layer}"
TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.word_embeddings.weight", "embedding/tokens/embedding"),
        *norm_rules("transformer.word_embeddings_layernorm", "embedding/norm"),
        *norm_rules("transformer.ln_f", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.input_layernorm", "pre_attention_norm"),
            *fused_qkv_rules(
                f"{LAYER}.self_attention.query_key_value", FusedQKVPerGroup(), FusedQKVPerGroup()
            ),
            *linear_rules(f"{LAYER}.self_attention.dense", "attention/out", input_axes=2),
            *norm_rules(f"{LAYER}.post_attention_layernorm", "pre_feed_forward_norm"),
            *linear_rules(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
            *linear_rules(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
        )
    },
)
# Settings of the training code in early checkpoints.
TRAINING_ATTRIBUTES = (
    "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
    "seq_length skip_bias_add skip_bias_add_qkv".split()
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a bloom model."""
    reader.require_value("apply_residual_connection_post_layernorm", False)
    for name in TRAINING_ATTRIBUTES:
        reader.get(name)
    model_dim = _read_either(reader, "hidden_size", "n_embed")
    heads = _read_either(reader, "n_head", "num_attention_heads")
    reader.require_value("n_inner", 4 * model_dim)
    norm = c.LayerNorm(eps=reader.number("layer_norm_epsilon", 1e-5))
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=model_dim,
        num_layers=_read_either(reader, "n_layer", "num_hidden_layers"),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(1, model_dim // heads),
            positions=(c.Alibi(),),
            biases=ALL_BIASES,
        ),
        feed_forward=(c.MLP(hidden_dim=4 * model_dim, activation="gelu_tanh", bias=True),),
        norm=norm,
        embedding=c.Embedding(norm=norm),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", True)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A bloom's configuration from ours."""
    alibi = isinstance(config.multi_head.positions[0], c.Alibi)
    if not (isinstance(config.topology, c.Decoder) and alibi):
        return None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "n_layer": config.num_layers,
        "n_head": config.multi_head.num_heads,
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
    }


def _read_either(reader: ConfigReader, name: str, other: str) -> int:
    """Return an integer that is stored under either of two names."""
    reader.get(name)
    return reader.positive_integer(other if other in reader else name)


FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        read,
        write,
        TABLE,
        key_renames=((r"^(?!transformer\.|lm_head\.)", "transformer."),),
    ),
)
