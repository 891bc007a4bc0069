"""What devices say to each other in one update, as arithmetic on model and mesh."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxformer import config as c
from jaxformer.parallel.mesh import AXES, ROWS, check_fits
from jaxformer.parallel.messages import Kind, Part, of_part, of_update


class Collective(NamedTuple):
    """Messages of one kind and purpose in one update.

    `bytes` is the payload of all together on one device: of the whole that is gathered, scattered
    or summed, or of what is passed on or exchanged.
    """

    kind: Kind
    axis: str  # or several, joined by +
    devices: int  # that talk with each other
    what: str
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends at least: as a ring does it, or directly."""
        others = (self.devices - 1) / self.devices
        match self.kind:
            case "all_reduce":
                return 2 * others * self.bytes  # sums are scattered, then gathered
            case "permute":
                return self.bytes
            case _:
                return others * self.bytes


def traffic(
    config: c.TransformerConfig,
    sizes: Mapping[str, int],
    *,
    batch_size: int,
    length: int,
    source_length: int = 0,
    accumulation: int = 1,
    remat: str = "none",
    dtype: DTypeLike = "float32",
) -> tuple[Collective, ...]:
    """TODO."""
    lengths = [length, source_length] if source_length else [length]
    check_fits(config, sizes, batch_size=batch_size, lengths=lengths, accumulation=accumulation)
    n = {name: sizes.get(name, 1) for name in AXES}
    rows = batch_size // (math.prod(n[name] for name in ROWS) * accumulation)
    part = Part(
        n=n,
        rows=rows,
        tokens=rows * length // n["context"],
        source=rows * source_length // n["context"],
        length=length,
        source_length=source_length,
        narrow=jnp.dtype(dtype).itemsize,
        remat=remat,
    )
    found: dict[tuple[Kind, tuple[str, ...], str], list[int]] = defaultdict(lambda: [0, 0])
    for times, messages in ((accumulation, of_part(config, part)), (1, of_update(config, part))):
        for kind, axes, what, count, size in messages:
            several = tuple(name for name in axes if n[name] > 1)
            if several and count:
                found[kind, several, what][0] += times * count
                found[kind, several, what][1] += times * size
    return tuple(
        Collective(kind, "+".join(axes), math.prod(n[name] for name in axes), what, *total)
        for (kind, axes, what), total in found.items()
    )
