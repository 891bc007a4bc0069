"""`Segments`: the parts of a stack of layers; one part repeats."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jaxformer.config.attention.multi_head import MultiHead
from jaxformer.config.layer import Layer


class Segments(NamedTuple):
    """A stack as layers before a pattern, repetitions of the pattern, and layers after them.

    Attributes:
        first: Layers before the pattern.
        period: Layers of the pattern; 0 if there is none.
        repeats: Repetitions of the pattern.
        tail: Layers after the last repetition; without a loop, the first ones of the pattern.
    """

    first: int
    period: int
    repeats: int
    tail: int

    @property
    def stop(self) -> int:
        """Layer after the last repetition."""
        return self.first + self.period * self.repeats

    @property
    def num_compiled(self) -> int:
        """Layers that are compiled: one repetition of the pattern, and all layers outside it."""
        return self.first + self.period + self.tail

    def shares(self, reader: int, source: int) -> bool:
        """Whether a layer can read what an earlier layer hands on."""
        if source < self.first:
            return True
        return (source - self.first) // self.period == (reader - self.first) // self.period

    def groups(self) -> dict[str, range]:
        """Indices of the layers of each group; of the pattern, only the first repetition."""
        return {
            "first_layers": range(self.first),
            "layers": range(self.first, self.first + self.period),
            "tail": range(self.stop, self.stop + self.tail),
        }

    def locate(self, layer: int) -> tuple[str, tuple[int, ...]]:
        """Return the path of a layer in its stack, and its repetition if there are several."""
        if layer < self.first:
            return f"first_layers/layer_{layer}", ()
        if layer >= self.stop:
            return f"tail/layer_{layer - self.stop}", ()
        repeat, index = divmod(layer - self.first, self.period)
        return f"layers/layer_{index}", (repeat,)


@lru_cache(maxsize=1024)
def find_segments(layers: tuple[Layer, ...]) -> Segments:
    """Find the pattern that repeats, such that as few layers as possible are compiled.

    Layers before the pattern need two repetitions of it. A layer that reads keys and values of an
    earlier one (`MultiHead.cross_layer_kv`) finds them before the pattern or in its own repetition,
    and so do layers with a `value_residual` those of layer 0.
    If nothing repeats, all layers are one repetition, or all from the first such reader on.
    """
    numbers = dict[Layer, int]()
    ids = [numbers.setdefault(layer, len(numbers)) for layer in layers]
    sources = {i: 0 for i, layer in enumerate(layers) if layer.attention.value_residual}
    pairs = [*kv_sources(layers).items(), *sources.items()]
    reader = min((reader for reader, _ in pairs), default=0)
    best = Segments(reader, len(layers) - reader, 1, 0)
    for first in range(len(layers)):
        for period in range(1, best.num_compiled - first):
            segments = Segments(first, period, *divmod(len(layers) - first, period))
            if (
                (not first or segments.repeats > 1)
                and (segments.num_compiled, first) <= (best.num_compiled, best.first)
                and all(x == y for x, y in zip(ids[first:], ids[first + period :], strict=False))
                and all(segments.shares(*pair) for pair in pairs)
            ):
                best = segments
    return best


def kv_sources(layers: Sequence[Layer]) -> dict[int, int]:
    """Return the index of the layer whose keys and values each layer with `cross_layer_kv` reads.

    This is the last layer before it that has the same window and keys of its own; -1 if there is
    none.
    """
    sources, last = dict[int, int](), dict[Any, int]()
    for i, layer in enumerate(layers):
        if layer.attention.cross_layer_kv:
            sources[i] = last.get(layer.window, -1)
        elif isinstance(layer.attention, MultiHead):
            last[layer.window] = i
    return sources
