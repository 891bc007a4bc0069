"""GPT-J and CodeGen: parallel block with one norm, partial rotary positions, head bias."""

import math

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    Field,
    Fields,
    HeadsField,
    Options,
    Unused,
    fixed,
    four_widths,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.llama_like import heads_of
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import first_rope
from jaxformer.interop.transforms import LINEAR_BY_GROUP, Rearrange
from jaxformer.zoo.codegen import CODEGEN
from jaxformer.zoo.eleuther import GPT_J

LAYER = "transformer.h.{layer}"


class RotaryDim:
    """RoPE; the file has the number of features of a head that it turns."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        width, head_dim = reader.integer("rotary_dim", 64), options["attention.head_dim"]
        if "rotary_dim" in reader.values and "rotary_dim" not in reader:
            reader.add_problem("rotary_dim", "it must be the number of rotated features of a head.")
        if width > head_dim or width % 2:
            reader.add_problem("rotary_dim", f"expected an even number up to head_dim={head_dim}.")
            width = head_dim
        rope = c.Rope(fraction=rotary_fraction(width, head_dim), pairing="neighbours")
        return {"attention.positions": (rope,)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The number, or None for a model without RoPE."""
        rope, head_dim = first_rope(model), heads_of(model).head_dim
        return None if rope is None else {"rotary_dim": rope.rotary_dim(head_dim)}


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


FIELDS: Fields = (
    Field("vocab_size", "vocab_size"),
    Field("n_embd", "model_dim", 4096),
    Field("n_layer", "num_layers", 28),
    HeadsField("n_head", default=16, width="n_embd"),
    RotaryDim(),
    Field("n_inner", "feed_forward.hidden_dim", four_widths),
    Field("activation_function", "feed_forward.activation", "gelu_new"),
    Field("layer_norm_epsilon", "norm.eps", 1e-5),
    Field("tie_word_embeddings", "head.tied", False),
    *fixed(rotary=True, scale_attn_weights=True),
    Unused("n_positions"),  # there is no position table
)
RULES = (
    *m.top_level_rules("transformer.wte", "transformer.ln_f"),
    *m.norm_rules(f"{LAYER}.ln_1", "pre_norm"),
    *m.branch_rules(f"{LAYER}.mlp", "feed_forward", up="fc_in", down="fc_out"),
)
IGNORED_TENSORS = (r"transformer\.h\.\d+\.attn\.(masked_bias|bias|causal_mask|embed_positions)",)
FAMILIES = (
    Family(
        "gptj",
        "GPTJForCausalLM",
        GPT_J,
        FIELDS,
        m.decoder_mapping(*RULES, *m.attention_rules(f"{LAYER}.attn", out="out_proj")),
        ignored_tensors=IGNORED_TENSORS,
        length_name="n_positions",
    ),
    # As GPT-J, except: one tensor has queries, values and keys of each quarter of the heads.
    Family(
        "codegen",
        "CodeGenForCausalLM",
        CODEGEN,
        FIELDS,
        m.decoder_mapping(
            *RULES,
            *m.fused_rules(
                f"{LAYER}.attn.qkv_proj",
                "attention",
                ("query", "value", "key"),
                Rearrange(LINEAR_BY_GROUP, groups=4),
            ),
            *m.branch_rules(f"{LAYER}.attn", "attention", out="out_proj"),
        ),
        ignored_tensors=IGNORED_TENSORS,
        length_name="n_positions",
    ),
)
