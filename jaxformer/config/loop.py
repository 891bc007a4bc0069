"""`Loop`: layers that run several times with the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from jaxformer.checks import Checked, Count, Size

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Loop(Checked):
    """Layers that run several times, each time with the same parameters.

        z = layers[:start](x);    s = z
        repeat passes times:      s = layers[start:stop](s)      from the second on of enter(s, z)
        output = layers[stop:](s)

    Keys and values are cached for each layer and pass. Costs count a layer as often as it runs, and
    parameters once.

    Attributes:
        passes: Number of times that the layers run.
        start: First layer of the loop.
        stop: Layer after the last one of the loop; None is the end of the stack.
        enter: Input of each pass but the first: the output of the pass before ("last"), its sum
            with the first input z ("sum"), or the final norm of it ("final_norm").

    References:
        Dehghani et al., Universal Transformers, 2018. arXiv:1807.03819 ("last")
        Yang et al., Looped Transformers are Better at Learning Learning Algorithms, 2023.
        arXiv:2311.12424 ("sum")
        Zhu et al., Scaling Latent Reasoning via Looped Language Models (Ouro), 2025.
        arXiv:2510.25741 ("final_norm")
    """

    passes: Size
    start: Count = 0
    stop: Size | None = None
    enter: Literal["last", "sum", "final_norm"] = "last"

    def invocations(self, layers: Sequence[T]) -> tuple[T, ...]:
        """The layers in the order in which they run."""
        before, inside, after = self.split(layers)
        return (*before, *inside * self.passes, *after)

    def split(self, layers: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        """The layers before the loop, inside it and after it."""
        stop = len(layers) if self.stop is None else self.stop
        return tuple(layers[: self.start]), tuple(layers[self.start : stop]), tuple(layers[stop:])
