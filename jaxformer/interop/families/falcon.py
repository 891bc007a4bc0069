"""Falcon: parallel blocks with one or two norms, or serial blocks with ALiBi (falcon-rw)."""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt2 import fused_qkv_rules
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.llama_like import ALL_BIASES, read_sizes
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.rope_config import read_rope, write_rope
from jaxformer.interop.transforms import FusedQKVPerGroup, LinearKernel

LAYER = "transformer.h.{layer}"
LAYER_RULES = (
    *fused_qkv_rules(
        f"{LAYER}.self_attention.query_key_value", FusedQKVPerGroup(), FusedQKVPerGroup()
    ),
    *linear_rules(f"{LAYER}.self_attention.dense", "attention/out", input_axes=2),
    *linear_rules(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up"),
    *linear_rules(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down"),
)


def _is_parallel(config: c.TransformerConfig) -> bool:
    return config.block == "parallel"


def _is_serial(config: c.TransformerConfig) -> bool:
    return config.block == "serial"


def _norm_rules() -> tuple[MappingRule, ...]:
    """Mapping rules of the norms, whose names depend on the block type."""
    rows = norm_rules(f"{LAYER}.input_layernorm", "pre_norm")
    for only, names in (
        (_is_parallel, ("ln_attn", "ln_mlp")),
        (_is_serial, ("input_layernorm", "post_attention_layernorm")),
    ):
        ours = ("pre_attention_norm", "pre_feed_forward_norm")
        for theirs, path in zip(names, ours, strict=True):
            rows += tuple(
                replace(row, condition=only) for row in norm_rules(f"{LAYER}.{theirs}", path)
            )
    return rows


TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.word_embeddings.weight", "embedding/tokens/embedding"),
        *norm_rules("transformer.ln_f", "decoder/final_norm"),
        MappingRule("lm_head.weight", "head/kernel", LinearKernel()),
    ),
    stacks={"decoder": (*_norm_rules(), *LAYER_RULES)},
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a falcon model."""
    reader.require_value("apply_residual_connection_post_layernorm", False)
    reader.get("ff_factor")  # ffn_hidden_size has the same information
    reader.require_value("n_embed", reader.integer("hidden_size"))
    sizes = read_sizes(reader)
    heads = reader.positive_integer("num_attention_heads")
    head_dim = max(1, sizes["model_dim"] // heads)
    bias = reader.boolean("bias", False)
    alibi, rope = reader.boolean("alibi", False), read_rope(reader)
    if alibi and not _slopes_are_powers_of_two(heads):
        reader.add_problem(
            "alibi",
            f"transformers rounds the ALiBi slopes of {heads} heads to bfloat16, and jaxformer "
            "does not; pass ignore=('alibi',) to load it anyway.",
        )
    return c.TransformerConfig(
        **sizes,
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=_kv_heads(reader, heads),
            head_dim=head_dim,
            positions=(c.Alibi(scale=head_dim**-0.5) if alibi else rope,),
            biases=ALL_BIASES if bias else (),
        ),
        feed_forward=(
            c.MLP(
                hidden_dim=reader.integer("ffn_hidden_size", 4 * sizes["model_dim"]),
                activation=reader.choice("activation", "gelu", HF_ACTIVATIONS),
                bias=bias,
            ),
        ),
        norm=c.LayerNorm(eps=reader.number("layer_norm_epsilon", 1e-5)),
        block=_block(reader),
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", True)),
    )


def _slopes_are_powers_of_two(heads: int) -> bool:
    """Whether bfloat16 holds every slope of ALiBi."""
    return all(math.log2(slope).is_integer() for slope in F.alibi_slopes(heads).tolist())


def _kv_heads(reader: ConfigReader, heads: int) -> int:
    stated = reader.integer("num_kv_heads", heads)
    shared = reader.boolean("multi_query", True)
    if reader.boolean("new_decoder_architecture", False):
        return stated
    if not shared and stated != heads:
        reader.add_problem("num_kv_heads", f"without multi_query there are {heads}, one per head.")
    return 1 if shared else heads


def _block(reader: ConfigReader) -> Any:
    """Block type: serial, parallel, or parallel with one shared norm."""
    new = reader.boolean("new_decoder_architecture", False)
    norms = reader.integer("num_ln_in_parallel_attn", 2 if new else 1)
    parallel = reader.boolean("parallel_attn", True)
    if norms not in (1, 2) or (norms == 2 and not new):
        allowed = "1 or 2" if new else "1, without new_decoder_architecture"
        reader.add_problem("num_ln_in_parallel_attn", f"expected {allowed}.")
    if new and not parallel:
        reader.add_problem("parallel_attn", "with new_decoder_architecture it must be True.")
    if not parallel:
        return "serial"
    return "parallel" if norms == 2 else "parallel_shared_norm"


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A falcon's configuration from ours."""
    attention, branch = config.multi_head, config.feed_forward[0]
    positions = attention.positions[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(branch, c.MLP):
        return None
    if not isinstance(positions, c.Rope | c.Alibi):
        return None
    heads, kv_heads, serial = attention.num_heads, attention.num_kv_heads, config.block == "serial"
    new = config.block == "parallel" or (not serial and kv_heads not in (1, heads))
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1 != heads,
        "parallel_attn": not serial,
        "num_ln_in_parallel_attn": 2 if config.block == "parallel" else 1,
        "ffn_hidden_size": branch.hidden_dim,
        "activation": hf_activation_name(branch.activation),
        "bias": branch.bias,
        "alibi": isinstance(positions, c.Alibi),
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
    }
    return fields if isinstance(positions, c.Alibi) else {**fields, **write_rope(positions)}


FAMILIES = (Family("falcon", "FalconForCausalLM", read, write, TABLE),)
