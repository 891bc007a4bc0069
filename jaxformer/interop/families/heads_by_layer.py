"""Laguna and MiMo V2 Flash: heads and RoPE of layers with a window are others than without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxformer import config as c
from jaxformer.interop import param_mapping as m
from jaxformer.interop.config_fields import BiasesField, Change, Field, Options, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.cohere import no_windows
from jaxformer.interop.families.gemma4 import Gemma4Ropes
from jaxformer.interop.families.windows import Windows
from jaxformer.interop.family import INV_FREQ_PATTERNS, Family
from jaxformer.interop.rope_config import first_rope
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.sizes import like

KINDS = {"full_attention": True, "sliding_attention": False}
FRACTION = "partial_rotary_factor"
Ropes = Mapping[str, Mapping[str, Any]]


def ropes(*bases: float, fractions: tuple[float, ...]) -> Ropes:
    """``rope_parameters`` of layers without a window, and of those with one."""
    each = zip(KINDS, bases, fractions, strict=True)
    return {kind: {"rope_theta": base, FRACTION: part} for kind, base, part in each}


@dataclass(frozen=True)
class PartialRopes(Gemma4Ropes):
    """A RoPE for layers with a window, another for those without, each of a fraction of a head.

    Attributes:
        fraction: The fraction where an object of unscaled RoPE lacks it.
    """

    defaults: Ropes = field(kw_only=True)
    fraction: float = 1.0

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The RoPE of each layer."""
        sections = reader.section("rope_parameters") or ConfigReader(self.defaults)

        def fraction(kind: str) -> float:
            section = sections.part(kind)
            scaling = section.get("rope_type", section.get("type", "default"))
            if scaling == "proportional":
                section.add_problem("rope_type", "this family rotates a fraction of each head.")
            return section.number(FRACTION, self.fraction if scaling == "default" else 1.0)

        full, sliding = map(fraction, KINDS)
        each = super().read(reader, options)["attention.positions"]
        return {
            "attention.positions": tuple(
                replace(rope, fraction=full if window is None else sliding)
                for rope, window in zip(each, options["attention.windows"], strict=True)
            )
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """Both, with their fractions."""
        fields, first = super().write(model), first_rope(model)
        if fields is None or first is None:
            return None
        of_kind = {layer.window is None: layer.rope or first for layer in model.layers}
        for kind, is_full in KINDS.items():
            fields["rope_parameters"][kind][FRACTION] = of_kind.get(is_full, first).fraction
        return fields


def by_layer(changes: Callable[[Any], list[dict[str, Any]]], heads: Any) -> tuple[Any, ...]:
    """The attention of each layer: heads with these changes of their options."""
    each = zip(heads.positions, heads.windows, changes(heads), strict=True)
    return tuple(
        replace(heads, positions=(rope,), windows=(window,), **change)
        for rope, window, change in each
    )


class HeadsByLayer:
    """``num_attention_heads_per_layer``, the number of query heads of each layer."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of the layers, if their numbers differ."""
        name, count = "num_attention_heads_per_layer", options["num_layers"]
        numbers = reader.sequence(name, int) or (options["attention.num_heads"],) * count
        if len(numbers) != count:
            reader.add_problem(name, f"expected a number for each of {count} layers.")
            return {}
        if len({*numbers}) == 1:
            return {"attention.num_heads": numbers[0]}
        changes = [{"num_heads": number} for number in numbers]
        return {"attention": Change(partial(by_layer, lambda heads: changes))}

    def write(self, model: c.TransformerConfig) -> Options:
        """The numbers."""
        numbers = [layer.attention.num_heads for layer in model.layers]
        return {"num_attention_heads_per_layer": numbers}


class CapField(Field):
    """A cap, where 0 is none."""

    def read_value(self, reader: ConfigReader, options: Options) -> float | None:
        """The cap."""
        cap = super().read_value(reader, options)
        return cap if cap > 0 else None

    def write_value(self, value: float | None) -> float:
        """The cap, or 0."""
        return value or 0.0


def read_gating(reader: ConfigReader, name: str, default: bool) -> bool | str:
    """A word, or whether a gate is that of a head."""
    value = reader.get(name, default)
    return value if isinstance(value, str) else reader.boolean(name, default)


DIFFERENT_HEADS = c.MultiHead, c.MultiHead


class HeadsOfWindows:
    """Layers with a window have sinks, and twice as many key-value heads."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of the layers."""

        def changes(heads: c.MultiHead) -> list[dict[str, Any]]:
            sliding = {"num_kv_heads": 2 * heads.num_kv_heads, "sinks": True}
            return [{} if window is None else sliding for window in heads.windows]

        return {"attention": Change(partial(by_layer, changes))}

    def write(self, model: c.TransformerConfig) -> Options:
        """The number of key-value heads of layers without a window."""
        heads: Any = model.layers[0].attention
        per_number = 1 if model.layers[0].window is None else 2
        return {"num_key_value_heads": heads.num_kv_heads // per_number}


@dataclass(frozen=True)
class WindowsAndQuery(Windows):
    """Windows whose size ``sliding_window_size`` gives without the query's own token."""

    def read_size(self, reader: ConfigReader) -> int | None:
        """The window."""
        window, earlier = super().read_size(reader), reader.optional_integer("sliding_window_size")
        return window if earlier is None else earlier + 1


def all_but_first_and_sixth(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
    """All layers but the first and every sixth."""
    return lambda i: i > 0 and i % 6 != 5


class ValueFactor:
    """``attention_value_scale``, which the output projection absorbs."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """Check it."""
        value_factor(reader)
        return {}

    def write(self, model: c.TransformerConfig) -> Options:
        """1."""
        return {"attention_value_scale": 1.0}


def value_factor(reader: ConfigReader) -> dict[str, tuple[float, ...]]:
    """The factor of the values, by name of the tensor that absorbs it."""
    factor = reader.optional_number("attention_value_scale", 0.707)
    return {f"{p.SELF_ATTENTION}.o_proj.weight": (1.0 if factor is None else factor,)}


def read_scale(reader: ConfigReader, name: str, default: float) -> float:
    """A number, or null for 1."""
    scale = reader.optional_number(name, default)
    return 1.0 if scale is None else scale


GATES = {True: "head", "per-head": "head", "per-element": "feature", False: "feature"}
LAGUNA_ROPES = ropes(5e5, 1e4, fractions=(0.5, 1.0))
LAGUNA_EXPERTS = e.Experts(
    moe=replace(e.MOE, router=e.SIGMOID, shared=c.SharedExpert(expert=e.MOE.expert)),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim", 512),
        e.ACTIVATION,
        Field("num_experts", "num_experts", 256),
        Field("num_experts_per_tok", "top_k", 8),
        Field("moe_routed_scaling_factor", "router.scale", 1.0),
        CapField("moe_router_logit_softcapping", "router.logit_softcap", 0.0),
        *e.shared_fields("shared_expert_intermediate_size", 512),
        *fixed(moe_apply_router_weight_on_input=False),
    ),
    layers=e.LayersByType(num_dense=1),
    dense=e.dense_fields(8192),
)
MIMO_ROPES = ropes(5e6, 1e4, fractions=(0.334, 0.334))
MIMO_EXPERTS = e.Experts(
    moe=replace(e.MOE, router=e.SIGMOID),
    fields=(
        Field("moe_intermediate_size", "expert.hidden_dim", 2048),
        e.ACTIVATION,
        Field("n_routed_experts", "num_experts", 256, alias="num_local_experts"),
        Field("num_experts_per_tok", "top_k", 8),
        Field("norm_topk_prob", "router.renormalise", True),
        Field("routed_scaling_factor", "router.scale", 1.0, read_scale),
        e.Groups(),
    ),
    layers=e.LayersByType(num_dense=1),
    dense=e.dense_fields(16_384),
)
FAMILIES = (
    Family(
        "laguna",
        "LagunaForCausalLM",
        like(LLAMA, qk_norm=c.QKNorm(), output_gate=c.OutputGate(activation="softplus")),
        (
            *(*p.decoder(kv_heads=8, head_dim=128), p.ATTENTION_BIAS),
            Field("gating", "attention.output_gate.over", True, read_gating, choices=GATES),
            Windows(512, rule=no_windows, needs_size=True),
            *(PartialRopes(defaults=LAGUNA_ROPES), LAGUNA_EXPERTS, HeadsByLayer()),
        ),
        m.decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *m.attention_rules(p.SELF_ATTENTION), *p.QK_NORMS),
            *m.linear_rules(f"{p.SELF_ATTENTION}.g_proj", "attention/output_gate"),
            *e.deepseek_rules(bias="experts.e_score_correction_bias", shared="shared_expert"),
        ),
        attention_types=DIFFERENT_HEADS,
    ),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        like(LLAMA, value_dim=1),
        (
            *p.decoder(kv_heads=4, head_dim=192, eps=1e-5),
            Field("v_head_dim", "attention.value_dim", 128),
            BiasesField("attention_bias", layers=p.QKV),
            WindowsAndQuery(129, rule=all_but_first_and_sixth, needs_size=True),
            PartialRopes(defaults=MIMO_ROPES, fraction=0.334),
            *(MIMO_EXPERTS, HeadsOfWindows(), ValueFactor()),
        ),
        m.decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *m.attention_rules(p.SELF_ATTENTION)),
            m.MappingRule(f"{p.SELF_ATTENTION}.attention_sink_bias", "attention/sinks"),
            *e.deepseek_rules(),
        ),
        ignored_tensors=(*INV_FREQ_PATTERNS, r"model\.mtp\..*"),
        weight_factors=value_factor,
        attention_types=DIFFERENT_HEADS,
    ),
)
