"""Fields of config.json with one option each: a row of a table is read and written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.rope_config import RopeFields

T = TypeVar("T")


EMPTY: Mapping[str, Any] = MappingProxyType({})
POSITIVE_INTEGER = ConfigReader.positive_integer
READERS: Mapping[type, Callable[[ConfigReader, str, Any], Any]] = {
    type(None): ConfigReader.integer,
    int: ConfigReader.integer,
    float: ConfigReader.number,
    bool: ConfigReader.boolean,
}


@dataclass(frozen=True)
class Field:
    """A field of config.json and the option that it sets.

    Attributes:
        name: The field; "attn_config.clip_qkv" is one of an object.
        option: Path of the option in the configuration, such as "norm.eps"; of a cycle over layers
            it is that of the first.
        default: Value if the file lacks the field, of its type, or a function that gives it from
            the options read before; None is an integer that the file must have.
        read: How to read the field, if not by the type of its default.
        choices: Option of each value of the field; None takes the value itself, and of a string
            the activation with that name.
        alias: Name of the field in some files, after which `name` is looked for.
    """

    name: str
    option: str
    default: Any = None
    read: Callable[[ConfigReader, str, Any], Any] | None = None
    choices: Mapping[Any, Any] | None = None
    alias: str | None = None

    def read_option(self, reader: ConfigReader, options: Mapping[str, Any]) -> Any:
        """Read the option; `options` are those of the fields before."""
        default = self.default(options) if callable(self.default) else self.default
        reader, field_name = part_and_name(reader, self.name)
        if isinstance(default, str):
            return reader.choice(field_name, default, self.choices or HF_ACTIVATIONS)
        read = READERS[type(default)] if self.read is None else self.read
        if self.alias is not None and default is not None:
            default = read(reader, self.alias, default)
        value = read(reader, field_name, default)
        if self.choices is None:
            return value
        if value not in self.choices:
            known = " or ".join(map(repr, self.choices))
            reader.add_problem(field_name, f"not supported by jaxformer; it must be {known}.")
        return self.choices.get(value)

    def write_option(self, value: Any) -> Any:
        """Return the value of the field for an option; the default if no choice has it.

        Raises:
            ValueError: An activation of which no family has a name.
        """
        name = hf_activation_name(value) if isinstance(self.default, str) else value
        if self.choices is None:
            return name
        return next(
            (name for name, choice in self.choices.items() if choice == value), self.default
        )


@dataclass(frozen=True)
class BiasesField(Field):
    """A field that says whether some linear layers have biases; the option names all that do.

    Attributes:
        layers: The linear layers.
    """

    layers: tuple[str, ...] = ()

    def read_option(self, reader: ConfigReader, options: Mapping[str, Any]) -> Any:
        """The layers with biases by this field and those before."""
        has_biases = super().read_option(reader, options)
        return (*options.get(self.option, ()), *(self.layers if has_biases else ()))

    def write_option(self, value: Any) -> bool:
        """Whether all layers of this field have biases."""
        return {*self.layers} <= {*value}


def part_and_name(reader: ConfigReader, path: str) -> tuple[ConfigReader, str]:
    """Return the reader of the object that has a field, and the name of the field in it."""
    *parts, name = path.split(".")
    for part in parts:
        reader = reader.part(part)
    return reader, name


def four_widths(options: Mapping[str, Any]) -> int:
    """Four times the width of the model, the usual width of a network without a gate."""
    return int(4 * options["model_dim"])


def read_options(
    reader: ConfigReader, fields: Iterable[Field], context: Mapping[str, Any] = EMPTY
) -> dict[str, Any]:
    """Read the options of the fields, by path; defaults may depend on those of `context` too."""
    options = dict[str, Any]()
    for row in fields:
        options[row.option] = row.read_option(reader, {**context, **options})
    return options


def with_options(parent: T, options: Mapping[str, Any]) -> T:
    """Replace options of a dataclass, by path; a cycle over layers gets one entry."""
    changes, inner = dict[str, Any](), dict[str, dict[str, Any]]()
    for path, value in options.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    for name, parts in inner.items():
        child = getattr(parent, name)
        is_cycle = isinstance(child, tuple)
        changed = with_options(child[0] if is_cycle else child, parts)
        changes[name] = (changed,) if is_cycle else changed
    return replace(parent, **changes)  # type: ignore[type-var]


def write_options(parent: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Return the fields of a configuration, or of a part of one."""
    values = dict[str, Any]()
    for row in fields:
        *parts, name = row.name.split(".")
        section = values
        for part in parts:
            section = section.setdefault(part, {})
        section[name] = row.write_option(_option(parent, row))
    return values


def _option(parent: Any, row: Field) -> Any:
    *path, name = row.option.split(".")
    for part in path:
        child = getattr(parent, part)
        parent = child[0] if isinstance(child, tuple) else child
    option = getattr(parent, name)
    if isinstance(parent, c.MultiHead) and name == "scale" and option is None and not row.choices:
        return parent.head_dim**-0.5
    return option


@dataclass(frozen=True, kw_only=True)
class FieldTable:
    """A family as one of its configurations and the fields that set the options of the others.

    Attributes:
        template: A configuration of the family, with any sizes.
        fields: Fields that set options. Without fields for them, there are as many key-value heads
            as heads, heads are model_dim / num_heads wide, and networks 4 * model_dim.
        constants: Fields that must be absent, null, or this value.
        unused: Fields without effect.
        written: Fields that are written beside the others.
        rope: Fields of RoPE, if all models have it.
    """

    template: c.TransformerConfig
    fields: tuple[Field, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    rope: RopeFields | None = None

    def read(self, reader: ConfigReader, more: Mapping[str, Any] = EMPTY) -> c.TransformerConfig:
        """Read config.json; `more` are options by path, besides those of the fields."""
        for name, value in self.constants.items():
            reader.require_value(name, value)
        for path in self.unused:
            part, name = part_and_name(reader, path)
            part.get(name)
        options = {**read_options(reader, self.fields), **more}
        if self.rope is not None:
            options["attention.positions"] = (self.rope.read_rope(reader),)
        heads, width = options["attention.num_heads"], options["model_dim"]
        if "attention.head_dim" not in options and width % heads and not reader.problems:
            names = {row.option: row.name for row in self.fields}
            reason = f"it must divide {names['model_dim']}, {width}."
            reader.add_problem(names["attention.num_heads"], reason)
        head_dim = max(1, width // max(1, heads))
        defaults = {"attention.num_kv_heads": heads, "attention.head_dim": head_dim}
        if hasattr(self.template.feed_forward[0], "hidden_dim"):
            defaults["feed_forward.hidden_dim"] = four_widths(options)
        return with_options(self.template, {**defaults, **options})

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for a model without the parts of the template."""
        pairs = zip(_parts(self.template), _parts(config), strict=True)
        if any(part is not None and type(part) is not type(actual) for part, actual in pairs):
            return None
        positions: Any = config.layers[0].positions
        rope = {} if self.rope is None else self.rope.write_rope(positions)
        return {**write_options(config, self.fields), **rope, **self.written}


def _parts(config: c.TransformerConfig) -> tuple[Any, ...]:
    embedding, branch = config.embedding, config.feed_forward[0]
    positions = embedding.positions, config.layers[0].positions
    return config.topology, branch, getattr(branch, "expert", None), embedding.norm, *positions


def template(
    attention: c.MultiHead | None = None, branch: c.FeedForward | None = None, **fields: Any
) -> c.TransformerConfig:
    """A configuration with small sizes: Llama's, or with these options."""
    sizes: dict[str, Any] = {"vocab_size": 1, "model_dim": 4, "num_layers": 1}
    attention = attention or c.MultiHead(num_heads=1, num_kv_heads=1, head_dim=2)
    branches = (branch or c.GLU(hidden_dim=1),)
    return c.TransformerConfig(**sizes, attention=attention, feed_forward=branches, **fields)
