"""GPT-NeoX and Pythia: parallel or serial blocks with two norms, fused QKV by head."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt2 import fused_qkv_rules
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like import (
    ALL_BIASES,
    first_rope,
    is_rope_decoder,
    read_sizes,
)
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import FusedQKVPerGroup, LinearKernel

LAYER = "gpt_neox.layers.{layer}"
TABLE = ParamMapping(
    top_level=(
        MappingRule("gpt_neox.embed_in.weight", "embedding/tokens/embedding"),
        *norm_rules("gpt_neox.final_layer_norm", "decoder/final_norm"),
        MappingRule("embed_out.weight", "head/kernel", LinearKernel()),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.input_layernorm", "pre_attention_norm"),
            *fused_qkv_rules(
                f"{LAYER}.attention.query_key_value", FusedQKVPerGroup(), FusedQKVPerGroup()
            ),
            *linear_rules(f"{LAYER}.attention.dense", "attention/out", input_axes=2),
            *norm_rules(f"{LAYER}.post_attention_layernorm", "pre_feed_forward_norm"),
            *linear_rules(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
            *linear_rules(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gpt_neox model."""
    sizes = read_sizes(reader)
    heads = reader.positive_integer("num_attention_heads")
    rope = read_rope(reader, base_name="rotary_emb_base", fraction=0.25, fraction_name="rotary_pct")
    parallel = reader.boolean("use_parallel_residual", True)
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(1, sizes["model_dim"] // heads),
            positions=(rope,),
            biases=ALL_BIASES if reader.boolean("attention_bias", True) else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=reader.integer("intermediate_size"),
                activation=reader.choice("hidden_act", "gelu", HF_ACTIVATIONS),
                bias=True,
            ),
        ),
        norm=c.LayerNorm(eps=reader.number("layer_norm_eps", 1e-5)),
        block="parallel" if parallel else "serial",
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False)),
    )


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gpt_neox's configuration from ours."""
    branch = config.feed_forward[0]
    if not (is_rope_decoder(config) and isinstance(branch, c.MLP)):
        return None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.multi_head.num_heads,
        "attention_bias": "out" in config.multi_head.biases,
        "intermediate_size": branch.hidden_dim,
        "hidden_act": hf_activation_name(branch.activation),
        "layer_norm_eps": config.norm.eps,
        "use_parallel_residual": config.block == "parallel",
        "tie_word_embeddings": config.head.tied,
        **write_rope(first_rope(config), base_name="rotary_emb_base", fraction_name="rotary_pct"),
    }


FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        read,
        write,
        TABLE,
        ignored_tensors=(
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        ),
    ),
)
