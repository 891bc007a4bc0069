"""Falcon: parallel blocks with one or two norms, or serial blocks with ALiBi (falcon-rw)."""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.gpt_neox import block_rules, two_norms
from jaxformer.interop.families.llama_like import ALL_BIASES
from jaxformer.interop.families.option_fields import (
    POSITIVE_INTEGER,
    BiasesField,
    Field,
    FieldTable,
    four_widths,
    template,
)
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeFields

LAYER, ROPE = "transformer.h.{layer}", RopeFields()


def _is_parallel(config: c.TransformerConfig) -> bool:
    return config.block == "parallel"


def _is_serial(config: c.TransformerConfig) -> bool:
    return config.block == "serial"


PARALLEL_NORMS = m.layer_norm_rules(
    LAYER, pre_attention_norm="ln_attn", pre_feed_forward_norm="ln_mlp"
)
MAPPING = m.decoder_mapping(
    m.top_level_rules("transformer.word_embeddings", "transformer.ln_f"),
    *m.norm_rules(f"{LAYER}.input_layernorm", "pre_norm"),
    *(replace(rule, condition=_is_parallel) for rule in PARALLEL_NORMS),
    *(replace(rule, condition=_is_serial) for rule in two_norms(LAYER)),
    *block_rules(LAYER, "self_attention"),
)
TABLE = FieldTable(
    template=template(
        c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=1, positions=(None,)),
        c.MLP(hidden_dim=1),
        norm=c.LayerNorm(),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "model_dim"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "attention.num_heads", None, POSITIVE_INTEGER),
        Field("ffn_hidden_size", "feed_forward.hidden_dim", four_widths),
        Field("activation", "feed_forward.activation", "gelu"),
        Field("bias", "feed_forward.bias", False),
        BiasesField("bias", "attention.biases", False, layers=ALL_BIASES),
        Field("layer_norm_epsilon", "norm.eps", 1e-5),
        Field("tie_word_embeddings", "head.tied", True),
    ),
    constants={"apply_residual_connection_post_layernorm": False},
    unused=("ff_factor",),  # ffn_hidden_size has the same information
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a falcon model."""
    width, heads = reader.integer("hidden_size"), reader.positive_integer("num_attention_heads")
    reader.require_value("n_embed", width)
    alibi, rope = reader.boolean("alibi", False), ROPE.read_rope(reader)
    if alibi and not _slopes_are_powers_of_two(heads):
        reader.add_problem(
            "alibi",
            f"transformers rounds the ALiBi slopes of {heads} heads to bfloat16, and jaxformer "
            "does not; pass ignore=('alibi',) to load it anyway.",
        )
    options = {
        "attention.num_kv_heads": _kv_heads(reader, heads),
        "attention.positions": (c.Alibi(scale=max(1, width // heads) ** -0.5) if alibi else rope,),
        "block": _block(reader),
    }
    return TABLE.read(reader, options)


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
    attention, serial = p.heads_of(config), config.block == "serial"
    positions = attention.positions[0]
    if not isinstance(positions, c.Rope | c.Alibi):
        return None
    fields = TABLE.write(config)
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    new = config.block == "parallel" or (not serial and kv_heads not in (1, heads))
    return fields and {
        **fields,
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1 != heads,
        "parallel_attn": not serial,
        "num_ln_in_parallel_attn": 2 if config.block == "parallel" else 1,
        "alibi": isinstance(positions, c.Alibi),
        **(ROPE.write_rope(positions) if isinstance(positions, c.Rope) else {}),
    }


FAMILIES = (Family("falcon", "FalconForCausalLM", read, write, MAPPING),)
