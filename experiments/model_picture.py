"""Draw the architecture, and what can be chosen of each of its parts, as README shows it.

python -m experiments.architecture
"""

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE = Path(__file__).parent / "guides" / "model.png"
STREAM, LEFT, WIDTH, CHOICES = 0.75, 1.35, 2.1, 5.3  # x of the stream, of boxes, of their choices
INK = "0.2"


class Part(NamedTuple):
    """A box of the picture.

    Attributes:
        name: In the box.
        y: Its middle.
        colour: Of the box.
        choices: What stands beside it.
    """

    name: str
    y: float
    colour: str
    choices: str


NORM, ATTENTION, FEED_FORWARD, ENDS = "#fdf0d0", "#d6e6f5", "#d9efd9", "#eeeeee"
PARTS = (
    Part("head", 9.4, ENDS, "tied or not, bias, multiplier, soft cap; loss in chunks"),
    Part("final norm", 8.5, NORM, "with or without"),
    Part(
        "feed-forward",
        6.95,
        FEED_FORWARD,
        "plain, gated, any activation;\nmixture of experts, per layer",
    ),
    Part(
        "norm",
        5.95,
        NORM,
        "LayerNorm, RMSNorm; scale, bias, none\nbefore, after, around or at the end of a branch",
    ),
    Part(
        "attention",
        4.3,
        ATTENTION,
        "multi-head, grouped, multi-query, shared K = V,\n"
        "latent (MLA), decay (a linear recurrence);\n"
        "windows, QK-norm, soft cap, per layer\n"
        "positions: RoPE on any of q, k, v, o, ALiBi, T5,\nTransformer-XL, learned, sinusoid, none",
    ),
    Part("norm", 3.0, NORM, "block: serial, or both branches in parallel"),
    Part("embedding", 1.3, ENDS, "scaled or not; positions added, or none"),
)
BRANCHES = ((2.45, 5.1), (5.4, 7.6))  # where a branch leaves the stream, and where it is added


def main(path: Path = PICTURE) -> None:
    """Draw it."""
    figure = Figure(figsize=(9, 7.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 9.6), ylim=(0.1, 10.7))
    axes.set_axis_off()
    axes.add_patch(box(0.25, 2.1, 8.95, 5.8, facecolor="none", linestyle="--"))
    axes.text(9.1, 7.62, "layer, N times", ha="right", va="center", style="italic", color=INK)
    arrow(axes, (STREAM, 0.75), (STREAM, 10.05))
    axes.text(STREAM, 0.5, "tokens", ha="center", va="center")
    axes.text(STREAM, 10.3, "logits", ha="center", va="center")
    for begin, end in BRANCHES:
        x = LEFT + WIDTH / 2
        axes.plot([STREAM, x], [begin, begin], color=INK)
        axes.plot([x, x], [begin, end], color=INK, zorder=0)
        arrow(axes, (x, end), (STREAM + 0.16, end))
        axes.plot(STREAM, end, "o", color="white", markeredgecolor=INK, markersize=15, zorder=4)
        axes.text(STREAM, end, "+", ha="center", va="center", zorder=5, fontsize=13)
    for part in PARTS:
        outside = part.colour == ENDS or part.name == "final norm"
        left, width = (STREAM - 0.6, WIDTH + 1.2) if outside else (LEFT, WIDTH)
        axes.add_patch(box(left, part.y - 0.3, width, 0.6, facecolor=part.colour))
        axes.text(left + width / 2, part.y, part.name, ha="center", va="center", zorder=5)
        axes.text(CHOICES - 1.4, part.y, part.choices, va="center", fontsize=9.5, color="0.25")
    figure.savefig(path, dpi=100)


def box(x: float, y: float, width: float, height: float, **style: Any) -> FancyBboxPatch:
    """A rectangle with round corners."""
    shape = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch((x, y), width, height, boxstyle=shape, edgecolor=INK, zorder=3, **style)


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """From one point to another."""
    axes.add_patch(
        FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=14, color=INK, shrinkB=0)
    )


if __name__ == "__main__":
    main()
