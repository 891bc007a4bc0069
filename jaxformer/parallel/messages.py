"""The terms of `traffic`: who says what how often, for one part of a batch and for an update."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from jaxformer import config as c
from jaxformer import functional as F
from jaxformer.costs.attention import attention_widths
from jaxformer.layers.block import adds_up_once
from jaxformer.parallel.mesh import AXES, token_axes
from jaxformer.parallel.placement import Leaf, leaves

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "permute", "all_to_all"]
WIDE = 4  # bytes of what is summed, in float32, and of ids
RELATIVE = c.Alibi | c.T5Bias | c.TransformerXL
HEAD_NORMS = ("query_norm", "key_norm", "query_latent_norm", "latent_norm")
TENSOR, CONTEXT, EXPERT, FSDP = ("tensor",), ("context",), ("expert",), ("fsdp",)


class Message(NamedTuple):
    """So many collectives of a kind, and the bytes of all together."""

    kind: Kind
    axes: tuple[str, ...]
    what: str
    times: int
    bytes: int


class Part(NamedTuple):
    """What a device works on at a time.

    `rows` of `tokens` and of `source` tokens, all numbers those of one device; `length` and
    `source_length` are those of whole sequences.
    """

    n: Mapping[str, int]  # devices along each axis
    rows: int
    tokens: int
    source: int
    length: int
    source_length: int
    narrow: int  # bytes of a number in the computation
    remat: str
    expert_room: float | None
    optimizer: str


def of_update(config: c.TransformerConfig, part: Part) -> Iterator[Message]:
    """Once an update: what XLA takes out of the loop over parts, and what follows the last part."""
    n, over = part.n, token_axes(part.n)
    norms: set[tuple[str, ...]] = set()
    for leaf in leaves(config):
        spread = [axis for axis in leaf.spec(n) if axis is not None]
        if "model" in leaf.names and not leaf.layers:
            uses = _uses(config, leaf)
            size = uses * _whole(leaf, n) * part.narrow
            yield Message("all_gather", FSDP, "embedding and head", uses, size)
        copies = tuple(axis for axis in over if axis not in spread)
        size = math.prod(leaf.shape) // math.prod(n[axis] for axis in spread)
        yield Message("all_reduce", copies, "gradients of copies", 1, size * WIDE)
        if part.optimizer == "muon" and leaf.updated_as_matrix:
            yield from _matrices(leaf, n, size)
        norms.add(tuple(axis for axis in AXES if axis in spread and n[axis] > 1))
    for axes in norms:
        yield Message("all_reduce", axes, "norm of the gradient", 1, WIDE)
    yield Message("all_reduce", over, "number of tokens", 1, WIDE)


def _matrices(leaf: Leaf, n: Mapping[str, int], share: int) -> Iterator[Message]:
    """Shares of matrices exchanged for whole ones, and back; see `training.matrices.in_whole`."""
    stacked = zip(leaf.names, leaf.spec(n), leaf.shape, strict=True)
    counts = [size // n.get(axis or "", 1) for name, axis, size in stacked if name == "experts"]
    count = math.prod(counts) * (leaf.shape[0] if "layers" in leaf.path else 1)
    axes = [axis for axis in leaf.spec(n) if axis in ("fsdp", "tensor")]
    devices = math.prod(n[axis] for axis in axes)
    size = share // count * (count + -count % devices)
    for axis in axes:
        yield Message("all_to_all", (axis,), "matrices for Muon", 2, 2 * size * WIDE)


def of_part(config: c.TransformerConfig, part: Part) -> Iterator[Message]:
    """Each forward and backward pass."""
    yield from _kernels(config, part)
    yield from _ends(config, part)
    yield from _stack(config, part, config.num_layers, part.tokens, decodes=True)
    if isinstance(config.topology, c.EncoderDecoder):
        layers = config.topology.num_encoder_layers
        yield from _stack(config.encoder, part, layers, part.source, decodes=False)


def _kernels(config: c.TransformerConfig, part: Part) -> Iterator[Message]:
    """Kernels of layers put together at use, and gradients shared out or added up."""
    for leaf in leaves(config):
        layers, size = leaf.layers, _whole(leaf, part.n)
        if "model" in leaf.names and layers:
            width = WIDE if {"router", "relative"} & set(leaf.path) else part.narrow
            # What comes of Transformer-XL's distances is kept, and they have no gradient.
            passes = 1 if "relative" in leaf.path and part.remat != "full" else 2
            gathered = passes * size * width
            yield Message("all_gather", FSDP, "kernels of layers", passes * layers, gathered)
        if "model" in leaf.names:
            uses = _uses(config, leaf)
            what = f"gradients of {'kernels of layers' if layers else 'embedding and head'}"
            yield Message("reduce_scatter", FSDP, what, uses * (layers or 1), uses * size * WIDE)
        if layers and "tensor" not in leaf.spec(part.n) and _read_in_parts(config, leaf):
            share = size // (part.n["fsdp"] if "model" in leaf.names else 1)
            what = "gradients of what heads share"
            yield Message("all_reduce", TENSOR, what, layers, share * WIDE)


def _whole(leaf: Leaf, n: Mapping[str, int]) -> int:
    """Numbers of a parameter with which a device computes."""
    parts = math.prod(n[axis] for axis in leaf.spec(n) if axis not in (None, "fsdp"))
    return math.prod(leaf.shape) // parts


def _uses(config: c.TransformerConfig, leaf: Leaf) -> int:
    """How often a parameter is gathered: what serves source and target, for each."""
    topology = config.topology
    shared = isinstance(topology, c.EncoderDecoder) and topology.source_vocab_size is None
    return 2 if shared and leaf.path[0] == "embedding" and leaf.path[1] != "tokens" else 1


def _read_in_parts(config: c.TransformerConfig, leaf: Leaf) -> bool:
    """Whether each device reads its copy of a layer's parameter for another part of the work."""
    stack = config.encoder if leaf.path[0] == "encoder" else config
    choice = stack.layer(int(leaf.path[2].removeprefix("layer_"))).feed_forward
    once = adds_up_once(stack) and stack.block == "parallel" and not isinstance(choice, c.Experts)
    before = once and leaf.path[-2].startswith("pre_")
    return before or leaf.path[-2] in HEAD_NORMS or "kv_heads" in leaf.names


def _ends(config: c.TransformerConfig, part: Part) -> Iterator[Message]:
    """Before the first layer and after the last."""
    width, tokens, source = config.embedding.dim or config.model_dim, part.tokens, part.source
    rows, read = 1 + bool(source), (tokens + source) * width
    yield Message("all_reduce", TENSOR, "rows of the embedding", rows, read * part.narrow)
    size = tokens * width * WIDE
    yield Message("all_reduce", TENSOR, "gradient of the head's input", 1, size)
    yield Message("all_reduce", TENSOR, "loss of each token", 3, 3 * tokens * WIDE)
    yield Message("all_reduce", token_axes(part.n), "loss", 1, WIDE)
    what = "positions and segments"
    if isinstance(config.topology, c.EncoderDecoder):
        each = 1 + _places_matter(config.encoder)
        places = part.length + each * part.rows * part.source_length
        yield Message("all_gather", CONTEXT, what, 1 + each, places * WIDE)
        what, size = "gradient of the encoder's output", source * config.model_dim * WIDE
        yield Message("all_reduce", TENSOR, what, 1, size)
    else:
        each = 1 + (isinstance(config.topology, c.Decoder) or _places_matter(config))
        places = each * part.rows * part.length
        yield Message("all_gather", CONTEXT, what, each, places * WIDE)


def _places_matter(config: c.TransformerConfig) -> bool:
    """Whether attention that is not causal asks where the keys are."""
    for positions, window, _ in map(config.layer, range(config.period)):
        rope = positions.scaling if isinstance(positions, c.Rope) else None
        by_length = isinstance(rope, c.DynamicNTK | c.LongRope)
        if window is not None or by_length or isinstance(positions, RELATIVE):
            return True
    return False


def _stack(
    config: c.TransformerConfig, part: Part, num_layers: int, tokens: int, *, decodes: bool
) -> Iterator[Message]:
    """The layers of one stack, on `tokens` of a device."""
    cross = decodes and isinstance(config.topology, c.EncoderDecoder)
    once, branches = adds_up_once(config), 3 if cross else 2
    sums = 1 if once else branches
    for i in range(num_layers):
        positions, choice = config.layer(i).positions, config.layer(i).feed_forward
        routed = isinstance(choice, c.Experts)
        count = sums + (1 if once and not routed else branches)
        if part.remat == "full":  # what follows a sum needs it again, but the last one of a layer
            count += sums - 1 if config.placement == "pre" else sums
        size = count * tokens * config.model_dim * WIDE
        yield Message("all_reduce", TENSOR, "sums of layers", count, size)
        if once and ("out" in config.attention.biases or getattr(choice, "bias", False)):
            size = config.model_dim * WIDE  # all that are added to the sum have the same gradient
            yield Message("all_reduce", TENSOR, "gradients of what heads share", 1, size)
        yield from _attention(config, positions, part, tokens, tokens)
        if cross:
            yield from _attention(config, None, part, tokens, part.source)
        if isinstance(choice, c.Experts):
            yield from _experts(config, choice, part, tokens)
    routers = [config.layer(i).feed_forward for i in range(min(num_layers, config.period))]
    if any(isinstance(choice, c.Experts) for choice in routers):
        yield Message("all_reduce", token_axes(part.n), "loss", int(decodes), decodes * WIDE)


def _attention(
    config: c.TransformerConfig,
    positions: c.Positions | None,
    part: Part,
    queries: int,
    keys: int,
) -> Iterator[Message]:
    """Keys and values round the ring, and norms over heads that are on several devices."""
    a, steps = config.attention, part.n["context"] - 1
    if isinstance(a, c.Decay):  # heads know nothing of each other
        return
    around = attention_widths(config, positions, part.n["tensor"]).around
    passes = 2 if part.remat == "none" else 3
    arrays = a.arrays_kept(positions) if isinstance(a, c.SharedKV) else 2
    count = arrays * steps * passes
    size = round(steps * passes * keys * around) * part.narrow
    yield Message("permute", CONTEXT, "keys and values", count, size)
    norm = None if isinstance(a, c.Latent) else a.qk_norm
    if norm is not None and norm.over == "width":
        each = passes * (2 if isinstance(norm.norm, c.LayerNorm) else 1)
        size = each * (queries + keys) * WIDE
        yield Message("all_reduce", TENSOR, "statistics of norms", 2 * each, size)


def _experts(
    config: c.TransformerConfig, choice: c.Experts, part: Part, tokens: int
) -> Iterator[Message]:
    """Tokens to their experts and back, and what routers say of their load."""
    passes = 2 if part.remat == "none" else 3
    devices = part.n["expert"]
    slots = devices * F.room_for(tokens * choice.top_k, devices, part.expert_room)
    size = 2 * passes * slots * config.model_dim * part.narrow
    yield Message("all_to_all", EXPERT, "tokens to experts and back", 2 * passes, size)
    size = (passes - 1) * choice.num_experts * WIDE
    yield Message("all_to_all", EXPERT, "how many tokens", passes - 1, size)
    size = tokens * choice.top_k * WIDE
    yield Message("all_reduce", TENSOR, "gradients of routers", 1, size)
    size = (2 * choice.num_experts + 2) * WIDE
    yield Message("all_reduce", token_axes(part.n), "load of experts", 4, size)
