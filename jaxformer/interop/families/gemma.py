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
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_family import BiasField, LlamaLike
from jaxformer.interop.families.llama_like_options import Dense, OneRope, WindowsByInterval
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.family import INV_FREQ_PATTERNS
from jaxformer.interop.param_mapping import layer_norm_rules
from jaxformer.interop.rope_config import read_rope_section, write_rope_section

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


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


@dataclass(frozen=True, kw_only=True)
class Gemma3Ropes(OneRope):
    """One RoPE for layers with a window, another for those without."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """The RoPE of each layer."""
        new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
        length = reader.integer("max_position_embeddings", self.max_length)
        base = reader.number("rope_theta", GLOBAL_BASE)
        local_base = reader.number("rope_local_base_freq", LOCAL_BASE)
        full, local = (new and new.section(f"{kind}_attention") for kind in ("full", "sliding"))
        if full is not None:
            base = full.number("rope_theta", base)
            for name in full.values if old is not None else ():
                full.get(name)
        ropes = [
            read_rope_section(section or ConfigReader({}), base=x, max_length=length)
            for section, x in ((old or full, base), (local, local_base))
        ]
        return shortest_cycle(tuple(ropes[window is not None] for window in windows))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Both."""
        if not p.is_rope_decoder(config):
            return None
        layers = [config.layer(i) for i in range(config.num_layers)]
        ropes = {
            layer.window is None: layer.positions
            for layer in reversed(layers)
            if isinstance(layer.positions, c.Rope)
        }
        full, lengths = write_rope_section(ropes.get(True, c.Rope(base=GLOBAL_BASE)))
        local, _ = write_rope_section(ropes.get(False, c.Rope(base=LOCAL_BASE)))
        scaling = {name: v for name, v in full.items() if name != "rope_theta"}
        return {
            **lengths,
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": local["rope_theta"],
            "rope_scaling": None if full["rope_type"] == "default" else scaling,
            "rope_parameters": {"full_attention": full, "sliding_attention": local},
        }


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
    windows=Gemma2Windows(4096, 2),
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
    windows=WindowsByInterval(4096, 6, ("sliding_window_pattern",)),
    positions=Gemma3Ropes(max_length=131_072),
    qk_norm=c.QKNorm(norm=GEMMA["norm"]),
    constants={"attn_logit_softcapping": None},
    fields=(
        SCALAR,
        Field("final_logit_softcapping", "head.softcap", None, ConfigReader.optional_number),
    ),
).family()


def read_gemma3(reader: ConfigReader) -> c.TransformerConfig:
    """Read the text part of the config.json of a gemma3 model."""
    for name in ("vision_config", "mm_tokens_per_image", "image_token_index"):
        reader.get(name)
    for name in ("boi_token_index", "eoi_token_index"):
        reader.get(name)
    text = reader.section("text_config") or ConfigReader({})
    tied = reader.boolean("tie_word_embeddings", True)
    config = GEMMA3.read(text)
    return replace(config, head=replace(config.head, tied=tied and config.head.tied))


FAMILIES = (
    Gemma("gemma2", "Gemma2ForCausalLM", **GEMMA2).family(),
    Gemma("vaultgemma", "VaultGemmaForCausalLM", **GEMMA2 | {"norm_placement": "pre"}).family(),
    GEMMA3,
    replace(
        GEMMA3,
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        read=read_gemma3,
        write=lambda config: None,
        ignored_tensors=(*INV_FREQ_PATTERNS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
        key_renames=((r"^language_model\.", ""), (r"^model\.language_model\.", "model.")),
    ),
)
