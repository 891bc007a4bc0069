"""Read and write the RoPE fields of config.json (rope_theta, rope_scaling, rope_parameters).

Old files have ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``), new ones a
single ``rope_parameters``. If a file has both, ``rope_scaling`` takes precedence and the other
fields are its defaults, as in transformers 5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.interop.config_fields import Options
from jaxformer.interop.config_reader import ConfigReader

ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class RopeField:
    """The fields of RoPE; all layers of a model have the same RoPE.

    Attributes:
        base: Default of the base.
        base_name: Field of the base outside ``rope_parameters``.
        max_length: Default of ``max_position_embeddings``.
        original_max_length: Default of ``original_max_position_embeddings``; None is the value in
            the RoPE object.
        pairing: Features that it turns as a pair.
        fraction: Default of the fraction of a head that it turns; None is always the whole head.
        fraction_name: Field of the fraction outside ``rope_parameters``.
        aliases: Pairs of a kind in files of this family and the kind that it means.
    """

    base: float = 10_000.0
    base_name: str = "rope_theta"
    max_length: int = 2048
    original_max_length: int | None = None
    pairing: Any = "halves"
    fraction: float | None = None
    fraction_name: str = "partial_rotary_factor"
    aliases: tuple[tuple[str, str], ...] = ()

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The positions of the layers, as a cycle."""
        windows = options.get("attention.windows", (None,))
        return {"attention.positions": self.read_positions(reader, windows)}

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json, or None for a model without RoPE."""
        rope = first_rope(model)
        return None if rope is None else self.write_rope(rope)

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """The positions of the layers, as a cycle; `windows` has the window of each layer."""
        return (self.read_rope(reader),)

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        """Read the whole config.json."""
        new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
        section = old or new or ConfigReader({})
        if old is not None and new is not None:
            new.mark_read()
        fraction = 1.0
        if self.fraction is not None:
            fraction = reader.number(self.fraction_name, self.fraction)
            fraction = section.number("partial_rotary_factor", fraction)
        elif section.get("rope_type", section.get("type")) != "proportional":
            reason = "this family rotates whole heads"  # p-RoPE has a fraction of the frequencies
            reader.require_value(self.fraction_name, 1, reason=reason)
            section.require_value("partial_rotary_factor", 1, reason=reason)
        original = reader.optional_integer(ORIGINAL_LENGTH, self.original_max_length)
        if original is not None:
            original = reader.positive_integer(ORIGINAL_LENGTH, original)
        return read_rope_section(
            section,
            base=reader.number(self.base_name, self.base),
            max_length=reader.positive_integer("max_position_embeddings", self.max_length),
            pairing=self.pairing,
            fraction=fraction,
            original_max_length=original,
            aliases=self.aliases,
        )

    def write_rope(self, rope: c.Rope) -> dict[str, Any]:
        """Fields of config.json, in the old and the new format, and lengths that it needs."""
        section, lengths = write_rope_section(rope)
        fields: dict[str, Any] = {self.base_name: rope.base, **lengths}
        if self.fraction is not None:
            fields[self.fraction_name] = section["partial_rotary_factor"] = rope.fraction
        plain = {name: v for name, v in section.items() if name not in ("rope_theta", "rope_type")}
        kind = section["rope_type"]
        old = {"type": kind, "rope_type": kind, **plain} if kind != "default" else None
        return {**fields, "rope_scaling": old, "rope_parameters": section}


def first_rope(model: c.TransformerConfig) -> c.Rope | None:
    """RoPE of the first layer that has it."""
    return next((layer.rope for layer in model.layers if layer.rope is not None), None)


def read_rope_section(
    section: ConfigReader,
    *,
    base: float,
    max_length: int,
    pairing: Any = "halves",
    fraction: float = 1.0,
    original_max_length: int | None = None,
    aliases: tuple[tuple[str, str], ...] = (),
) -> c.Rope:
    """RoPE from one ``rope_parameters`` or ``rope_scaling`` object.

    Args:
        section: The object.
        base: Default of the base.
        max_length: The model's ``max_position_embeddings``.
        pairing: Features that form a pair.
        fraction: Default of the rotated fraction of a head.
        original_max_length: The model's ``original_max_position_embeddings``, which takes
            precedence over the object's; None if the model has none.
        aliases: Pairs of a kind and the kind that it means.

    Returns:
        The RoPE option.
    """
    old_name = section.get("type", "default")
    kind = section.get("rope_type", old_name) or "default"
    original = section.positive_integer(ORIGINAL_LENGTH, max_length)
    original = original if original_max_length is None else original_max_length
    if kind == "proportional" and fraction < 1:
        section.add_problem("rope_type", "this family rotates a fraction of each head.")
    return c.Rope(
        base=section.number("rope_theta", base),
        fraction=fraction,
        pairing=pairing,
        scaling=_scaling(section, dict(aliases).get(kind, kind), max_length, original),
    )


ROPE_TYPES: Mapping[type, str] = {
    type(None): "default",
    c.LinearScaling: "linear",
    c.NTKScaling: "ntk",  # not in transformers: reading it back is an error
    c.DynamicNTK: "dynamic",
    c.Llama3Scaling: "llama3",
    c.Yarn: "yarn",
    c.LongRope: "longrope",
    c.PRope: "proportional",
}
# Fields of the scalings, and their names here.
SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", ORIGINAL_LENGTH),
    "longrope": ("short_factor", "long_factor", ORIGINAL_LENGTH),
    "proportional": ("partial_rotary_factor",),
}
OPTIONS = {
    ORIGINAL_LENGTH: "original_max_length",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "partial_rotary_factor": "fraction",
}


def write_rope_section(rope: c.Rope) -> tuple[dict[str, Any], dict[str, int]]:
    """A ``rope_parameters`` object, and the length fields it needs outside.

    Args:
        rope: The RoPE option; fraction and pairing are not written.

    Returns:
        The object, and ``max_position_embeddings`` if the scaling determines it.
    """
    scaling, lengths = rope.scaling, dict[str, int]()
    kind = ROPE_TYPES[type(scaling)]
    section = dict[str, Any](rope_theta=rope.base, rope_type=kind)
    for name in SCALING_FIELDS.get(kind, ()):
        value = getattr(scaling, OPTIONS.get(name, name))
        section[name] = list(value) if isinstance(value, tuple) else value
    match scaling:
        case c.DynamicNTK(original_max_length=length):
            lengths["max_position_embeddings"] = length
        case c.Llama3Scaling() | c.Yarn():
            lengths["max_position_embeddings"] = int(scaling.factor * scaling.original_max_length)
        case c.LongRope(max_length=length):
            section["factor"] = length / scaling.original_max_length
            lengths["max_position_embeddings"] = length
    if isinstance(scaling, c.Yarn) and not scaling.truncate:
        section["truncate"] = False
    if isinstance(scaling, c.Yarn | c.LongRope) and scaling.attention_factor is not None:
        section["attention_factor"] = scaling.attention_factor
    return section, lengths


def _scaling(
    section: ConfigReader, kind: Any, max_length: int, original: int
) -> c.RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return c.LinearScaling(factor=section.number("factor"))
        case "dynamic":
            section.require_value(ORIGINAL_LENGTH, max_length)
            return c.DynamicNTK(factor=section.number("factor"), original_max_length=max_length)
        case "llama3":
            names = SCALING_FIELDS[kind][:-1]
            factors = {name: section.number(name) for name in names}
            return c.Llama3Scaling(**factors, original_max_length=original)
        case "yarn":
            return _yarn(section, max_length, original)
        case "longrope" | "su":
            return _longrope(section, max_length, original)
        case "proportional":
            section.require_value("factor", 1)
            return c.PRope(fraction=section.number("partial_rotary_factor", 1.0))
    section.add_problem(
        "rope_type" if "rope_type" in section else "type",
        "expected one of default, linear, dynamic, llama3, yarn, longrope, proportional.",
    )
    return None


def _yarn(section: ConfigReader, max_length: int, original: int) -> c.Yarn:
    factor = section.number("factor", max_length / original)
    attention = section.optional_number("attention_factor")
    mscale = section.optional_number("mscale")
    all_dim = section.optional_number("mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = yarn_attention_factor(factor, mscale=mscale, mscale_all_dim=all_dim)
    return c.Yarn(
        factor=factor,
        original_max_length=original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=section.boolean("truncate", True),
    )


def _longrope(section: ConfigReader, max_length: int, original: int) -> c.LongRope:
    attention = section.optional_number("attention_factor")
    factor = section.number("factor", max_length / original)
    if attention is None and factor != max_length / original:
        grows = factor > 1 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if grows else 1.0
    return c.LongRope(
        short_factors=section.sequence("short_factor", float) or (1.0,),
        long_factors=section.sequence("long_factor", float) or (1.0,),
        original_max_length=original,
        max_length=max_length,
        attention_factor=attention,
    )
