"""Draw the floors of the package, each with what it holds: the picture in README.

python -m experiments.architecture [FILE]      # experiments/guides/architecture.png
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

FILE = Path(__file__).parent / "guides" / "architecture.png"
WIDTH, HEIGHT, GAP = 12.0, 1.0, 0.14


class Room(NamedTuple):
    """A package on a floor.

    Attributes:
        name: Of the package.
        holds: What is in it, a few words.
    """

    name: str
    holds: str


# From the ground up; tests/test_architecture.py holds imports to this order.
FLOORS: tuple[tuple[str, str, tuple[Room, ...]], ...] = (
    (
        "formulas",
        "#dbe9f6",
        (Room("functional", "pure functions of arrays: attention, RoPE, norms"),),
    ),
    (
        "choices",
        "#e3f1dc",
        (
            Room("config", "options, frozen"),
            Room("zoo", "published models"),
            Room("costs", "parameters, FLOPs"),
        ),
    ),
    ("modules", "#fdf1cf", (Room("layers", "Flax linen modules: parameters around one call"),)),
    (
        "use",
        "#fbe3d6",
        (Room("generation", "decoding, beams, caches"), Room("parallel", "meshes, hosts, plans")),
    ),
    (
        "text, weights",
        "#f6dbe4",
        (Room("data", "text to batches"), Room("interop", "Hugging Face folders")),
    ),
    (
        "runs",
        "#e6def3",
        (Room("training", "step, checkpoints, resume"), Room("inspect", "maps, lens, statistics")),
    ),
    (
        "ways in",
        "#e8e8e8",
        (
            Room("experiments", "train, export, studies"),
            Room("your JAX code", "calls functions"),
            Room("notebooks", "look inside"),
        ),
    ),
)


def main() -> None:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help=f"default: {FILE}")
    draw(parser.parse_args().file)


def draw(file: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(figsize=(9, 5.2), layout="constrained")
    for level, (name, colour, rooms) in enumerate(FLOORS):
        draw_floor(axes, level * (HEIGHT + GAP), name, colour, rooms)
    top = len(FLOORS) * (HEIGHT + GAP)
    axes.annotate(
        "", xy=(WIDTH + 0.5, 0.0), xytext=(WIDTH + 0.5, top - GAP), arrowprops={"arrowstyle": "-|>"}
    )
    axes.text(WIDTH + 0.75, top / 2, "imports point down", rotation=270, va="center", fontsize=10)
    axes.set(xlim=(-2.1, WIDTH + 1.3), ylim=(-0.1, top))
    axes.axis("off")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_floor(axes: Axes, bottom: float, name: str, colour: str, rooms: tuple[Room, ...]) -> None:
    """Draw the rooms of one floor side by side."""
    axes.text(-0.3, bottom + HEIGHT / 2, name, ha="right", va="center", fontsize=11, style="italic")
    free = WIDTH - GAP * (len(rooms) - 1)
    width, left = free / len(rooms), 0.0
    for room in rooms:
        box = FancyBboxPatch(
            (left, bottom),
            width,
            HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour,
            edgecolor="#555555",
            linewidth=1,
        )
        axes.add_patch(box)
        middle = left + width / 2
        axes.text(middle, bottom + 0.64, room.name, ha="center", va="center", weight="bold")
        axes.text(middle, bottom + 0.28, room.holds, ha="center", va="center", fontsize=9)
        left += width + GAP


if __name__ == "__main__":
    main()
