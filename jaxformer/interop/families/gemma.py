"""Gemma 2 and 3: pre- and post-norms, scales stored as scale - 1, windows by layer.

VaultGemma is Gemma 2 without post-norms.

`gemma3` is the text part of a model that also reads images; it can be read, and is written as
`gemma3_text`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_family import BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import (
    Dense,
    OneRope,
    RopeByLayerType,
    WindowsByInterval,
)
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.family import OLD_AND_NEW_PREFIX, with_images
from jaxformer.interop.param_mapping import layer_norm_rules


class QueryScalarField(Field):
    """A field whose inverse square root is the scale of the scores."""

    def read_option(self, reader: ConfigReader, options: Mapping[str, Any]) -> float:
        """The scale."""
        scalar = super().read_option(reader, options)
        if scalar <= 0:
            reader.add_problem(self.name, "expected a number above 0.")
            scalar = 1.0
        return float(scalar**-0.5)

    def write_option(self, value: float) -> float:
        """The number, without the error of the root."""
        scalar = value**-2
        return round(scalar) if math.isclose(scalar, round(scalar)) else scalar


@dataclass(frozen=True)
class Gemma(LlamaLike):
    """Embeddings are multiplied by the root of their width."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config = super().read(reader)
        return replace(config, embedding=c.Embedding(scale=math.sqrt(config.model_dim)))


@dataclass(frozen=True)
class Gemma2Windows(WindowsByInterval):
    """Windows whose size files may say twice."""

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        window = reader.optional_integer("sliding_window", self.default)
        reader.require_value("sliding_window_size", window, reason="it differs from sliding_window")
        return super().read(reader, num_layers)


SCALAR = QueryScalarField("query_pre_attn_scalar", "attention.scale", 256.0)
GEMMA: dict[str, Any] = dict(
    kv_heads=4,
    head_dim=256,
    norm=c.RMSNorm(scale_offset=1.0),
    norm_placement="sandwich",
    norm_rules=layer_norm_rules(
        p.LAYER_PREFIX,
        pre_attention_norm="input_layernorm",
        post_attention_norm="post_attention_layernorm",
        pre_feed_forward_norm="pre_feedforward_layernorm",
        post_feed_forward_norm="post_feedforward_layernorm",
    ),
    tied=True,
    biases=(BiasField("attention_bias", p.ALL_BIASES),),
    branch=Dense(
        activation="gelu_pytorch_tanh", activation_field="hidden_activation", hidden_dim=9216
    ),
    unused=("hidden_act",),  # in old files; hidden_activation takes precedence
    heads_divide_width=True,
)
GEMMA2: dict[str, Any] = GEMMA | dict(
    sizes={"num_attention_heads": 8},
    windows=Gemma2Windows(4096, period=2),
    positions=OneRope(max_length=8192),
    fields=(
        SCALAR,
        Field(
            "attn_logit_softcapping", "attention.logit_softcap", 50.0, ConfigReader.optional_number
        ),
        Field("final_logit_softcapping", "head.softcap", 30.0, ConfigReader.optional_number),
    ),
)
GEMMA3 = Gemma(
    "gemma3_text",
    "Gemma3ForCausalLM",
    **GEMMA,
    sizes={
        **{"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26},
        "num_attention_heads": 8,
    },
    windows=WindowsByInterval(4096, period=6, fields=("sliding_window_pattern",)),
    positions=RopeByLayerType(base=1e6, local_base=1e4, max_length=131_072),
    qk_norm=c.QKNorm(norm=GEMMA["norm"]),
    constants={"attn_logit_softcapping": None},
    fields=(
        SCALAR,
        Field("final_logit_softcapping", "head.softcap", None, ConfigReader.optional_number),
    ),
).family()


FAMILIES = (
    Gemma("gemma2", "Gemma2ForCausalLM", **GEMMA2).family(),
    Gemma("vaultgemma", "VaultGemmaForCausalLM", **GEMMA2 | {"norm_placement": "pre"}).family(),
    GEMMA3,
    with_images(
        GEMMA3,
        lambda reader, tied: reader.boolean("tie_word_embeddings", True) and tied,
        unused=(
            *("vision_config", "mm_tokens_per_image", "image_token_index"),
            *("boi_token_index", "eoi_token_index"),
        ),
        modules=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
        key_renames=OLD_AND_NEW_PREFIX,
    ),
)
