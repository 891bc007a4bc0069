"""GPT-J: parallel block with one norm, partial rotary positions, head bias."""

import math
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.option_fields import (
    POSITIVE_INTEGER,
    Field,
    FieldTable,
    four_widths,
    template,
)
from jaxformer.interop.family import Family

LAYER = "transformer.h.{layer}"
MAPPING = m.decoder_mapping(
    m.top_level_rules("transformer.wte", "transformer.ln_f"),
    *m.norm_rules(f"{LAYER}.ln_1", "pre_norm"),
    *m.attention_rules(f"{LAYER}.attn", out="out_proj"),
    *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="fc_in", down="fc_out"),
)
TABLE = FieldTable(
    template=template(
        branch=c.MLP(hidden_dim=1, bias=True),
        norm=c.LayerNorm(),
        block="parallel_shared_norm",
        head=c.LMHead(bias=True),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "model_dim", 4096),
        Field("n_layer", "num_layers", 28),
        Field("n_head", "attention.num_heads", 16, POSITIVE_INTEGER),
        Field("n_inner", "feed_forward.hidden_dim", four_widths),
        Field("activation_function", "feed_forward.activation", "gelu_new"),
        Field("layer_norm_epsilon", "norm.eps", 1e-5),
        Field("tie_word_embeddings", "head.tied", False),
    ),
    constants={"rotary": True, "scale_attn_weights": True},
    unused=("n_positions",),  # there is no position table
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gptj model."""
    width = reader.integer("rotary_dim", 64)
    if "rotary_dim" in reader.values and "rotary_dim" not in reader:
        reader.add_problem("rotary_dim", "it must be the number of rotated features of a head.")
    heads = reader.positive_integer("n_head", 16)
    head_dim = max(1, reader.integer("n_embd", 4096) // heads)
    if width > head_dim or width % 2:
        reader.add_problem("rotary_dim", f"expected an even number up to head_dim={head_dim}.")
        width = head_dim
    rope = c.Rope(fraction=rotary_fraction(width, head_dim), pairing="neighbours")
    return TABLE.read(reader, {"attention.positions": (rope,)})


def rotary_fraction(width: int, head_dim: int) -> float:
    """Rotary fraction that gives exactly `width` features.

    Args:
        width: Features that are rotated.
        head_dim: Features of a head.

    Returns:
        width / head_dim, up to a rounding.
    """
    exact = width / head_dim
    return exact if int(head_dim * exact) == width else math.nextafter(exact, 1.0)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A gptj's configuration from ours."""
    fields, attention = TABLE.write(config), p.heads_of(config)
    rope: Any = attention.positions[0]
    return fields and {**fields, "rotary_dim": rope.rotary_dim(attention.head_dim)}


FAMILIES = (
    Family(
        "gptj",
        "GPTJForCausalLM",
        read,
        write,
        MAPPING,
        ignored_tensors=(r"transformer\.h\.\d+\.attn\.(masked_bias|bias|embed_positions)",),
    ),
)
