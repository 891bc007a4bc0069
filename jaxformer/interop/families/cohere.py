"""Command R, Command A and Command A+: parallel blocks with one shared norm, scaled logits.

Command A (cohere2) rotates only in its layers with a window; the others see everything and no
positions. Command A+ (cohere2_moe) has experts after some dense layers, which may rotate without a
window. Compass has a RoPE for each kind of layer; of the model with images the text is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    Derived,
    Field,
    Options,
    PresenceField,
    Repeated,
    Unused,
    Written,
    fixed,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeOfWindows
from jaxformer.interop.families.windows import WINDOW_TYPES, Windows, all_but_every
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import decoder_mapping, glu_rules, norm_rules
from jaxformer.interop.rope_config import RopeField, read_rope_section, write_rope_section
from jaxformer.zoo.cohere import COMMAND_R

DENSE_FIRST = e.DenseFirst(has_types=True)
DENSE_EVERY = "prefix_dense_sliding_window_pattern"  # dense layers without a window; 1 is all


def windows_after_dense(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """All layers but every n-th; the first layers have another n than the layers after them."""
    first = reader.integer("first_k_dense_replace", 0)  # whatever mlp_layer_types says
    dense_every = reader.positive_integer(DENSE_EVERY, 1)
    every = reader.positive_integer("sliding_window_pattern", 4)

    def slides(layer: int) -> bool:
        if layer < first:
            return (layer + 1) % dense_every != 0
        return (layer - first + 1) % every != 0

    return slides


@dataclass(frozen=True, kw_only=True)
class RopeOfWindowsOrDense(RopeField):
    """RoPE in the layers with a window, and in the dense ones where none of these has one."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        rope, windows = self.read_rope(reader), options["attention.windows"]
        other_fields = {name: x for name, x in reader.values.items() if name != "rope_scaling"}
        if rope != self.read_rope(ConfigReader(other_fields)):
            reason = "transformers ignores it in this family, and the other fields say otherwise."
            reader.add_problem("rope_scaling", reason)
        all_rotate = reader.positive_integer(DENSE_EVERY, 1) == 1
        is_sparse = DENSE_FIRST.read(reader, len(windows)) if all_rotate else [True] * len(windows)
        layers = zip(windows, is_sparse, strict=True)
        each = tuple(None if window is None and sparse else rope for window, sparse in layers)
        return {"attention.positions": each}

    def write(self, model: c.TransformerConfig) -> dict[str, Any]:
        """The fields of RoPE, if there is any, and whether layers without a window have it."""
        rotated = any(layer.rope is not None and layer.window is None for layer in model.layers)
        return {**(super().write(model) or {}), DENSE_EVERY: 1 if rotated else 2}


class RopeOrNone:
    """RoPE of each kind of layer, or no positions where its object is null."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        sections, windows = reader.part("rope_parameters"), options["attention.windows"]
        length, ropes = reader.positive_integer("max_position_embeddings", 8192), {}
        # A base for all kinds beside a base for each is without effect, as are parts for images.
        Unused("rope_theta", "rope_type").read(sections, options)
        for kind, sliding in WINDOW_TYPES.words.items():
            section = sections.section(kind)
            if kind not in sections.values and sliding in (x is not None for x in windows):
                sections.add_problem(kind, "expected an object, or null for no positions.")
            if section is not None:
                Unused("mrope_section", "mrope_interleaved").read(section, options)
                ropes[sliding] = read_rope_section(section, base=10_000.0, max_length=length)
        return {"attention.positions": tuple(ropes.get(x is not None) for x in windows)}

    def write(self, model: c.TransformerConfig) -> Options:
        ropes = {layer.window is not None: layer.rope for layer in model.layers}
        written = {
            kind: write_rope_section(rope)
            for kind, sliding in WINDOW_TYPES.words.items()
            if (rope := ropes.get(sliding)) is not None
        }
        lengths = {name: x for _, fields in written.values() for name, x in fields.items()}
        none = dict.fromkeys(WINDOW_TYPES.words)
        return {"rope_parameters": none | {kind: x for kind, (x, _) in written.items()}, **lengths}


def no_windows(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """No layer has a window."""
    return lambda i: False


class LayerNormOrRms:
    """An RMSNorm where the file has an eps of one, else LayerNorm."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        eps = reader.number("layer_norm_eps", 1e-5)
        rms_eps = reader.optional_number("rms_norm_eps")
        if rms_eps is None:
            return {"norm": replace(LAYER_NORM, eps=eps)}
        return {"norm": c.RMSNorm(eps=rms_eps)}

    def write(self, model: c.TransformerConfig) -> Options:
        rms_eps = model.norm.eps if isinstance(model.norm, c.RMSNorm) else None
        return {"layer_norm_eps": model.norm.eps, "rms_norm_eps": rms_eps}


class LayerTypes:
    """Dense layers first, by a word for each layer, or in some files by their number."""

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        return DENSE_FIRST.read(reader, num_layers)

    def write(self, is_sparse: list[bool]) -> Options | None:
        """The words, if there are experts."""
        entries = DENSE_FIRST.write(is_sparse) if any(is_sparse) else None
        return entries and {e.MLP_TYPES: entries[e.MLP_TYPES]}


def dense_width(reader: ConfigReader, name: str, default: Any) -> int:
    """Read the width of the dense layers, by default an expert's width."""
    return reader.integer(name, reader.integer("intermediate_size"))


LAYER_NORM = c.LayerNorm(parameters="scale")
MULTIPLIER = Field("logit_scale", "head.multiplier", 0.0625)
RULES = (*p.TOP_LEVEL, *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"), *p.ATTENTION)
# What the first files say of themselves, and what no file says otherwise.
SAID_OF_ITSELF = (
    *fixed(order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj"),
    *fixed(rotary_pct=1, use_gated_activation=True, use_parallel_block=True, use_qk_norm=False),
    Repeated("use_embedding_sharing", lambda options: options["head.tied"]),
)
EXPERTS = e.Experts(
    fields=(
        *(e.WIDTH, e.ACTIVATION),
        Field("num_experts", "num_experts", 8),
        Field("num_experts_per_tok", "top_k", 2),
        e.SharedExperts("num_shared_experts"),
        Written(shared_expert_combination_strategy="average"),
        Field(
            *("shared_expert_combination_strategy", "shared.combination", "average"),
            choices={"average": "average", "sum": "sum"},
        ),
        Field(
            *("expert_selection_fn", "router.score", "softmax"),
            choices={"softmax": "softmax", "sigmoid": "sigmoid"},
        ),
        Field("norm_topk_prob", "router.renormalise", True),  # of sigmoids alone
        Derived(
            "router.renormalise",
            lambda x: x["router.renormalise"] or x["router.score"] == "softmax",
        ),
    ),
    layers=LayerTypes(),
    dense=(
        Field("prefix_dense_intermediate_size", "hidden_dim", parse=dense_width),
        Field("hidden_act", "activation", "silu"),
    ),
)
FAMILIES = (
    Family(
        "cohere",
        "CohereForCausalLM",
        COMMAND_R,
        (
            PresenceField(
                *("use_qk_norm", "attention.qk_norm"),
                part=c.QKNorm(norm=LAYER_NORM, over="each_head"),
            ),
            *(*p.decoder(eps=1e-5, eps_name="layer_norm_eps", tied=True), *p.GLU, p.ATTENTION_BIAS),
            *(MULTIPLIER, RopeField(base=5e5, max_length=8192, pairing="neighbours")),
        ),
        decoder_mapping(*RULES, *p.QK_NORMS, *p.FEED_FORWARD),
    ),
    # As Command R, except: windows by layer, and no positions without one.
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        COMMAND_R,
        (
            *(*p.decoder(eps=1e-5, eps_name="layer_norm_eps", tied=True), *p.GLU, p.ATTENTION_BIAS),
            *(MULTIPLIER, *SAID_OF_ITSELF),
            Windows(4096, rule=all_but_every(4, "layer_switch", "sliding_window_pattern")),
            RopeOfWindows(max_length=8192, pairing="neighbours", without_windows=False),
        ),
        decoder_mapping(*RULES, *p.FEED_FORWARD),
    ),
    # As Command A, except: a RoPE for each kind of layer, over halves; a window in no layer by
    # default.
    Family(
        "cohere_compass_text",
        "CohereCompassForCausalLM",
        COMMAND_R,
        (
            *(*p.decoder(eps=1e-5, eps_name="layer_norm_eps", tied=True), *p.GLU, p.ATTENTION_BIAS),
            Field("logit_scale", "head.multiplier", 1.0),
            *(Windows(4096, rule=no_windows, needs_size=True), RopeOrNone()),
            Unused("pooling"),  # of a model of vectors
        ),
        decoder_mapping(*RULES, *p.FEED_FORWARD),
    ),
    # As Command A, except: experts after the dense layers.
    Family(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        COMMAND_R,
        (
            *(
                *p.decoder(head_dim=128, eps=None, tied=True),
                LayerNormOrRms(),
                p.ATTENTION_BIAS,
                EXPERTS,
            ),
            *(MULTIPLIER, *SAID_OF_ITSELF),
            Windows(4096, rule=windows_after_dense),
            RopeOfWindowsOrDense(max_length=8192, pairing="neighbours"),
        ),
        decoder_mapping(
            *(*RULES, *p.FEED_FORWARD, *e.EXPERT_RULES),
            *glu_rules(f"{e.PREFIX}.shared_experts", e.SHARED),
        ),
    ),
)
