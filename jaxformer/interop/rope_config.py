"""Read and write the RoPE fields of config.json (rope_theta, rope_scaling, rope_parameters).

Old files have ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``), new ones a
single ``rope_parameters``. If a file has both, ``rope_scaling`` takes precedence and the other
fields are its defaults, as in transformers 5.
"""

import math
from typing import Any

from jaxformer import config as c
from jaxformer.functional.rope_scaling import yarn_attention_factor
from jaxformer.interop.config_reader import ConfigReader


def read_rope(
    reader: ConfigReader,
    *,
    pairing: Any = "halves",
    base: float = 10_000.0,
    base_name: str = "rope_theta",
    fraction: float | None = None,
    fraction_name: str = "partial_rotary_factor",
    max_length: int = 2048,
    original_max_length: int | None = None,
    aliases: tuple[str, ...] = (),
) -> c.Rope:
    """RoPE of a model whose layers all use the same one.

    Args:
        reader: The whole config.json.
        pairing: Features that form a pair, which is fixed for each family.
        base: Default of the base.
        base_name: Field of the base outside ``rope_parameters``.
        fraction: Default of the rotated fraction of a head; None if the family rotates whole heads.
        fraction_name: Field of the fraction outside ``rope_parameters``.
        max_length: Default of ``max_position_embeddings``.
        original_max_length: Default of ``original_max_position_embeddings``; None is the value in
            the RoPE object.
        aliases: Kinds that mean "longrope" in files of this family.

    Returns:
        The RoPE option.
    """
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    section = old or new or ConfigReader({})
    if old is not None and new is not None:
        _mark_read(new)
    base = reader.number(base_name, base)
    if fraction is None and section.get("rope_type", section.get("type")) == "proportional":
        rotated_fraction = 1.0  # the file's fraction is that of the frequencies
    elif fraction is None:
        reader.require_value(fraction_name, 1, reason="this family rotates whole heads")
        section.require_value("partial_rotary_factor", 1, reason="this family rotates whole heads")
        rotated_fraction = 1.0
    else:
        rotated_fraction = section.number(
            "partial_rotary_factor", reader.number(fraction_name, fraction)
        )
    max_length = reader.integer("max_position_embeddings", max_length)
    return read_rope_section(
        section,
        pairing=pairing,
        base=base,
        fraction=rotated_fraction,
        max_length=max_length,
        original_max_length=reader.optional_integer(
            "original_max_position_embeddings", original_max_length
        ),
        aliases=aliases,
    )


def read_rope_section(
    section: ConfigReader,
    *,
    base: float,
    max_length: int,
    pairing: Any = "halves",
    fraction: float = 1.0,
    original_max_length: int | None = None,
    aliases: tuple[str, ...] = (),
) -> c.Rope:
    """RoPE from one ``rope_parameters`` or ``rope_scaling`` object.

    Args:
        section: The object.
        base: Default of the base.
        max_length: The model's ``max_position_embeddings``.
        pairing: Features that form a pair.
        fraction: Default of the rotated fraction of a head.
        original_max_length: The model's ``original_max_position_embeddings``, which takes
            precedence over that of the object; None if it has none.
        aliases: Kinds that mean "longrope".

    Returns:
        The RoPE option.
    """
    old_name = section.get("type", "default")
    kind = section.get("rope_type", old_name) or "default"
    original = section.integer("original_max_position_embeddings", max_length)
    original = original if original_max_length is None else original_max_length
    if original < 1:
        section.add_problem(
            "original_max_position_embeddings", f"must be positive; got {original}."
        )
        original = 1
    if kind == "proportional" and fraction < 1:
        section.add_problem("rope_type", "this family rotates a fraction of each head.")
    return c.Rope(
        base=section.number("rope_theta", base),
        fraction=fraction,
        pairing=pairing,
        scaling=_scaling(section, "longrope" if kind in aliases else kind, max_length, original),
    )


def write_rope(
    rope: c.Rope, *, base_name: str = "rope_theta", fraction_name: str | None = None
) -> dict[str, Any]:
    """RoPE fields for config.json, in the old and the new format.

    Args:
        rope: The RoPE option.
        base_name: Field of the base outside ``rope_parameters``.
        fraction_name: Field of the rotated fraction; None if the family has none.

    Returns:
        The fields, including length fields that the scaling needs.
    """
    section, lengths = write_rope_section(rope)
    fields: dict[str, Any] = {base_name: rope.base, **lengths}
    if fraction_name is not None:
        fields[fraction_name] = section["partial_rotary_factor"] = rope.fraction
    plain = {name: v for name, v in section.items() if name not in ("rope_theta", "rope_type")}
    kind = section["rope_type"]
    old = {"type": kind, "rope_type": kind, **plain} if kind != "default" else None
    return {**fields, "rope_scaling": old, "rope_parameters": section}


ROPE_TYPES: dict[type, str] = {
    type(None): "default",
    c.LinearScaling: "linear",
    c.NTKScaling: "ntk",  # not in transformers: reading it back is an error
    c.DynamicNTK: "dynamic",
    c.Llama3Scaling: "llama3",
    c.Yarn: "yarn",
    c.LongRope: "longrope",
    c.PRope: "proportional",
}


def write_rope_section(rope: c.Rope) -> tuple[dict[str, Any], dict[str, int]]:
    """A ``rope_parameters`` object, and the length fields it needs outside.

    Args:
        rope: The RoPE option; fraction and pairing are not written.

    Returns:
        The object, and ``max_position_embeddings`` if the scaling determines it.
    """
    scaling, lengths = rope.scaling, dict[str, int]()
    section = dict[str, Any](rope_theta=rope.base, rope_type=ROPE_TYPES[type(scaling)])
    match scaling:
        case c.LinearScaling(factor=factor):
            section["factor"] = factor
        case c.DynamicNTK(factor=factor, original_max_length=length):
            section["factor"] = factor
            lengths["max_position_embeddings"] = length
        case c.Llama3Scaling() as s:
            section |= {
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_length,
            }
            lengths["max_position_embeddings"] = int(s.factor * s.original_max_length)
        case c.Yarn() as s:
            section |= {
                "factor": s.factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "original_max_position_embeddings": s.original_max_length,
                **({} if s.truncate else {"truncate": False}),
            }
            lengths["max_position_embeddings"] = int(s.factor * s.original_max_length)
        case c.LongRope() as s:
            section |= {
                "factor": s.max_length / s.original_max_length,
                "short_factor": list(s.short_factors),
                "long_factor": list(s.long_factors),
                "original_max_position_embeddings": s.original_max_length,
            }
            lengths["max_position_embeddings"] = s.max_length
        case c.PRope(fraction=fraction):
            section["partial_rotary_factor"] = fraction
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
            section.require_value("original_max_position_embeddings", max_length)
            return c.DynamicNTK(factor=section.number("factor"), original_max_length=max_length)
        case "llama3":
            return c.Llama3Scaling(
                factor=section.number("factor"),
                low_freq_factor=section.number("low_freq_factor"),
                high_freq_factor=section.number("high_freq_factor"),
                original_max_length=original,
            )
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


def _mark_read(section: ConfigReader) -> None:
    """Mark all attributes of a section as read."""
    for name in section.values:
        section.get(name)
