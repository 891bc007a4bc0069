"""GPT-J: parallel block with one norm, partial rotary positions, head bias."""

import math
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules

LAYER = "transformer.h.{layer}"
TABLE = ParamMapping(
    top_level=(
        MappingRule("transformer.wte.weight", "embedding/tokens/embedding"),
        *norm_rules("transformer.ln_f", "decoder/final_norm"),
        *linear_rules("lm_head", "head"),
    ),
    stacks={
        "decoder": (
            *norm_rules(f"{LAYER}.ln_1", "pre_norm"),
            *linear_rules(f"{LAYER}.attn.q_proj", "attention/query"),
            *linear_rules(f"{LAYER}.attn.k_proj", "attention/key"),
            *linear_rules(f"{LAYER}.attn.v_proj", "attention/value"),
            *linear_rules(f"{LAYER}.attn.out_proj", "attention/out", input_axes=2),
            *linear_rules(f"{LAYER}.mlp.fc_in", "feed_forward/up"),
            *linear_rules(f"{LAYER}.mlp.fc_out", "feed_forward/down"),
        )
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a gptj model."""
    reader.get("n_positions")  # there is no position table
    reader.require_value("rotary", True)
    reader.require_value("scale_attn_weights", True)
    model_dim, heads = reader.integer("n_embd", 4096), reader.positive_integer("n_head", 16)
    head_dim = max(1, model_dim // heads)
    width = reader.integer("rotary_dim", 64)
    if "rotary_dim" in reader.values and "rotary_dim" not in reader:
        reader.add_problem("rotary_dim", "it must be the number of rotated features of a head.")
    if width > head_dim or width % 2:
        reader.add_problem("rotary_dim", f"expected an even number up to head_dim={head_dim}.")
        width = head_dim
    hidden_dim = reader.integer("n_inner", 4 * model_dim)
    activation = reader.choice("activation_function", "gelu_new", HF_ACTIVATIONS)
    return c.TransformerConfig(
        vocab_size=reader.integer("vocab_size"),
        model_dim=model_dim,
        num_layers=reader.integer("n_layer", 28),
        attention=c.MultiHead(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            positions=(c.Rope(fraction=rotary_fraction(width, head_dim), pairing="neighbours"),),
        ),
        feed_forward=(c.MLP(hidden_dim=hidden_dim, activation=activation, bias=True),),
        norm=c.LayerNorm(eps=reader.number("layer_norm_epsilon", 1e-5)),
        block="parallel_shared_norm",
        head=c.LMHead(tied=reader.boolean("tie_word_embeddings", False), bias=True),
    )


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
    rope, branch = config.multi_head.positions[0], config.feed_forward[0]
    if not isinstance(config.topology, c.Decoder) or not isinstance(rope, c.Rope):
        return None
    if not isinstance(branch, c.MLP):
        return None
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.model_dim,
        "n_layer": config.num_layers,
        "n_head": config.multi_head.num_heads,
        "n_inner": branch.hidden_dim,
        "activation_function": hf_activation_name(branch.activation),
        "rotary_dim": rope.rotary_dim(config.multi_head.head_dim),
        "layer_norm_epsilon": config.norm.eps,
        "tie_word_embeddings": config.head.tied,
    }


FAMILIES = (
    Family(
        "gptj",
        "GPTJForCausalLM",
        read,
        write,
        TABLE,
        ignored_tensors=(r"transformer\.h\.\d+\.attn\.(masked_bias|bias|embed_positions)",),
    ),
)
