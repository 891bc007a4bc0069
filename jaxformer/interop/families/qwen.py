"""Qwen (2023): Llama with biases on queries, keys and values, under its own tensor names.

For sequences longer than ``seq_length`` its code also scales RoPE and queries; this is not
supported.
"""

from typing import Any, cast

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.option_fields import Field, FieldTable, template
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family

LAYER = "transformer.h.{layer}"
MAPPING = m.decoder_mapping(
    m.top_level_rules("transformer.wte", "transformer.ln_f"),
    *m.layer_norm_rules(LAYER, pre_attention_norm="ln_1", pre_feed_forward_norm="ln_2"),
    *m.fused_rules(f"{LAYER}.attn.c_attn", "attention", p.QKV),
    *m.branch_rules(f"{LAYER}.attn", "attention", out="c_proj"),
    *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="w1", gate="w2", down="c_proj"),
)
LONG_TEXT_ATTRIBUTES = (
    "seq_length",
    "use_dynamic_ntk",
    "use_logn_attn",
)  # these affect only sequences longer than seq_length
KERNEL_ATTRIBUTES = (
    "bf16 fp16 fp32 onnx_safe use_flash_attn use_cache_quantization use_cache_kernel "
    "softmax_in_fp32".split()
)


TABLE = FieldTable(
    template=template(c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=2, biases=p.QKV)),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "model_dim"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "attention.num_heads"),
        Field(
            "kv_channels",
            "attention.head_dim",
            lambda options: options["model_dim"] // max(1, options["attention.num_heads"]),
        ),
        Field("no_bias", "feed_forward.bias", True, choices={True: False, False: True}),
        Field("rotary_emb_base", "attention.positions.base", 10_000.0),
        Field("rotary_pct", "attention.positions.fraction", 1.0),
        Field("layer_norm_epsilon", "norm.eps", 1e-6),
        Field("tie_word_embeddings", "head.tied", False),
    ),
    constants={"scale_attn_weights": True},
    unused=(*LONG_TEXT_ATTRIBUTES, *KERNEL_ATTRIBUTES),
    written={"use_dynamic_ntk": False, "use_logn_attn": False},
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a qwen model."""
    hidden = reader.integer("intermediate_size")
    if hidden % 2:
        reader.add_problem("intermediate_size", "it must be twice the hidden size of the GLU.")
    has_biases = not reader.boolean("no_bias", True)
    options = {
        "feed_forward.hidden_dim": max(1, hidden // 2),
        "attention.biases": p.ALL_BIASES if has_biases else p.QKV,
    }
    return TABLE.read(reader, options)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen's configuration from ours, without scaling for long sequences."""
    fields, branch = TABLE.write(config), cast(c.GLU, config.feed_forward[0])
    return fields and {**fields, "intermediate_size": 2 * branch.hidden_dim}


FAMILIES = (
    Family(
        "qwen",
        "QWenLMHeadModel",
        read,
        write,
        MAPPING,
        in_transformers=False,
        ignored_tensors=(*INV_FREQ_PATTERNS, r".*\.attn\.(masked_)?bias"),
    ),
)
