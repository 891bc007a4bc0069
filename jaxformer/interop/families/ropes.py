"""Positions that differ from layer to layer, and RoPE with more than the usual fields."""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import ConfigField, Options
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.rope_config import (
    ORIGINAL_LENGTH,
    RopeField,
    first_rope,
    read_rope_section,
    write_rope_section,
)


@dataclass(frozen=True, kw_only=True)
class RopeByNumber(RopeField):
    """No positions in the layers that ``no_rope_layers`` has as 0; by default every fourth."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        rope, count = self.read_rope(reader), reader.integer("num_hidden_layers")
        interval = reader.positive_integer("no_rope_layer_interval", 4)
        turned = reader.sequence("no_rope_layers", int)
        if not turned:
            turned = tuple(int((i + 1) % interval > 0) for i in range(count))
        if len(turned) < count:
            reader.add_problem("no_rope_layers", f"expected a number for each of {count} layers.")
            return (rope,)
        return tuple(rope if turned[i] else None for i in range(count))

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        layers = [layer.positions for layer in model.layers]
        fields = super().write(model)
        return fields and fields | {"no_rope_layers": [int(x is not None) for x in layers]}


class RopeByTheta(RopeField):
    """RoPE with the base of each layer in ``layer_rope_theta``, where 0 is no RoPE (Granite)."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        rope, count = self.read_rope(reader), reader.integer("num_hidden_layers")
        bases = reader.sequence("layer_rope_theta", float)
        if bases is None:
            return (rope,)
        if len(bases) < count:
            reader.add_problem("layer_rope_theta", f"expected a number for each of {count} layers.")
            return (rope,)
        return tuple(replace(rope, base=base) if base else None for base in bases[:count])

    def write(self, model: c.TransformerConfig) -> dict[str, Any]:
        """The fields of RoPE, if there is any, and the bases."""
        ropes = (layer.rope for layer in model.layers)
        bases = [0.0 if rope is None else rope.base for rope in ropes]
        return {**(super().write(model) or {}), "layer_rope_theta": bases}


@dataclass(frozen=True, kw_only=True)
class RopeOfWindows(RopeField):
    """No positions in layers that see the whole context.

    Attributes:
        without_windows: Whether layers have RoPE in a model without windows.
    """

    without_windows: bool = True

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        rope = self.read_rope(reader)
        if self.without_windows and all(window is None for window in windows):
            return (rope,)
        return tuple(None if window is None else rope for window in windows)

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json, none for a model without RoPE if there are such."""
        fields = super().write(model)
        return {} if fields is None and not self.without_windows else fields


@dataclass(frozen=True, kw_only=True)
class RopeByLayerType(RopeField):
    """One RoPE for layers with a window, another, such as YaRN, for layers without.

    Attributes:
        local_base: Default of the base of layers with a window; None has no such field.
        local_base_name: This field.
        writes_scaling: Whether ``rope_scaling`` is written beside the base of layers with a window.
    """

    local_base: float | None = None
    local_base_name: str = "rope_local_base_freq"
    writes_scaling: bool = True

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        length = reader.positive_integer("max_position_embeddings", self.max_length)
        base = local_base = reader.number(self.base_name, self.base)
        if self.local_base is not None:
            local_base = reader.number(self.local_base_name, self.local_base)
        both, old = reader.part("rope_parameters"), reader.section("rope_scaling")
        full, local = (both.section(f"{x}_attention") for x in ("full", "sliding"))
        if full is not None and old is not None:
            base = full.number("rope_theta", base)
            full.mark_read()
        ropes = [
            read_rope_section(section or ConfigReader({}), base=base, max_length=length)
            for section, base in ((old or full, base), (local, local_base))
        ]
        each = tuple(ropes[window is not None] for window in windows)
        return each[:1] if len(set(each)) == 1 else each  # else a cycle as long as `windows`

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        first = first_rope(model)
        if first is None:
            return None
        rotated = [layer for layer in reversed(model.layers) if layer.rope is not None]
        ropes = {layer.window is None: layer.rope for layer in rotated}
        full, lengths = write_rope_section(ropes.get(True) or first)
        local, local_lengths = write_rope_section(ropes.get(False) or first)
        sections = {"full_attention": full, "sliding_attention": local}
        fields = {**lengths, **local_lengths, "rope_parameters": sections}
        if self.local_base is None:
            return fields
        scaling = {name: value for name, value in full.items() if name != "rope_theta"}
        fields[self.base_name] = full["rope_theta"]
        fields[self.local_base_name] = local["rope_theta"]
        if self.writes_scaling:
            fields["rope_scaling"] = None if full["rope_type"] == "default" else scaling
        return fields


@dataclass(frozen=True, kw_only=True)
class RopeWithAlpha(RopeField):
    """NTK scaling by ``alpha`` where "dynamic" scaling has this field (Hunyuan)."""

    def write_rope(self, rope: c.Rope) -> dict[str, Any]:
        """The fields of config.json; transformers needs a ``factor``, which has no effect."""
        fields = super().write_rope(rope)
        if not isinstance(rope.scaling, c.NTKScaling):
            return fields
        section = {"rope_type": "dynamic", "alpha": rope.scaling.factor, "factor": 1.0}
        return {
            **fields,
            "rope_scaling": {"type": "dynamic", **section},
            "rope_parameters": {**fields["rope_parameters"], **section},
        }

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        rope = super().read_rope(reader)
        section = reader.section("rope_scaling") or reader.section("rope_parameters")
        if section is None or not isinstance(rope.scaling, c.DynamicNTK):
            return rope
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            section.get(name)  # in released files, and without effect
        alpha = section.number("alpha", 0.0)
        return rope if alpha == 0 else replace(rope, scaling=c.NTKScaling(factor=alpha))


@dataclass(frozen=True, kw_only=True)
class RopeAndQueryScaling:
    """RoPE, and queries that grow from ``original_max_position_embeddings`` on (Ministral 3).

    Attributes:
        rope: The fields of RoPE.
    """

    rope: ConfigField

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """RoPE, and the scaling, which this family always has."""
        rope = self.rope.read(reader, options)
        section = reader.section("rope_scaling") or reader.section("rope_parameters")
        if section is None:
            reader.add_problem("rope_parameters", "expected an object with llama_4_scaling_beta.")
            return rope
        # Outside the object the length comes first, as in RoPE.
        length = (reader if ORIGINAL_LENGTH in reader else section).integer(ORIGINAL_LENGTH)
        beta = section.number("llama_4_scaling_beta")
        scaling = c.QueryScaling(beta=beta, original_max_length=length)
        return {**rope, "attention.query_scaling": scaling}

    def write(self, model: c.TransformerConfig) -> Options | None:
        fields, scaling = self.rope.write(model), model.layers[0].attention.query_scaling
        if fields is None or not isinstance(scaling, c.QueryScaling):
            return fields
        section = {
            "llama_4_scaling_beta": scaling.beta,
            ORIGINAL_LENGTH: scaling.original_max_length,
        }
        names = ("rope_scaling", "rope_parameters")
        return {**fields, **{name: {**fields[name], **section} for name in names if fields[name]}}
