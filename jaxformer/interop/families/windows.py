"""Fields of config.json with a word for each layer, and fields of sliding windows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Options
from jaxformer.interop.config_reader import ConfigReader

Rule = Callable[[ConfigReader, int | None], Callable[[int], bool]]


@dataclass(frozen=True)
class PerLayer:
    """A field with a word for each layer.

    Attributes:
        name: The field.
        words: What each word means; the first word of a meaning is written.
    """

    name: str
    words: Mapping[str, Any]

    def read(
        self, reader: ConfigReader, num_layers: int, default: Callable[[int], Any]
    ) -> tuple[Any, ...]:
        """What the field says of each layer; `default` says it where the file lacks the field."""
        words = reader.sequence(self.name, str)
        if words is None:
            return tuple(map(default, range(num_layers)))
        if len(words) != num_layers or not set(words) <= set(self.words):
            known = " or ".join(self.words)
            reader.add_problem(self.name, f"expected {known} for each of {num_layers} layers.")
            return (False,) * num_layers
        return tuple(self.words[word] for word in words)

    def write(self, layers: Iterable[Any]) -> dict[str, Any]:
        """The field for what each layer is."""
        words = {meaning: word for word, meaning in reversed([*self.words.items()])}
        return {self.name: [words[layer] for layer in layers]}


WINDOW_TYPES = PerLayer("layer_types", {"sliding_attention": True, "full_attention": False})


@dataclass(frozen=True)
class Windows:
    """``sliding_window``, and the layers that have it, by ``layer_types`` or by a rule.

    Attributes:
        default: Its value if the file lacks it.
        switch: A field without which there is none; None has no such field.
        rule: Function from the file and the window to whether a layer has the window, where
            ``layer_types`` is absent; None is a window in every layer, and no such field.
        may_lack_size: Whether layers with a window but without a size see everything.
        needs_size: Whether transformers needs the size even where no layer has a window.
    """

    default: int | None
    switch: str | None = None
    rule: Rule | None = None
    may_lack_size: bool = False
    needs_size: bool = False

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The windows of the layers, as a cycle."""
        return {"attention.windows": self.read_windows(reader, options["num_layers"])}

    def write(self, model: c.TransformerConfig) -> Options:
        """The window, the switch and the types."""
        windows = [layer.window for layer in model.layers]
        size = next((window for window in windows if isinstance(window, int)), None)
        types = {} if self.rule is None else WINDOW_TYPES.write(x is not None for x in windows)
        switch = {} if self.switch is None else {self.switch: size is not None}
        written = self.default if size is None and self.needs_size else size
        return {"sliding_window": written, **switch, **types}

    def read_windows(self, reader: ConfigReader, num_layers: int) -> tuple[Any, ...]:
        """The windows of the layers, as a cycle."""
        window = self.read_size(reader)
        if self.rule is None:
            reader.get("max_window_layers")  # in released files, and without effect
            return (window,)
        sliding = WINDOW_TYPES.read(reader, num_layers, self.rule(reader, window))
        if window is None and self.may_lack_size:
            return (None,)
        if window is None and any(sliding):
            reader.add_problem("sliding_window", "layers with a window need this size.")
        return tuple(window if slides else None for slides in sliding)

    def read_size(self, reader: ConfigReader) -> int | None:
        """The window of the layers that have one."""
        if self.needs_size:
            return reader.integer("sliding_window", self.default)
        window = reader.optional_integer("sliding_window", self.default)
        return window if self.switch is None or reader.boolean(self.switch, False) else None


def by_pattern(period: int | None = None) -> Rule:
    """All layers but every n-th, by ``sliding_window_pattern`` if it is a number.

    Args:
        period: Its default; None is a window in every layer.
    """

    def rule(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
        every = period
        reader.get("max_window_layers")  # in released files, and without effect
        if isinstance(reader.get("sliding_window_pattern"), int):
            # Without a window transformers writes 0.
            read = reader.integer if window is None else reader.positive_integer
            every = read("sliding_window_pattern")
        return lambda i: window is not None and (every is None or (i + 1) % every != 0)

    return rule


def all_but_every(period: int, *names: str) -> Rule:
    """All layers but every n-th, by the last of these fields that the file has."""

    def rule(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
        every = period
        for name in names:
            every = reader.positive_integer(name, every)
            reader.get(f"_{name}")
        return lambda i: (i + 1) % every > 0

    return rule


def all_but_first_of(period: int, name: str) -> Rule:
    """All layers but the first of each period, which the field `name` may say."""

    def rule(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
        every = reader.positive_integer(name, period)
        return lambda i: i % every > 0

    return rule


def from_layer(first: int) -> Rule:
    """The layers from ``max_window_layers`` on, which is `first` if the file lacks it."""

    def rule(reader: ConfigReader, window: int | None) -> Callable[[int], bool]:
        start = reader.integer("max_window_layers", first)
        return lambda i: window is not None and i >= start

    return rule


@dataclass(frozen=True)
class LastLayerWindows(Windows):
    """Windows from a layer on (Qwen)."""

    default: int | None = 4096
    switch: str | None = "use_sliding_window"
    rule: Rule | None = from_layer(28)

    def write(self, model: c.TransformerConfig) -> Options:
        """The window, the switch, the types, and the first layer that has the window."""
        entries = super().write(model)
        kinds = [*entries["layer_types"], "sliding_attention"]
        return {**entries, "max_window_layers": kinds.index("sliding_attention")}
