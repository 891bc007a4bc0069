"""Fields of config.json of models with a mixer, such as linear attention, in some or all layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    Change,
    Fields,
    Options,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families.windows import PerLayer
from jaxformer.interop.param_mapping import MappingRule


def linear_attention(**options: Any) -> c.LinearAttention:
    """Linear attention with small sizes and these options."""
    sizes = {"num_heads": 1, "num_key_heads": 1, "key_dim": 1, "value_dim": 1}
    return c.LinearAttention(**{**sizes, **options})


@runtime_checkable
class KindFields(Protocol):
    """The fields of an attention kind; a model has one such object."""

    @property
    def kind(self) -> c.AttentionKind:
        """The option of the kind, with any sizes."""
        ...

    def read(self, reader: ConfigReader, options: Options) -> Any:
        """Read the kind; earlier fields of the model have read `options`."""
        ...

    def write(self, model: c.TransformerConfig, kind: Any) -> Options | None:
        """Return the fields of the kind in a model; None if they cannot say it."""
        ...


@dataclass(frozen=True)
class Kind:
    """An attention kind whose fields set one option each.

    Attributes:
        kind: The option, with any sizes.
        fields: Its fields, with options relative to the kind; defaults may depend on the model's
            options, such as "model_dim" and "attention.num_heads".
    """

    kind: Any
    fields: Fields

    def read(self, reader: ConfigReader, options: Options) -> Any:
        return with_options(self.kind, read_options(reader, self.fields, options))

    def write(self, model: c.TransformerConfig, kind: Any) -> Options | None:
        return write_options(kind, self.fields)


@dataclass(frozen=True)
class Everywhere:
    """One attention kind in all layers.

    Attributes:
        kind: Its fields.
    """

    kind: KindFields

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {"attention": self.kind.read(reader, options)}

    def write(self, model: c.TransformerConfig) -> Options | None:
        is_same = isinstance(model.attention, type(self.kind.kind))
        return self.kind.write(model, model.attention) if is_same else None


@runtime_checkable
class LayerTypes(Protocol):
    """The field that says which layers have attention, and not the mixer."""

    def read(
        self, reader: ConfigReader, num_layers: int, default: Callable[[int], bool]
    ) -> Sequence[bool]:
        """Whether each layer has attention; `default` says it where the file lacks the field."""
        ...

    def write(self, layers: Sequence[bool]) -> Options | None:
        """The field; None if it cannot say it."""
        ...


@dataclass(frozen=True)
class BothTypes(PerLayer):
    """A field that has each of two words."""

    def read(
        self, reader: ConfigReader, num_layers: int, default: Callable[[int], bool]
    ) -> tuple[bool, ...]:
        words = reader.sequence(self.name, str)
        if words is None:
            words = tuple(self.write(map(default, range(num_layers)))[self.name])
        if len(words) != num_layers or {*words} != {*self.words}:
            expected = f"expected {' and '.join(self.words)} for {num_layers} layers."
            reader.add_problem(self.name, expected)
            return (True,) * num_layers
        return tuple(self.words[word] for word in words)


@dataclass(frozen=True)
class LayerNumbers:
    """The numbers of the layers with attention.

    Attributes:
        name: The field.
    """

    name: str

    def read(
        self, reader: ConfigReader, num_layers: int, default: Callable[[int], bool]
    ) -> list[bool]:
        full = reader.sequence(self.name, int) or ()
        return [i in full for i in range(num_layers)]

    def write(self, layers: Sequence[bool]) -> Options:
        return {self.name: [i for i, full in enumerate(layers) if full]}


LINEAR_OR_FULL = BothTypes("layer_types", {"linear_attention": False, "full_attention": True})


def every_fourth(reader: ConfigReader, num_layers: int) -> Callable[[int], bool]:
    """Attention in every fourth layer."""
    return lambda i: i % 4 == 3


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A mixer in place of attention in some layers.

    Attributes:
        kind: Fields of the mixer.
        types: Field of the layers that have attention.
        default: Function from the file and the number of layers to whether a layer has attention,
            where this field is absent.
        may_lack_kinds: Whether all layers may be of one kind.
    """

    kind: KindFields
    types: LayerTypes = LINEAR_OR_FULL
    default: Callable[[ConfigReader, int], Callable[[int], bool]] = every_fourth
    may_lack_kinds: bool = False

    def read(self, reader: ConfigReader, options: Options) -> Options:
        mixer, count = self.kind.read(reader, options), options["num_layers"]
        is_full = self.types.read(reader, count, self.default(reader, count))
        return {"attention": Change(lambda x: tuple(x if full else mixer for full in is_full))}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields of the mixer, and which layers have attention.

        Of a mixer that the model lacks, an option that config.json can express is written.
        """
        kind = type(self.kind.kind)
        is_full = [not isinstance(layer.attention, kind) for layer in model.layers]
        if not self.may_lack_kinds and len({*is_full}) < 2:
            return None
        entries = self.kind.write(model, first_mixer(model, kind))
        types = self.types.write(is_full)
        return None if entries is None or types is None else {**entries, **types}


@dataclass(frozen=True, kw_only=True)
class MixerOrWindows:
    """A mixer, attention with a window or attention without one, by a word for each layer.

    It goes before the fields of positions, which may depend on the windows.

    Attributes:
        kind: Fields of the mixer.
        word: Its word in ``layer_types``.
        default: Function from the number of a layer to its word, where the file lacks the field.
        window: Default of ``sliding_window``.
    """

    kind: KindFields
    word: str
    default: Callable[[int], str]
    window: int

    @property
    def types(self) -> PerLayer:
        """The field, with the word of each layer as its meaning."""
        words = (self.word, "sliding_attention", "full_attention")
        return PerLayer("layer_types", {word: word for word in words})

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention kind and the window of each layer."""
        words = self.types.read(reader, options["num_layers"], self.default)
        window = reader.optional_integer("sliding_window", self.window)
        if window is None and "sliding_attention" in words:
            reader.add_problem("sliding_window", "layers with a window need this size.")
        mixer = self.kind.read(reader, options)
        return {
            "attention.windows": tuple(window if x == "sliding_attention" else None for x in words),
            "attention": Change(lambda x: tuple(mixer if y == self.word else x for y in words)),
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields of the mixer, the window, and the word of each layer."""
        kind, window, words = type(self.kind.kind), self.window, list[str]()
        for layer in model.layers:
            if isinstance(layer.attention, kind):
                words.append(self.word)
            elif isinstance(layer.window, int):
                words.append("sliding_attention")
                window = layer.window
            else:
                words.append("full_attention")
        entries = self.kind.write(model, first_mixer(model, kind))
        return entries and {**entries, "sliding_window": window, **self.types.write(words)}


def first_mixer(model: c.TransformerConfig, kind: type) -> Any:
    """The first mixer of the layers, or one that config.json can express."""
    mixers = (layer.attention for layer in model.layers if isinstance(layer.attention, kind))
    width = 2 * model.model_dim
    lacking = c.LinearAttention(num_heads=1, num_key_heads=1, key_dim=1, value_dim=width)
    return next(mixers, lacking)


def of_kind(kind: type, *rules: MappingRule) -> tuple[MappingRule, ...]:
    """The mapping rules, for layers with this attention kind."""
    return tuple(replace(rule, kind=kind) for rule in rules)
