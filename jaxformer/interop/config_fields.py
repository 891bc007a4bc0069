"""Fields of config.json and the options that they set: one object reads and writes both.

A family is a template of the zoo, or one like it, and a tuple of such objects.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.hf_activations import HF_ACTIVATIONS, hf_activation_name

T = TypeVar("T")
Options = Mapping[str, Any]  # by path, such as "norm.eps"
EMPTY: Options = MappingProxyType({})
NOT_SUPPORTED = "not supported by jaxformer"
MISSING = object()  # an option that a kind does not have
POSITIVE_INTEGER = ConfigReader.positive_integer
OPTIONAL_NUMBER = ConfigReader.optional_number
PARSERS: Mapping[type, Callable[[ConfigReader, str, Any], Any]] = {
    type(None): ConfigReader.integer,
    int: ConfigReader.integer,
    float: ConfigReader.number,
    bool: ConfigReader.boolean,
}


@runtime_checkable
class ConfigField(Protocol):
    """A field of config.json, or a few that belong together."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """Read the options that the field sets.

        Args:
            reader: The whole config.json, which records problems.
            options: Options of the fields before.

        Returns:
            Options by path; a `Change` is a function of the option that it changes.
        """
        ...

    def write(self, model: Any) -> Options | None:
        """Return the entries of config.json for a model, by path; None if they cannot say it."""
        ...


Fields = tuple[ConfigField, ...]


@dataclass(frozen=True)
class Change:
    """A function that changes an option when all others are known, such as the list of layers.

    Attributes:
        function: The function of the option.
    """

    function: Callable[[Any], Any]


@dataclass(frozen=True)
class Field:
    """A field of config.json and the option that it sets.

    Attributes:
        name: The field; "attn_config.clip_qkv" is one of an object.
        option: Path of the option in the configuration, such as "norm.eps"; in a cycle over layers
            it is the path in the first. Options of a part that the model lacks have no effect.
        default: Value if the file lacks the field, of its type, or a function that gives it from
            the options read before; None is an integer that the file must have.
        parse: How to read the field, if not by the type of its default.
        choices: Option of each value of the field; None takes the value itself, and of a string
            the activation with that name.
        alias: Name of the field in some files, after which `name` is looked for.
    """

    name: str
    option: str
    default: Any = None
    parse: Callable[[ConfigReader, str, Any], Any] | None = None
    choices: Mapping[Any, Any] | None = None
    alias: str | None = None

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {self.option: self.read_value(reader, options)}

    def write(self, model: Any) -> Options | None:
        """Write the field, unless the model lacks the part that has the option.

        Returns:
            The field, or None if this part is of a kind without the option.

        Raises:
            ValueError: No family has a name for the activation.
        """
        *path, name = self.option.split(".")
        for part in path:
            child = getattr(model, part, MISSING)
            model = child[0] if isinstance(child, tuple) else child
            if model is None:
                return {}
        value = getattr(model, name, MISSING)
        if value is MISSING:
            return None
        is_scale = isinstance(model, c.MultiHead) and name == "scale" and not self.choices
        if is_scale and value is None:
            value = model.head_dim**-0.5
        return {self.name: self.write_value(value)}

    def read_value(self, reader: ConfigReader, options: Options) -> Any:
        """The value of the option in a file; earlier fields have read `options`."""
        default = self.default(options) if callable(self.default) else self.default
        reader, field_name = part_and_name(reader, self.name)
        if isinstance(default, str):
            return reader.choice(field_name, default, self.choices or HF_ACTIVATIONS)
        parse = PARSERS[type(default)] if self.parse is None else self.parse
        if self.alias is not None and default is not None:
            default = parse(reader, self.alias, default)
        value = parse(reader, field_name, default)
        if self.choices is None:
            return value
        if value not in self.choices:
            known = " or ".join(map(repr, self.choices))
            reader.add_problem(field_name, f"not supported by jaxformer; it must be {known}.")
        return self.choices.get(value)

    def write_value(self, value: Any) -> Any:
        """The value of the field for an option; the default if no choice has it."""
        if self.choices is None:
            return hf_activation_name(value) if isinstance(self.default, str) else value
        return next(
            (name for name, choice in self.choices.items() if choice == value), self.default
        )


@dataclass(frozen=True)
class BiasesField(Field):
    """A field that says whether some linear layers have biases; the option names all that do.

    Attributes:
        layers: The linear layers.
    """

    option: str = "attention.biases"
    default: Any = False
    layers: tuple[str, ...] = ()

    def read_value(self, reader: ConfigReader, options: Options) -> Any:
        """The layers with biases by this field and by earlier fields."""
        has_biases = super().read_value(reader, options)
        return (*options.get(self.option, ()), *(self.layers if has_biases else ()))

    def write_value(self, value: Any) -> bool:
        """Whether all layers of this field have biases."""
        return {*self.layers} <= {*value}


@dataclass(frozen=True)
class PresenceField(Field):
    """A field that says whether the model has a part.

    Attributes:
        part: The part.
    """

    default: Any = False
    part: Any = None

    def read_value(self, reader: ConfigReader, options: Options) -> Any:
        """The part, or None."""
        return self.part if super().read_value(reader, options) else None

    def write_value(self, value: Any) -> bool:
        return value is not None


@dataclass(frozen=True)
class FactorField(Field):
    """A field that says whether an option is a factor that follows from others, or 1.

    Attributes:
        factor: Function of the options before that gives the factor.
    """

    default: Any = False
    _: KW_ONLY
    factor: Callable[[Options], float]

    def read_value(self, reader: ConfigReader, options: Options) -> float:
        """The factor, or 1."""
        return self.factor(options) if super().read_value(reader, options) else 1.0

    def write_value(self, value: float) -> bool:
        return value != 1


@dataclass(frozen=True)
class HeadsField(Field):
    """The number of heads, each with its own keys and values, together as wide as the model.

    Attributes:
        width: Field of the width of the model, which the number must divide.
    """

    option: str = "attention.num_heads"
    parse: Callable[[ConfigReader, str, Any], Any] | None = POSITIVE_INTEGER
    width: str = "hidden_size"

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The number of heads, of KV heads, and their width."""
        heads, width = self.read_value(reader, options), options["model_dim"]
        if width % heads and not reader.problems:
            reader.add_problem(self.name, f"it must divide {self.width}, {width}.")
        return {
            self.option: heads,
            "attention.num_kv_heads": heads,
            "attention.head_dim": max(1, width // heads),
        }


class NoEntries:
    """A field that is read and not written."""

    def write(self, model: Any) -> Options:
        return {}


@dataclass(frozen=True)
class NotWritten(NoEntries):
    """A field that files may have and that is not written.

    Attributes:
        field: The field.
    """

    field: ConfigField

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return self.field.read(reader, options)


@dataclass(frozen=True)
class OldName(NoEntries):
    """A field of old files for what others say under another name; it is not written.

    Attributes:
        field: The field, which takes precedence.
    """

    field: Any

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """Its options if the file has it."""
        return self.field.read(reader, options) if self.field.name in reader else {}


@dataclass(frozen=True)
class Derived(NoEntries):
    """An option that follows from options of earlier fields.

    Attributes:
        option: Its path.
        value: Function of these options.
    """

    option: str
    value: Callable[[Options], Any]

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {self.option: self.value(options)}


@dataclass(frozen=True)
class Fixed(NoEntries):
    """A field that must be absent, null, or a value.

    Attributes:
        name: The field.
        allowed: The values.
        reason: What is wrong with others.
    """

    name: str
    allowed: tuple[Any, ...]
    reason: str = NOT_SUPPORTED

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """Record a problem if there is one."""
        part, name = part_and_name(reader, self.name)
        part.require_value(name, *self.allowed, reason=self.reason)
        return {}


def fixed(reason: str = NOT_SUPPORTED, /, **values: Any) -> Fields:
    """Fields that must be absent, null, or these values; others are refused with the reason."""
    return tuple(Fixed(name, (value,), reason) for name, value in values.items())


@dataclass(frozen=True)
class Repeated(NoEntries):
    """A field with the same information as others.

    Attributes:
        name: The field.
        value: Function that gives it from the options before.
        reason: What is wrong with others.
    """

    name: str
    value: Callable[[Options], Any]
    reason: str = NOT_SUPPORTED

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """Record a problem if it differs."""
        part, name = part_and_name(reader, self.name)
        part.require_value(name, self.value(options), reason=self.reason)
        return {}


class Unused(NoEntries):
    """Fields without effect, which files may have.

    Args:
        *names: The fields.
    """

    def __init__(self, *names: str):
        self.names = names

    def read(self, reader: ConfigReader, options: Options) -> Options:
        for path in self.names:
            part, name = part_and_name(reader, path)
            part.get(name)
        return {}


class Written:
    """Fields that are written beside the others.

    Args:
        **fields: Their values, or functions of the model that give them.
    """

    def __init__(self, **fields: Any):
        self.fields = fields

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {}

    def write(self, model: Any) -> Options:
        return {name: x(model) if callable(x) else x for name, x in self.fields.items()}


def four_widths(options: Options) -> int:
    """Four times the width of the model, the usual width of a network without a gate."""
    return int(4 * options["model_dim"])


def root_of_width(options: Options) -> float:
    """The root of the width of the model, a usual multiplier of embeddings."""
    return math.sqrt(max(0, options["model_dim"]))


def part_and_name(reader: ConfigReader, path: str) -> tuple[ConfigReader, str]:
    """Return the reader of the object that has a field, and the name of the field in it."""
    *parts, name = path.split(".")
    for part in parts:
        reader = reader.part(part)
    return reader, name


def read_options(
    reader: ConfigReader, fields: Iterable[ConfigField], context: Options = EMPTY
) -> dict[str, Any]:
    """Read the options of the fields, by path; they may also depend on the options in `context`."""
    options = dict[str, Any]()
    for row in fields:
        options |= row.read(reader, {**context, **options})
    return options


def write_options(model: Any, fields: Iterable[ConfigField]) -> dict[str, Any] | None:
    """Return the fields of a configuration, or of a part of one; None if a field cannot say it."""
    entries = dict[str, Any]()
    for row in fields:
        written = row.write(model)
        if written is None:
            return None
        entries |= written
    return entries


def with_options(parent: T, options: Options) -> T:
    """Replace options of a dataclass, by path; a cycle over layers gets one entry."""
    changes, inner, functions = dict[str, Any](), dict[str, dict[str, Any]](), dict[str, Any]()
    for path, value in options.items():
        name, _, rest = path.partition(".")
        if not hasattr(parent, name):
            raise TypeError(f"{type(parent).__name__} has no option {name!r}.")
        if rest:
            inner.setdefault(name, {})[rest] = value
        elif isinstance(value, Change):
            functions[name] = value.function
        else:
            changes[name] = value
    for name, parts in inner.items():
        child = changes.get(name, getattr(parent, name))
        if child is None:
            continue
        is_cycle = isinstance(child, tuple)
        changed = with_options(child[0] if is_cycle else child, parts)
        changes[name] = (changed,) if is_cycle else changed
    parent = replace(parent, **changes)  # type: ignore[type-var]
    changed = {name: change(getattr(parent, name)) for name, change in functions.items()}
    return replace(parent, **changed) if changed else parent  # type: ignore[type-var]


def nested(entries: Options) -> dict[str, Any]:
    """The objects of entries by path: {"a.b": 1} is {"a": {"b": 1}}."""
    values = dict[str, Any]()
    for path, value in entries.items():
        *parts, name = path.split(".")
        section = values
        for part in parts:
            section = section.setdefault(part, {})
        section[name] = value
    return values
