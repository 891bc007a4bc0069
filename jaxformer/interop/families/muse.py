"""Muse Glimmer: the text part of a model that also reads images; it is written alone."""

from collections.abc import Callable
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Field, Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.gemma import NORM, SANDWICH
from jaxformer.interop.families.ropes import RopeByTheta
from jaxformer.interop.families.windows import Windows
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import decoder_mapping
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like


def fourth_from_last(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """All layers but the last and every fourth before it."""
    last = reader.integer("num_hidden_layers") - 1
    return lambda i: (last - i) % 4 != 0


class RopeWhereTheta(RopeByTheta):
    """One RoPE in the layers where ``layer_rope_theta`` is not 0, whatever it is."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        rope, turned = self.read_rope(reader), super().read_positions(reader, windows)
        if reader.get("layer_rope_theta") is None:
            count = reader.integer("num_hidden_layers")
            turned = tuple(map(fourth_from_last(reader, None), range(count)))
        return tuple(rope if turns else None for turns in turned)


class ScoreFactor:
    """``qk_scale_factor``, which multiplies the usual scale of the scores."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The scale."""
        root = max(1, options["attention.head_dim"]) ** -0.5
        return {"attention.scale": reader.number("qk_scale_factor", 3.87) * root}

    def write(self, model: c.TransformerConfig) -> Options:
        """The factor, without the error of the root."""
        kind = p.heads_of(model)
        root = kind.head_dim**-0.5
        scale = root if kind.scale is None else kind.scale
        short = round(scale / root, 12)
        return {"qk_scale_factor": short if short * root == scale else scale / root}


FAMILIES = (
    # As Gemma 2, except: norms after the branches with an eps of their own, the last norm has a
    # plain scale, norms without parameters of the embedding, queries and keys, a gate of the heads,
    # a factor of the logits, and no positions in the layers without a window.
    Family(
        "muse_glimmer_text",
        "MuseGlimmerTextModel",
        like(
            LLAMA,
            norm=NORM,
            norm_placement="sandwich",
            post_norm=NORM,
            last_norm=c.RMSNorm(),
            embedding=c.Embedding(norm=c.RMSNorm(parameters="none")),
            qk_norm=c.QKNorm(norm=c.RMSNorm(parameters="none")),
            output_gate=c.OutputGate(),
        ),
        (
            *p.decoder(heads=32, kv_heads=2, head_dim=128, eps=1e-5),
            Field("rms_norm_eps", "last_norm.eps", 1e-5),
            Field("post_norm_eps", "post_norm.eps", 1e-8),
            *(*p.glu(name="hidden_activation"), p.ATTENTION_BIAS, p.HEADS_DIVIDE_WIDTH),
            *(Windows(2048, rule=fourth_from_last), RopeWhereTheta(max_length=131_072)),
            *(ScoreFactor(), Field("output_multiplier", "head.multiplier", 0.19611613513818404)),
            Field("final_logit_softcapping", "head.softcap", 20.0),
        ),
        decoder_mapping(*p.TOP_LEVEL, *SANDWICH, *p.ATTENTION, *p.FEED_FORWARD),
    ),
)
