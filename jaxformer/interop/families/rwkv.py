"""RWKV-4: each block is a layer of time mixing and a layer of channel mixing."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import Derived, Field, Options, Unused, four_widths
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.mixers import of_kind
from jaxformer.interop.family import Family
from jaxformer.zoo.rwkv import RWKV_4

BLOCK = "rwkv.blocks.{half_layer}"


class Blocks:
    """The number of blocks, each of two layers, and their widths."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The layers."""
        width, model_dim = reader.optional_integer("attention_hidden_size"), options["model_dim"]
        hidden = reader.optional_integer("intermediate_size")
        mixing = (
            c.TimeMixing(width=model_dim if width is None else width),
            c.ChannelMixing(hidden_dim=four_widths(options) if hidden is None else hidden),
        )
        return {"num_layers": 2 * reader.integer("num_hidden_layers"), "attention": mixing}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields; None for other layers."""
        match [layer.attention for layer in model.layers[:2]]:
            case [c.TimeMixing(width=width), c.ChannelMixing(hidden_dim=hidden)]:
                return {
                    "num_hidden_layers": model.num_layers // 2,
                    "attention_hidden_size": width,
                    "intermediate_size": hidden,
                }
        return None


def usual_last_norm(options: Options) -> c.LayerNorm | None:
    """The last norm has the usual eps, whatever the other norms have."""
    return None if options["norm.eps"] == c.LayerNorm.eps else c.LayerNorm()


def mixing_rules(name: str, kind: Any, *, norm: str, out: str) -> tuple[m.MappingRule, ...]:
    """Mapping rules of a branch: its norm, its mixes, what reads them, and what `out` names."""
    prefix = f"{BLOCK}.{name}"
    return of_kind(
        kind,
        *m.norm_rules(f"{BLOCK}.{norm}", "pre_attention_norm"),
        *(
            m.MappingRule(f"{prefix}.time_mix_{x}", f"attention/shift/{x}", "d -> 1 1 d")
            for x in kind.mixes
        ),
        *m.branch_rules(prefix, "attention", **{x: x for x in kind.mixes}, out=out),
    )


FAMILIES = (
    Family(
        "rwkv",
        "RwkvForCausalLM",
        RWKV_4,
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "model_dim"),
            Field("layer_norm_epsilon", "norm.eps", 1e-5),
            Field("layer_norm_epsilon", "embedding.norm.eps", 1e-5),
            Field("tie_word_embeddings", "head.tied", False),
            Derived("last_norm", usual_last_norm),
            Blocks(),
            Unused("rescale_every"),  # halves the stream and what is added, for float16
            Unused("context_length"),  # no position depends on it
        ),
        m.decoder_mapping(
            *m.top_level_rules("rwkv.embeddings", "rwkv.ln_out", head="head"),
            *m.norm_rules("rwkv.blocks.0.pre_ln", "embedding/norm"),
            *mixing_rules("attention", c.TimeMixing, norm="ln1", out="output"),
            m.MappingRule(f"{BLOCK}.attention.time_decay", "attention/rate/bias"),
            m.MappingRule(f"{BLOCK}.attention.time_first", "attention/bonus/bias"),
            *mixing_rules("feed_forward", c.ChannelMixing, norm="ln2", out="value"),
        ),
        attention_types=(c.TimeMixing, c.ChannelMixing),
        length_name="context_length",
    ),
)
