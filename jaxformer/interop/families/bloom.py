"""BLOOM: ALiBi, embedding norm, fused QKV with heads interleaved."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.families.gpt2 import fused
from jaxformer.interop.families.pieces import ALL_BIASES
from jaxformer.interop.family import Family
from jaxformer.interop.settings import Settings
from jaxformer.interop.tables import Row, Table, linear, norm
from jaxformer.interop.transforms import GroupedHeads, Kernel

LAYER = "transformer.h.{layer}"
TABLE = Table(
    whole=(
        Row("transformer.word_embeddings.weight", "embedding/tokens/embedding"),
        *norm("transformer.word_embeddings_layernorm", "embedding/norm"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        Row("lm_head.weight", "head/kernel", Kernel()),
    ),
    stacks={
        "decoder": (
            *norm(f"{LAYER}.input_layernorm", "pre_attention_norm"),
            *fused(f"{LAYER}.self_attention.query_key_value", GroupedHeads(), GroupedHeads()),
            *linear(f"{LAYER}.self_attention.dense", "attention/out", input_axes=2),
            *norm(f"{LAYER}.post_attention_layernorm", "pre_feed_forward_norm"),
            *linear(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
            *linear(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
        )
    },
)
# What the first files say of the code that trained them.
OF_TRAINING = (
    "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi "
    "seq_length skip_bias_add skip_bias_add_qkv".split()
)


def read(settings: Settings) -> c.TransformerConfig:
    """Our configuration from a bloom's."""
    settings.only("apply_residual_connection_post_layernorm", False)
    for name in OF_TRAINING:
        settings.value(name)
    model_dim = _either(settings, "hidden_size", "n_embed")
    heads = _either(settings, "n_head", "num_attention_heads")
    settings.only("n_inner", 4 * model_dim)
    norm = c.LayerNorm(eps=settings.number("layer_norm_epsilon", 1e-5))
    return c.TransformerConfig(
        vocab_size=settings.integer("vocab_size"),
        model_dim=model_dim,
        num_layers=_either(settings, "n_layer", "num_hidden_layers"),
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
        head=c.Head(tied=settings.flag("tie_word_embeddings", True)),
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


def _either(settings: Settings, name: str, other: str) -> int:
    """An integer stored under either of two names."""
    settings.value(name)
    return settings.integer(other if other in settings else name)


FAMILIES = (
    Family(
        "bloom",
        "BloomForCausalLM",
        read,
        write,
        TABLE,
        spellings=((r"^(?!transformer\.|lm_head\.)", "transformer."),),
    ),
)
