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
    times: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends at least: as a ring does it, or directly."""
        others = (self.devices - 1) / self.devices
        match self.kind:
            case "all_reduce":
                return 2 * others * self.bytes  # sums are scattered, then gathered
            case "permute":
                return float(self.bytes)
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
    expert_room: float | None = None,
    optimizer: str = "adamw",
) -> tuple[Collective, ...]:
    """The collectives of one update, and their bytes, without a device.

    With A parts, each of t tokens on a device (s of a source), T a row; width D and L layers;
    w bytes a number in the computation (kernels of routers and of Transformer-XL's distances: 4);
    P numbers of a kernel that a device computes with, its share along `tensor` and `expert`; K
    heads of keys and values of width H on a device; E experts, of which a token goes to k, with
    room for r of the t * k rows from each device; G numbers of a gradient that a device keeps:

        fsdp     gather    A * 2 * P * w      kernels of layers, again in the backward pass
                           P * w              embedding and head, once for all parts
                 scatter   A * P * 4          gradients of both
        tensor   sum       A * L * 2 b * t * D * 4    b branches, forwards and backwards
                           A * (t + s) * D * w        rows of the embedding
                           A * t * D * 4              gradient of the head's input
                           A * s * D * 4              gradient of the encoder's output
                           A * 3 * t * 4              loss: largest, normaliser, target
                           A * L * t * k * 4          gradient of what a router says
                           A * G * 4                  of what all heads share
                           A * L * 2 * (t + t) * 4    norms over all heads: root mean squares
        context  permute   A * L * 2 * (context - 1) * 2 * t * K * H * w    keys and values
                 gather    A * 2 * t * context * 4    positions and segments; of two stacks
                                                      A * (T + 2 * s * context) * 4, or 1 for 2
                                                      where no encoder asks for positions
        expert   exchange  A * L * 2 * 2 * expert * r * D * w        there and back, both ways
                           A * L * E * 4                             how many tokens come
        rows and context
                 sum       G * 4    gradients of what devices have copies of, once for all parts
                           A * L * (2 E + 2) * 4    load of experts
                           4 + A * 4                number of tokens, loss (twice with experts)
        each     sum       4    norm of the gradient: its squares, for those shared out alike
        fsdp, tensor
                 exchange  2 * G * 4    matrices for Muon: of m layers on d devices so that each has
                                        m / d whole, and back; G for m rounded up to d's multiple

    Parallel branches are added up once (b = 1) unless each is normalised after. Cross-attention is
    a branch of its own, whose keys are those of s tokens. `remat` repeats messages: "dots" and
    "full" those of keys, values, experts and norms over heads, half as many again; "full" also the
    sums of branches, but that of the last where nothing normalises it.

    Counts are those of arrays; XLA merges sums that are ready together into one. On a CPU it also
    finds that a layer outside the loop (one that is left over after whole patterns, or a pattern
    that is not repeated) gathers its kernels twice, and keeps them. Means that Adafactor takes over
    rows and columns of shares are not counted.

    Args:
        config: The model.
        sizes: Devices along each axis.
        batch_size: Rows of a batch, over all devices and parts.
        length: Tokens of a row (of its target, for an encoder-decoder).
        source_length: Tokens of its source.
        accumulation: In how many parts a device works through its rows.
        remat: As in `layers.Mode`.
        dtype: Of the computation.
        expert_room: As `room` of `F.mix_experts`.
        optimizer: As in `memory`.

    Returns:
        One entry for each kind, axis and purpose; none for axes of one device.

    Raises:
        ValueError: The model or the batch cannot be shared out over the mesh.

    References:
        Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
        Parallelism, 2019. arXiv:1909.08053, section 3
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2019. arXiv:1910.02054, section 7
    """
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
        expert_room=expert_room,
        optimizer=optimizer,
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
