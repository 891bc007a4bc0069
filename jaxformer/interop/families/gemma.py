"""Gemma: scales of norms stored as scale - 1; Gemma 2 and 3: post-norms too, windows by layer.

VaultGemma is Gemma 2 without post-norms.

`gemma3` is the text part of a model that also reads images; it can be read, and is written as
`gemma3_text`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    OPTIONAL_NUMBER,
    Derived,
    Field,
    Options,
    fixed,
    root_of_width,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeByLayerType
from jaxformer.interop.families.windows import Windows, all_but_every
from jaxformer.interop.family import Family
from jaxformer.interop.hf_activations import HF_ACTIVATIONS
from jaxformer.interop.param_mapping import decoder_mapping, layer_norm_rules
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.gemma import GEMMA, GEMMA_2, GEMMA_3


class QueryScalarField(Field):
    """A field whose inverse square root is the scale of the scores."""

    def read_value(self, reader: ConfigReader, options: Options) -> float:
        scalar = super().read_value(reader, options)
        if scalar <= 0:
            reader.add_problem(self.name, "expected a number above 0.")
            scalar = 1.0
        return float(scalar**-0.5)

    def write_value(self, value: float) -> float:
        """The number, without the error of the root."""
        scalar = value**-2
        return round(scalar) if math.isclose(scalar, round(scalar)) else scalar


class OldField(Field):
    """A field that old files have; another one takes precedence."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        reader.get(self.name)
        return {}


def every_other(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """Every other layer, in files that may say the size of the window twice."""
    reader.require_value("sliding_window_size", window, reason="it differs from sliding_window")
    return all_but_every(2)(reader, window)


NORM = c.RMSNorm(scale_offset=1.0)
SANDWICH = layer_norm_rules(
    p.LAYER_PREFIX,
    pre_attention_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    pre_feed_forward_norm="pre_feedforward_layernorm",
    post_feed_forward_norm="post_feedforward_layernorm",
)
MULTIPLIER = Derived("embedding.scale", root_of_width)
FIELDS = (
    OldField("hidden_act", "feed_forward.activation", "gelu_pytorch_tanh"),
    *(*p.glu(9216, "gelu_pytorch_tanh", "hidden_activation"), p.ATTENTION_BIAS),
    QueryScalarField("query_pre_attn_scalar", "attention.scale", 256.0),
    *(MULTIPLIER, p.HEADS_DIVIDE_WIDTH),
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    GEMMA_2,
    (
        *(*p.decoder(heads=8, kv_heads=4, head_dim=256, tied=True), *FIELDS),
        Field("attn_logit_softcapping", "attention.logit_softcap", 50.0, OPTIONAL_NUMBER),
        Field("final_logit_softcapping", "head.softcap", 30.0, OPTIONAL_NUMBER),
        *(Windows(4096, rule=every_other), RopeField(max_length=8192)),
    ),
    decoder_mapping(*p.TOP_LEVEL, *SANDWICH, *p.ATTENTION, *p.FEED_FORWARD),
)
# As Gemma 2, except: norms of queries and keys in place of the cap of their scores, two RoPEs.
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA_3,
    (
        *p.decoder(
            heads=8,
            kv_heads=4,
            head_dim=256,
            vocab_size=262_208,
            model_dim=2304,
            num_layers=26,
            tied=True,
        ),
        *(*FIELDS, *fixed(attn_logit_softcapping=None)),
        Field("final_logit_softcapping", "head.softcap", parse=OPTIONAL_NUMBER),
        Windows(4096, rule=all_but_every(6, "sliding_window_pattern")),
        RopeByLayerType(base=1e6, local_base=1e4, max_length=131_072),
    ),
    decoder_mapping(*p.TOP_LEVEL, *SANDWICH, *p.ATTENTION, *p.QK_NORMS, *p.FEED_FORWARD),
)
# Released files say "gelu" and mean its approximation, as transformers reads it.
GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", **HF_ACTIVATIONS, "gelu": "gelu_tanh"}
FAMILIES = (
    # As Llama, except: scales of norms, GeGLU, an embedding times the root of its width.
    Family(
        "gemma",
        "GemmaForCausalLM",
        GEMMA,
        (
            *p.decoder(kv_heads=16, head_dim=256, tied=True),
            Field("intermediate_size", "feed_forward.hidden_dim"),
            Field(
                *("hidden_act", "feed_forward.activation", "gelu_pytorch_tanh"),
                choices=GEMMA_ACTIVATIONS,
            ),
            *fixed("transformers reads hidden_act", hidden_activation="gelu_pytorch_tanh"),
            *(p.ATTENTION_BIAS, MULTIPLIER, RopeField(max_length=8192)),
        ),
        decoder_mapping(*p.TOP_LEVEL, *p.PRE_NORMS, *p.ATTENTION, *p.FEED_FORWARD),
    ),
    GEMMA2,
    # As Gemma 2, except: no norms after the branches.
    replace(GEMMA2, model_type="vaultgemma", architecture="VaultGemmaForCausalLM", template=GEMMA),
    GEMMA3,
)
