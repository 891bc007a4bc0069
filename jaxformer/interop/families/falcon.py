"""Falcon: parallel blocks with one or two norms, or serial blocks with ALiBi (falcon-rw)."""

import math
from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    BiasesField,
    Field,
    HeadsField,
    Options,
    Repeated,
    Unused,
    fixed,
    four_widths,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.gpt_neox import block_rules, two_norms
from jaxformer.interop.families.llama_like import ALL_BIASES, heads_of
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.falcon import FALCON

LAYER = "transformer.h.{layer}"


def _is_parallel(config: c.TransformerConfig) -> bool:
    return config.block == "parallel"


def _is_serial(config: c.TransformerConfig) -> bool:
    return config.block == "serial"


PARALLEL_NORMS = m.layer_norm_rules(
    LAYER, pre_attention_norm="ln_attn", pre_feed_forward_norm="ln_mlp"
)


class RopeOrAlibi(RopeField):
    """RoPE, or ALiBi that is scaled as the scores are."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        rope, num_heads = super().read(reader, options), options["attention.num_heads"]
        if not reader.boolean("alibi", False):
            return rope
        if not _slopes_are_powers_of_two(num_heads):
            reader.add_problem(
                "alibi",
                f"transformers rounds the ALiBi slopes of {num_heads} heads to bfloat16, and "
                "jaxformer does not; pass ignore=('alibi',) to load it anyway.",
            )
        return {"attention.positions": (c.Alibi(scale=options["attention.head_dim"] ** -0.5),)}

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of RoPE or of ALiBi."""
        if isinstance(heads_of(model).positions[0], c.Alibi):
            return {"alibi": True}
        rope = super().write(model)
        return rope and {**rope, "alibi": False}


def _slopes_are_powers_of_two(num_heads: int) -> bool:
    """Whether bfloat16 holds every slope of ALiBi."""
    return all(math.log2(slope).is_integer() for slope in F.alibi_slopes(num_heads).tolist())


class Architecture:
    """The block and the number of KV heads, which depend on ``new_decoder_architecture``."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The block, and one KV head for all heads or for each, unless the new field says it."""
        is_new = reader.boolean("new_decoder_architecture", False)
        num_heads = options["attention.num_heads"]
        norms = reader.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
        is_parallel = reader.boolean("parallel_attn", True)
        kv_heads = reader.integer("num_kv_heads", num_heads)
        is_shared = reader.boolean("multi_query", True)
        if norms not in (1, 2) or (norms == 2 and not is_new):
            allowed = "1 or 2" if is_new else "1, without new_decoder_architecture"
            reader.add_problem("num_ln_in_parallel_attn", f"expected {allowed}.")
        if is_new and not is_parallel:
            reader.add_problem("parallel_attn", "with new_decoder_architecture it must be True.")
        if not (is_new or is_shared) and kv_heads != num_heads:
            reason = f"without multi_query there are {num_heads}, one per head."
            reader.add_problem("num_kv_heads", reason)
        parallel = "parallel" if norms == 2 else "parallel_shared_norm"
        return {
            "block": parallel if is_parallel else "serial",
            "attention.num_kv_heads": 1 if is_shared and not is_new else kv_heads,
        }

    def write(self, model: c.TransformerConfig) -> Options:
        attention, block = heads_of(model), model.block
        num_heads, kv_heads = attention.num_heads, attention.num_kv_heads
        is_grouped = kv_heads not in (1, num_heads)
        return {
            "num_kv_heads": kv_heads,
            "new_decoder_architecture": block == "parallel" or (block != "serial" and is_grouped),
            "multi_query": kv_heads == 1 != num_heads,
            "parallel_attn": block != "serial",
            "num_ln_in_parallel_attn": 2 if block == "parallel" else 1,
        }


FAMILIES = (
    Family(
        "falcon",
        "FalconForCausalLM",
        FALCON,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Repeated("n_embed", lambda options: options["model_dim"]),
            Field("num_hidden_layers", "num_layers"),
            HeadsField("num_attention_heads"),
            *(Architecture(), RopeOrAlibi()),
            Field("ffn_hidden_size", "feed_forward.hidden_dim", four_widths),
            Field("activation", "feed_forward.activation", "gelu"),
            Field("bias", "feed_forward.bias", False),
            BiasesField("bias", layers=ALL_BIASES),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            Field("tie_word_embeddings", "head.tied", True),
            *fixed(apply_residual_connection_post_layernorm=False),
            Unused("ff_factor"),  # ffn_hidden_size has the same information
        ),
        m.decoder_mapping(
            *m.top_level_rules("transformer.word_embeddings", "transformer.ln_f"),
            *m.norm_rules(f"{LAYER}.input_layernorm", "pre_norm"),
            *(replace(rule, condition=_is_parallel) for rule in PARALLEL_NORMS),
            *(replace(rule, condition=_is_serial) for rule in two_norms(LAYER)),
            *block_rules(LAYER, "self_attention"),
        ),
    ),
)
