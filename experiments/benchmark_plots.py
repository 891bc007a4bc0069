"""A benchmark as a picture: a panel for each contest."""

import importlib
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark_tables import US, Found, ratios
from experiments.contests import ABOUT, Task
from experiments.training.plot import can_draw

COLOURS = {
    "jaxformer, as it is by default": "tab:blue",
    "jaxformer with another option": "lightskyblue",
    "others": "silver",
}
COLUMNS = 2


def plot_contests(path: Path, contests: Mapping[Task, Sequence[Mapping[str, Any]]]) -> None:
    """Speeds as multiples of the first contestant's, with the whole range of rounds.

    Each contest has a panel with its title, and all share a key of colours. Without matplotlib
    nothing is drawn but a line that says what is missing.

    Args:
        path: Of the picture.
        contests: What was found of each contestant, by contest.
    """
    finished = {
        task: [Found(**one) for one in found if one["seconds"]]
        for task, found in contests.items()
        if task != "machine"
    }
    shown = {task: found for task, found in finished.items() if found}
    if not shown or not can_draw():
        return
    figures = importlib.import_module("matplotlib.figure")
    patches = importlib.import_module("matplotlib.patches")
    rows = -(-len(shown) // COLUMNS)
    figure = figures.Figure(figsize=(12, 0.7 + 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, (task, found) in zip(panels, shown.items(), strict=False):
        draw_contest(panel, task, found)
    for panel in list(panels)[len(shown) :]:
        panel.set_axis_off()
    key = [patches.Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), frameon=False)
    figure.savefig(path, dpi=80)


def draw_contest(panel: Any, task: Task, found: Sequence[Found]) -> None:
    """One contest: a bar for each contestant, and its value."""
    for row, one in enumerate(found):
        shares = sorted(ratios(one, found[0]))
        middle = statistics.median(shares)
        panel.barh(row, middle, color=colour_of(task, one.name))
        panel.plot([shares[0], shares[-1]], [row, row], color="k", linewidth=1.2)
        panel.annotate(
            f"{middle:.2f}",
            (max(shares[-1], middle), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    panel.set_yticks(range(len(found)), [one.name for one in found])
    panel.set_ylim(max(len(found), 3) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.set_xlim(left=0)
    panel.axvline(1.0, color="k", linewidth=0.6, linestyle=":")
    title = textwrap.wrap(f"{task}: {ABOUT[task].rstrip('.')}", 50)
    panel.set_title("\n".join(title), fontsize=10, loc="left")
    panel.set_xlabel(f"times as fast as {found[0].name}", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def colour_of(task: Task, name: str) -> str:
    """Contests that are all ours, of lengths or of options, have no others."""
    alone = task in ("long", "vocabulary", "rotary", "remat", "compile")
    default, option, others = COLOURS.values()
    if name == US or (alone and name == "remat dots"):
        return default
    return option if alone or name.startswith(US) else others
