"""Qwen (2023): Llama with biases on queries, keys and values, under its own tensor names.

For sequences longer than ``seq_length`` its code also scales RoPE and queries; this is not
supported.
"""

from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import Field, Options, Unused, Written, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.zoo.qwen import QWEN

LAYER = "transformer.h.{layer}"


class TwiceField(Field):
    """A field that is twice the width of the network."""

    def read_value(self, reader: ConfigReader, options: Options) -> int:
        twice = super().read_value(reader, options)
        if twice % 2:
            reader.add_problem(self.name, "it must be twice the hidden size of the GLU.")
        return max(1, twice // 2)

    def write_value(self, value: int) -> int:
        return 2 * value


FAMILIES = (
    Family(
        "qwen",
        "QWenLMHeadModel",
        QWEN,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("num_hidden_layers", "num_layers"),
            Field("num_attention_heads", "attention.num_heads"),
            Field("num_attention_heads", "attention.num_kv_heads"),
            Field("kv_channels", "attention.head_dim", p.head_width),
            TwiceField("intermediate_size", "feed_forward.hidden_dim"),
            Field("no_bias", "attention.biases", True, choices={True: p.QKV, False: p.ALL_BIASES}),
            Field("no_bias", "feed_forward.bias", True, choices={True: False, False: True}),
            Field("rotary_emb_base", "attention.positions.base", 10_000.0),
            Field("rotary_pct", "attention.positions.fraction", 1.0),
            *(*p.norm_eps(name="layer_norm_epsilon"), p.UNTIED),
            *fixed(scale_attn_weights=True),
            # These affect only texts longer than seq_length, or the implementation.
            Unused("seq_length", "use_dynamic_ntk", "use_logn_attn", "bf16", "fp16", "fp32"),
            Unused("onnx_safe", "use_flash_attn", "use_cache_quantization", "use_cache_kernel"),
            Unused("softmax_in_fp32"),
            Written(use_dynamic_ntk=False, use_logn_attn=False),
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.wte", "transformer.ln_f"),
            *m.layer_norm_rules(LAYER, pre_attention_norm="ln_1", pre_feed_forward_norm="ln_2"),
            *m.fused_rules(f"{LAYER}.attn.c_attn", "attention", p.QKV),
            *m.branch_rules(f"{LAYER}.attn", "attention", out="c_proj"),
            *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="w1", gate="w2", down="c_proj"),
        ),
        in_transformers=False,
        ignored_tensors=(*INV_FREQ_PATTERNS, r".*\.attn\.(masked_)?bias"),
    ),
)
