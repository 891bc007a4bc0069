"""Qwen (2023): Llama with biases on queries, keys and values, under its own tensor names.

For sequences longer than ``seq_length`` its code also scales RoPE and queries; this is not
supported.
"""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import Flatten, Fused, LinearKernel

LAYER = "transformer.h.{layer}"
QKV = ("attention/query", "attention/key", "attention/value")
TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.wte.weight", "embedding/tokens/embedding"),
        *norm_rules("transformer.ln_f", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.ln_1", "pre_attention_norm"),
            *norm_rules(f"{LAYER}.ln_2", "pre_feed_forward_norm"),
            MappingRule(f"{LAYER}.attn.c_attn.weight", tuple(f"{x}/kernel" for x in QKV), Fused()),
            MappingRule(
                f"{LAYER}.attn.c_attn.bias", tuple(f"{x}/bias" for x in QKV), Fused(part=Flatten())
            ),
            *linear_rules(f"{LAYER}.attn.c_proj", "attention/out", input_axes=2),
            *linear_rules(f"{LAYER}.mlp.w1", "feed_forward/up"),
            *linear_rules(f"{LAYER}.mlp.w2", "feed_forward/gate"),
            *linear_rules(f"{LAYER}.mlp.c_proj", "feed_forward/down"),
        )
    },
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


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a qwen model."""
    for name in (*LONG_TEXT_ATTRIBUTES, *KERNEL_ATTRIBUTES):
        reader.get(name)
    reader.require_value("scale_attn_weights", True)
    heads = reader.integer("num_attention_heads")
    bias = not reader.boolean("no_bias", True)
    width = reader.integer("hidden_size")
    hidden = reader.integer("intermediate_size")
    if hidden % 2:
        reader.add_problem("intermediate_size", "it must be twice the hidden size of the GLU.")
    return c.TransformerConfig(
        **p.read_sizes(reader),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=reader.integer("kv_channels", width // max(1, heads)),
            positions=(
                c.Rope(
                    base=reader.number("rotary_emb_base", 10_000.0),
                    fraction=reader.number("rotary_pct", 1.0),
                ),
            ),
            biases=p.ALL_BIASES if bias else ("query", "key", "value"),
        ),
        feed_forward=(c.GLU(hidden_dim=max(1, hidden // 2), bias=bias),),
        norm=c.RMSNorm(eps=reader.number("layer_norm_epsilon", 1e-6)),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A qwen's configuration from ours, without scaling for long sequences."""
    attention, branch = config.multi_head, config.feed_forward[0]
    if not (p.is_rope_decoder(config) and isinstance(branch, c.GLU)):
        return None
    rope = p.first_rope(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.head_dim,
        "intermediate_size": 2 * branch.hidden_dim,
        "no_bias": not branch.bias,
        "rotary_emb_base": rope.base,
        "rotary_pct": rope.fraction,
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    }


FAMILIES = (
    Family(
        "qwen",
        "QWenLMHeadModel",
        read,
        write,
        TABLE,
        in_transformers=False,
        ignored_tensors=(*INV_FREQ_PATTERNS, r".*\.attn\.(masked_)?bias"),
    ),
)
