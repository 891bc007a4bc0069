"""What a compiled program says between devices, read from its text."""

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxformer.parallel.mesh import AXES
from jaxformer.parallel.messages import Kind
from jaxformer.parallel.traffic import Collective

KINDS: Mapping[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "collective-permute": "permute",
    "all-to-all": "all_to_all",
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
OPERATION = re.compile(r" ([a-z][a-z0-9\-]*)\(")
SHAPE = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
NAME = re.compile(r'op_name="([^"]*)"')


def collectives_of(text: str, sizes: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives that a program runs from its start to its end.

    One in the body of a loop counts as often as the loop runs, and XLA may have merged several
    into one.

    Args:
        text: Of the compiled program, from `as_text()`.
        sizes: Devices along each axis of its mesh, outermost first.

    Returns:
        One for each place in the text where there is one, named as XLA names it. Those among
        devices of one alone are left out.

    Raises:
        ValueError: It cannot be said how often a collective runs, or along which axes.
    """
    computations, entry = _computations(text)

    def run(name: str, times: int | None) -> Iterator[Collective]:
        for line in computations[name]:
            operation = OPERATION.search(line)
            if operation is None:
                continue
            kind = operation[1].removesuffix("-start")
            if kind in KINDS:
                if times is None or operation[1] != kind:
                    raise ValueError(f"It is not known how often or what this says: {line.strip()}")
                found = _collective(KINDS[kind], line, operation.start(), times, sizes)
                if found.devices > 1:
                    yield found
            known, within = TRIPS.search(line), times
            if kind == "while":
                within = None if times is None or known is None else times * int(known[1])
            elif kind == "conditional":
                within = None
            for called in _called(line):
                yield from run(called, within)

    return tuple(run(entry, 1))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, and which is the program."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := COMPUTATION.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := INSTRUCTION.match(line)):
            computations[name].append(" " + instruction[1])
    return computations, entry


def _called(line: str) -> list[str]:
    names = CALLED.findall(line)
    if branches := BRANCHES.search(line):
        names += [name.strip().lstrip("%") for name in branches[1].split(",")]
    return names


def _collective(
    kind: Kind, line: str, result: int, times: int, sizes: Mapping[str, int]
) -> Collective:
    axis, devices = _axis(line, sizes)
    size = sum(
        BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in SHAPE.findall(line[:result])
    )
    if kind == "reduce_scatter":
        size *= devices
    name = NAME.search(line)
    return Collective(kind, axis, devices, name[1] if name else "", times, times * size)


def _axis(line: str, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Along which axes of the mesh devices talk, joined by "+", and how many do together."""
    groups = _groups(line, math.prod(sizes.values()))
    places = np.stack(np.unravel_index(np.asarray(groups[0]), tuple(sizes.values())), axis=-1)
    axes = [name for name, column in zip(sizes, places.T, strict=True) if len(set(column)) > 1]
    count = math.prod(sizes[name] for name in axes)
    if count != len(groups[0]):
        raise ValueError(f"Devices {groups[0]} are no whole axes of the mesh {dict(sizes)}.")
    return "+".join(sorted(axes, key=AXES.index)), count


def _groups(line: str, devices: int) -> list[list[int]]:
    """Which devices talk with each other; XLA writes them in one of several ways."""
    if found := re.search(r"source_target_pairs=\{([\d,{}]*)\}", line):
        return _rings(_lists(found[1]))
    if found := re.search(r"replica_groups=\{([\d,{}]*)\}", line):
        return _lists(found[1]) or [list(range(devices))]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _iota(found[2], found[3]).reshape(_numbers(found[1])).tolist()
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r" \{([^}]*)\}",
        line,
    )
    if mesh is None or ":" in mesh[4]:
        raise ValueError(f"It is not known which devices this is among: {line.strip()}")
    axes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
    order = _iota(mesh[2], mesh[3]) if mesh[2] else np.arange(devices)
    grid = order.reshape(tuple(axes.values()))
    among = [list(axes).index(name) for name in re.findall(r"'([^']*)'", mesh[4])]
    last = np.moveaxis(grid, among, range(-len(among), 0))
    return last.reshape(-1, math.prod(last.shape[-len(among) :])).tolist()


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    grid = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return grid.transpose(_numbers(permutation)) if permutation else grid


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _lists(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _rings(pairs: list[list[int]]) -> list[list[int]]:
    """Devices among which pairs of source and target go round."""
    following = {source: target for source, target in pairs}
    rings: list[list[int]] = []
    for start in following:
        if any(start in ring for ring in rings):
            continue
        ring = [start]
        while following.get(ring[-1], start) != start:
            ring.append(following[ring[-1]])
        rings.append(ring)
    return rings
