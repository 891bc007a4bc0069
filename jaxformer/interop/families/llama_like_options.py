"""Where families like Llama differ: windows, positions, norms and feed-forward networks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.families.option_fields import Field
from jaxformer.interop.param_mapping import MappingRule, fused_rules, layer_norm_rules, linear_rules
from jaxformer.interop.rope_config import RopeFields, read_rope_section, write_rope_section

POST_NORMS = layer_norm_rules(
    p.LAYER_PREFIX,
    post_attention_norm="post_attention_layernorm",
    post_feed_forward_norm="post_feedforward_layernorm",
)
GLM_NORMS = layer_norm_rules(
    p.LAYER_PREFIX,
    pre_attention_norm="input_layernorm",
    post_attention_norm="post_self_attn_layernorm",
    pre_feed_forward_norm="post_attention_layernorm",
    post_feed_forward_norm="post_mlp_layernorm",
)
NORM_RULES: Mapping[str, tuple[MappingRule, ...]] = {
    "pre": p.PRE_NORMS,
    "res_post": POST_NORMS,
    "sandwich": GLM_NORMS,
}


@dataclass(frozen=True)
class Windows:
    """How config.json has the sliding windows: here every layer sees the whole context."""

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """Windows of the layers, as a cycle."""
        return (None,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The fields of config.json."""
        return {}


@dataclass(frozen=True)
class OneWindow(Windows):
    """One window for all layers.

    Attributes:
        default: Its value if the file lacks it.
        switch: A field without which there is none; None has no such field.
    """

    default: int | None
    switch: str | None = None

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The window."""
        reader.get("max_window_layers")  # in released files, and without effect
        return (self._read_window(reader),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window and the switch."""
        window = p.first_window(config)
        switch = {} if self.switch is None else {self.switch: window is not None}
        return {"sliding_window": window, **switch}

    def _read_window(self, reader: ConfigReader) -> int | None:
        window = reader.optional_integer("sliding_window", self.default)
        return window if self.switch is None or reader.boolean(self.switch, False) else None


@dataclass(frozen=True)
class LayerTypeWindows(OneWindow):
    """A window for the layers that ``layer_types`` names; without it, all but every `period`-th.

    Attributes:
        period: None is a window in every layer.
    """

    period: int | None = None

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        window, period = self._read_window(reader), self.period
        reader.get("max_window_layers")  # in released files, and without effect
        if isinstance(reader.get("sliding_window_pattern"), int):
            # Without a window transformers writes 0.
            read = reader.integer if window is None else reader.positive_integer
            period = read("sliding_window_pattern")

        def slides(layer: int) -> bool:
            return window is not None and (period is None or (layer + 1) % period != 0)

        sliding = p.read_layer_types(reader, num_layers, slides)
        return (None,) if window is None else p.window_cycle(reader, sliding, window)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window, the switch and the types."""
        return {**super().write(config), **p.write_layer_types(config)}


@dataclass(frozen=True)
class LastLayerWindows(LayerTypeWindows):
    """A window for the layers from ``max_window_layers`` on, or by ``layer_types`` (Qwen).

    Attributes:
        first: Default of ``max_window_layers``.
    """

    default: int | None = 4096
    switch: str | None = "use_sliding_window"
    first: int = 28

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        window = self._read_window(reader)
        first = reader.integer("max_window_layers", self.first)
        sliding = p.read_layer_types(
            reader, num_layers, lambda i: window is not None and i >= first
        )
        return p.window_cycle(reader, sliding, window)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window, the switch, the types, and the first layer that has the window."""
        fields = super().write(config)
        kinds = [*fields["layer_types"], "sliding_attention"]
        return {**fields, "max_window_layers": kinds.index("sliding_attention")}


@dataclass(frozen=True)
class WindowsByInterval(LayerTypeWindows):
    """A window for the layers that ``layer_types`` names; without it, all but every n-th.

    Attributes:
        period: Default of n.
        fields: Fields of n, of which the last one counts.
    """

    period: int = 4
    fields: tuple[str, ...] = ()

    def read(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows."""
        period = self.period
        for name in self.fields:
            period = reader.positive_integer(name, period)
            reader.get(f"_{name}")
        sliding = p.read_layer_types(reader, num_layers, lambda i: (i + 1) % period > 0)
        return p.window_cycle(reader, sliding, self._read_window(reader))


@dataclass(frozen=True, kw_only=True)
class OneRope(RopeFields):
    """The same RoPE in every layer.

    Attributes:
        has_default_scaling: Whether a file without ``rope_parameters`` and ``rope_scaling`` means
            a scaling, so that it is refused.
    """

    has_default_scaling: bool = False

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """Positions of the layers, as a cycle; `windows` are those of the layers."""
        return (self.read_rope(reader),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json, or None for a model without RoPE."""
        if not p.has_rope(config):
            return None
        return self.write_rope(p.first_rope(config))

    def read_query_scaling(self, reader: ConfigReader) -> c.QueryScaling | None:
        """How queries grow with the position, if they do."""
        return None

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        """Read the whole config.json."""
        has_section = "rope_parameters" in reader or "rope_scaling" in reader
        if self.has_default_scaling and not has_section:
            reader.add_problem("rope_parameters", "the scaling of RoPE must be in the file.")
        return super().read_rope(reader)


@dataclass(frozen=True, kw_only=True)
class RopeByNumber(OneRope):
    """No positions in the layers that ``no_rope_layers`` has as 0; by default every fourth."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing."""
        rope, count = self.read_rope(reader), reader.integer("num_hidden_layers")
        interval = reader.positive_integer("no_rope_layer_interval", 4)
        turned = reader.sequence("no_rope_layers", int)
        if turned is None:
            turned = tuple(int((i + 1) % interval > 0) for i in range(count))
        if len(turned) < count:
            reader.add_problem("no_rope_layers", f"expected a number for each of {count} layers.")
            return (rope,)
        return tuple(rope if turned[i] else None for i in range(count))

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """RoPE, and which layers have it."""
        layers = [layer.positions for layer in config.layers]
        fields = super().write(config)
        return fields and fields | {"no_rope_layers": [int(x is not None) for x in layers]}


@dataclass(frozen=True, kw_only=True)
class RopeOfWindows(OneRope):
    """No positions in layers that see the whole context.

    Attributes:
        without_windows: Whether layers have RoPE in a model without windows.
    """

    without_windows: bool = True

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or nothing, as the windows."""
        rope = self.read_rope(reader)
        if self.without_windows and all(window is None for window in windows):
            return (rope,)
        return tuple(None if window is None else rope for window in windows)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json, none for a model without RoPE if there are such."""
        fields = super().write(config)
        return {} if fields is None and not self.without_windows else fields


@dataclass(frozen=True, kw_only=True)
class RopeByLayerType(OneRope):
    """One RoPE for layers with a window, another, such as YaRN, for those without.

    Attributes:
        local_base: Default of ``rope_local_base_freq``, the base of the former; None has no such
            field.
    """

    local_base: float | None = None

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """The RoPE of each layer."""
        length = reader.positive_integer("max_position_embeddings", self.max_length)
        base = local_base = reader.number("rope_theta", self.base)
        if self.local_base is not None:
            local_base = reader.number("rope_local_base_freq", self.local_base)
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
        return each[:1] if len(set(each)) == 1 else each  # else a cycle as long as that of windows

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Both."""
        if not p.has_rope(config):
            return None
        ropes = {
            layer.window is None: layer.positions
            for layer in reversed(config.layers)
            if isinstance(layer.positions, c.Rope)
        }
        first = p.first_rope(config)
        full, lengths = write_rope_section(ropes.get(True, first))
        local, local_lengths = write_rope_section(ropes.get(False, first))
        sections = {"full_attention": full, "sliding_attention": local}
        fields = {**lengths, **local_lengths, "rope_parameters": sections}
        if self.local_base is None:
            return fields
        scaling = {name: value for name, value in full.items() if name != "rope_theta"}
        return {
            **fields,
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": local["rope_theta"],
            "rope_scaling": None if full["rope_type"] == "default" else scaling,
        }


@dataclass(frozen=True, kw_only=True)
class RopeWithAlpha(OneRope):
    """NTK scaling by ``alpha`` where "dynamic" scaling has this field (Hunyuan)."""

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json; transformers needs a ``factor``, which has no effect."""
        fields = super().write(config)
        if fields is None or not isinstance(scaling := p.first_rope(config).scaling, c.NTKScaling):
            return fields
        section = {"rope_type": "dynamic", "alpha": scaling.factor, "factor": 1.0}
        return {
            **fields,
            "rope_scaling": {"type": "dynamic", **section},
            "rope_parameters": {**fields["rope_parameters"], **section},
        }

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        """RoPE of the whole config.json."""
        rope = super().read_rope(reader)
        section = reader.section("rope_scaling") or reader.section("rope_parameters")
        if section is None or not isinstance(rope.scaling, c.DynamicNTK):
            return rope
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            section.get(name)  # in released files, and without effect
        alpha = section.number("alpha", 0.0)
        return rope if alpha == 0 else replace(rope, scaling=c.NTKScaling(factor=alpha))


@dataclass(frozen=True, kw_only=True)
class RopeAndQueryScaling(OneRope):
    """RoPE, and queries that grow from ``original_max_position_embeddings`` on (Ministral 3)."""

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of config.json."""
        fields, scaling = super().write(config), p.heads_of(config).query_scaling
        if scaling is None or fields is None:
            return fields
        section = {
            "llama_4_scaling_beta": scaling.beta,
            "original_max_position_embeddings": scaling.original_max_length,
        }
        names = ("rope_scaling", "rope_parameters")
        return fields | {name: {**fields[name], **section} for name in names if fields[name]}

    def read_query_scaling(self, reader: ConfigReader) -> c.QueryScaling | None:
        """The scaling, which this family always has."""
        section = reader.section("rope_scaling") or reader.section("rope_parameters")
        if section is None:
            reader.add_problem("rope_parameters", "expected an object with llama_4_scaling_beta.")
            return None
        name = "original_max_position_embeddings"  # outside the object it comes first, as in RoPE
        length = (reader if name in reader else section).integer(name)
        return c.QueryScaling(
            beta=section.number("llama_4_scaling_beta"), original_max_length=length
        )


class DivisorField(Field):
    """A field whose inverse is the option."""

    def read_option(self, reader: ConfigReader, options: Mapping[str, Any]) -> float:
        """The inverse."""
        divisor = super().read_option(reader, options)
        if divisor == 0:
            reader.add_problem(self.name, "the logits are divided by it.")
        return 1 / (divisor or 1.0)

    def write_option(self, value: float) -> float:
        """The inverse."""
        return 1 / value if value else 0.0


GRANITE_MULTIPLIERS = (
    Field("embedding_multiplier", "embedding.scale", 1.0),
    Field("attention_multiplier", "attention.scale", 1.0),
    Field("residual_multiplier", "residual_multiplier", 1.0),
    DivisorField("logits_scaling", "head.multiplier", 1.0),
)


@runtime_checkable
class Branch(Protocol):
    """How config.json and the tensors have the feed-forward networks."""

    @property
    def rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        ...

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """Feed-forward networks of the layers, as a cycle."""
        ...

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json beside those of `write_sizes`; None for another network."""
        ...


@dataclass(frozen=True)
class Dense:
    """The same network in every layer.

    Attributes:
        kind: `GLU`, or `MLP` for one without a gate.
        activation: Default of the activation, by its name in config.json.
        activation_field: Field of the activation.
        hidden_dim: Default of ``intermediate_size``; None has none.
        rules: Mapping rules of a layer.
    """

    kind: type[c.GLU] | type[c.MLP] = c.GLU
    activation: str = "silu"
    activation_field: str = "hidden_act"
    hidden_dim: int | None = None
    rules: tuple[MappingRule, ...] = p.FEED_FORWARD

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network."""
        return (
            self.kind(
                hidden_dim=reader.integer("intermediate_size", self.hidden_dim),
                activation=reader.choice(self.activation_field, self.activation, HF_ACTIVATIONS),
                bias=bias,
            ),
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The activation."""
        branch: Any = config.feed_forward[0]
        if not all(isinstance(x, self.kind) for x in config.feed_forward):
            return None
        return {self.activation_field: hf_activation_name(branch.activation)}


FUSED_GLU = (
    *fused_rules(f"{p.LAYER_PREFIX}.mlp.gate_up_proj", "feed_forward", ("gate", "up")),
    *linear_rules(f"{p.LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
)
