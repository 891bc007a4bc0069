"""Apertus: Llama without a gate, with xIELU, and norms of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxformer.interop.config_fields import Field, Fixed, fixed
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.param_mapping import (
    MappingRule,
    branch_rules,
    decoder_mapping,
    layer_norm_rules,
)
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.apertus import APERTUS

MLP = f"{p.LAYER_PREFIX}.mlp"
FIELDS = (
    *p.decoder(eps=1e-5),
    Field("intermediate_size", "feed_forward.hidden_dim"),
    *(p.ATTENTION_BIAS, *fixed(hidden_act="xielu")),
    RopeField(base=1.2e7, max_length=65_536),
)
MAPPING = decoder_mapping(
    *p.TOP_LEVEL,
    *layer_norm_rules(
        p.LAYER_PREFIX,
        pre_attention_norm="attention_layernorm",
        pre_feed_forward_norm="feedforward_layernorm",
    ),
    *(*p.ATTENTION, *p.QK_NORMS),
    *branch_rules(MLP, "feed_forward", up="up_proj", down="down_proj"),
    *(
        MappingRule(f"{MLP}.act_fn.{name}", f"feed_forward/{name}")
        for name in ("alpha_p", "alpha_n")
    ),
)


def constants(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The numbers of xIELU that are not learned, by tensor name."""
    numbers = {"beta": np.float32(0.5), "eps": np.float32(-1e-6)}
    return {
        f"{MLP.replace('{layer}', str(i))}.act_fn.{name}": np.asarray(x)
        for i in range(values["num_hidden_layers"])
        for name, x in numbers.items()
    }


FAMILY = Family(
    "apertus",
    "ApertusForCausalLM",
    APERTUS,
    FIELDS,
    MAPPING,
    ignored_tensors=(*INV_FREQ_PATTERNS, r".*\.act_fn\.(beta|eps)"),
    constant_tensors=constants,
)
FAMILIES = (
    FAMILY,
    # As Apertus, except: a head of fewer words is refused.
    replace(
        FAMILY,
        model_type="apertus1p5_text",
        architecture="Apertus1p5TextForCausalLM",
        fields=(*FIELDS, Fixed("output_vocab_size", (), "a head for some of the words")),
    ),
)
