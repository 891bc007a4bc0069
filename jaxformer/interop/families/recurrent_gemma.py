"""RecurrentGemma (Griffin): RG-LRU in most layers, attention with a window in the others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import (
    BiasesField,
    Derived,
    Field,
    Fields,
    Options,
    Unused,
    fixed,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.mixers import Mixer, of_kind
from jaxformer.interop.family import Family
from jaxformer.interop.rope_config import RopeField
from jaxformer.interop.transforms import DEPTHWISE, FLAT
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

BLOCK = f"{p.LAYER_PREFIX}.temporal_block"
WORDS = {"recurrent": False, "attention": True}
GATES = {"input_gate": "input_gate", "recurrent_gate": "decay_gate"}
LAYER = c.RGLRU(num_heads=1, head_dim=1)
ACTIVATION = Field("hidden_activation", "activation", "gelu_pytorch_tanh")
LAYER_FIELDS: Fields = (Field("conv1d_width", "convolution_width", 4), ACTIVATION)


class RecurrentFields:
    """The fields of RG-LRU, which has as many heads as attention."""

    kind = LAYER

    def read(self, reader: ConfigReader, options: Options) -> c.RGLRU:
        """Read the layer."""
        num_heads = options["attention.num_heads"]
        width = reader.integer("lru_width", options["model_dim"])
        if width % max(1, num_heads):
            reader.add_problem("lru_width", f"the {num_heads} heads must divide it.")
        own = read_options(reader, LAYER_FIELDS)
        sizes = {"num_heads": num_heads, "head_dim": max(1, width // max(1, num_heads))}
        return with_options(self.kind, {**own, **sizes})

    def write(self, model: c.TransformerConfig, kind: Any) -> Options | None:
        """Return the fields of the layer."""
        entries = write_options(kind, LAYER_FIELDS)
        return entries and {**entries, "lru_width": kind.heads_width}


@dataclass(frozen=True)
class BlockTypes:
    """``block_types``, the kinds of the first layers, which the others repeat."""

    def read(
        self, reader: ConfigReader, num_layers: int, default: Callable[[int], bool]
    ) -> list[bool]:
        """Whether each layer has attention."""
        words = reader.sequence("block_types", str) or ("recurrent", "recurrent", "attention")
        if not set(words) <= set(WORDS):
            reader.add_problem("block_types", f"expected {' or '.join(WORDS)} for each layer.")
        return [WORDS.get(words[i % len(words)], False) for i in range(num_layers)]

    def write(self, layers: Sequence[bool]) -> Options:
        """The kind of each layer."""
        return {"block_types": ["attention" if full else "recurrent" for full in layers]}


class HalfWidth(Field):
    """The width of the network; files say twice its width."""

    def read_value(self, reader: ConfigReader, options: Options) -> int:
        """Half of the field."""
        return max(1, int(super().read_value(reader, options)) // 2)

    def write_value(self, value: int) -> int:
        """Twice the width."""
        return 2 * value


class OneWindow(Field):
    """The window of all layers with attention."""

    def read_value(self, reader: ConfigReader, options: Options) -> tuple[int]:
        """The window."""
        return (super().read_value(reader, options),)

    def write_value(self, value: tuple[int]) -> int:
        """The window."""
        return value[0]


def rounded_root_of_width(options: Options) -> float:
    """The root of the width of the model in bfloat16, as transformers has it in any dtype."""
    return float(jnp.bfloat16(math.sqrt(max(0, options["model_dim"]))))


def with_out(options: Options) -> tuple[str, ...]:
    """The layers of attention with biases, of which the output always is one."""
    return (*options["attention.biases"], "out")


FAMILIES = (
    # As Gemma, except: RG-LRU in place of most attention, which turns half of each head; biases.
    Family(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        like(
            LLAMA,
            norm=c.RMSNorm(scale_offset=1.0),
            biases=("out",),
            feed_forward=(c.GLU(hidden_dim=1, bias=True),),
        ),
        (
            *p.decoder(heads=10, tied=True),
            HalfWidth("intermediate_size", "feed_forward.hidden_dim", 7680),
            Field("hidden_activation", "feed_forward.activation", "gelu_pytorch_tanh"),
            BiasesField("attention_bias", layers=p.QKV),
            Derived("attention.biases", with_out),
            OneWindow("attention_window_size", "attention.windows", 2048),
            Field("logits_soft_cap", "head.softcap", 30.0),
            Derived("embedding.scale", rounded_root_of_width),
            RopeField(fraction=0.5),
            Mixer(kind=RecurrentFields(), types=BlockTypes()),
            *fixed(embeddings_scale_by_sqrt_dim=True),
            Unused("w_init_variance_scale", "final_w_init_variance_scale", "_block_types"),
        ),
        m.decoder_mapping(
            *m.top_level_rules("model.embed_tokens", "model.final_norm"),
            *m.layer_norm_rules(
                p.LAYER_PREFIX,
                pre_attention_norm="temporal_pre_norm",
                pre_feed_forward_norm="channel_pre_norm",
            ),
            *of_kind(c.MultiHead, *m.attention_rules(BLOCK)),
            *of_kind(
                c.RGLRU,
                *m.branch_rules(
                    BLOCK, "attention", value="linear_x", gate="linear_y", out="linear_out"
                ),
                m.MappingRule(f"{BLOCK}.conv_1d.weight", "attention/convolution/kernel", DEPTHWISE),
                m.MappingRule(f"{BLOCK}.conv_1d.bias", "attention/convolution/bias", FLAT),
                m.MappingRule(f"{BLOCK}.rg_lru.recurrent_param", "attention/rate/bias", FLAT),
                *(
                    m.MappingRule(f"{BLOCK}.rg_lru.{name}_{end}", f"attention/{ours}/{leaf}")
                    for name, ours in GATES.items()
                    for end, leaf in (("weight", "kernel"), ("bias", "bias"))
                ),
            ),
            *m.glu_rules(f"{p.LAYER_PREFIX}.mlp_block"),
        ),
        attention_types=(c.RGLRU, c.MultiHead),
    ),
)
