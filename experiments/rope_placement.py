"""Where rotary positions may act: on queries, keys, values, the output, and some of these together.

    python -m experiments.rope_placement --size smoke       # minutes: to see that it runs
    python -m experiments.rope_placement                    # hours of two cores
    python -m experiments.rope_placement --size gpu --seeds 3

Trains the nine settings of a blog post that reports one loss each of a model of 1B, from several
seeds each, and compares the orders. Writes JSON, a table and a plot. A study that is interrupted
goes on where it was when it is started again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command_line import readable_errors
from experiments.seeds import Arm, Training
from experiments.statistics import rank_correlation
from experiments.study import Numbers, Study, Text, base_run, conduct
from experiments.study_command import read
from experiments.study_plots import plot_losses
from experiments.study_sizes import PLACEMENT_SIZES
from experiments.study_tables import Column, difference_from_first, markdown, mean_and_interval
from jaxformer.config import Rope
from jaxformer.config.positions import RopeTarget

SOURCE = "Su, Rotary Position Embedding of the Second Kind, 2025. spaces.ac.cn/archives/10862"


class Setting(NamedTuple):
    """What is turned, and the loss that was published for it."""

    name: str
    targets: tuple[RopeTarget, ...]
    published: float
    group: int  # in the published order; losses within a group are called about equal


SETTINGS = (
    Setting("QK", ("q", "k"), 2.712, 1),
    Setting("QKVO", ("q", "k", "v", "o"), 2.719, 1),
    Setting("K", ("k",), 2.769, 2),
    Setting("VO", ("v", "o"), 2.770, 2),
    Setting("QKV", ("q", "k", "v"), 2.783, 3),
    Setting("none", (), 2.795, 4),
    Setting("O", ("o",), 2.841, 5),
    Setting("Q", ("q",), 2.851, 5),
    Setting("V", ("v",), 2.856, 5),
)


@dataclass(frozen=True, kw_only=True)
class RopePlacement(Study):
    """The nine settings."""


def main(study: RopePlacement) -> Path:
    """Train, compare, write; returns the folder of the results."""
    run = base_run(study, PLACEMENT_SIZES)
    arms = [
        Arm(
            name=setting.name,
            model=run.model.with_positions(
                Rope(targets=setting.targets) if setting.targets else None
            ),
            optimizer=run.optimizer,
        )
        for setting in SETTINGS
    ]
    output, found = conduct(study, "rope_placement", run, arms, nothing_more)
    text = report(found)
    (output / "table.md").write_text(text)
    plot_losses(output / "plot.png", found, title="Where rotary positions act")
    print(f"\n{text}\nEverything is in {output}.")
    return output


def nothing_more(arm: Arm, params: Any, text: Text, training: Training) -> Numbers:
    """Losses are all that is asked."""
    return {}


def report(found: list[Numbers]) -> str:
    """The table and what it says of the published order."""
    first = SETTINGS[0].published
    columns = [
        Column("rotary positions on", lambda numbers: numbers["arm"]["name"]),
        Column("held-out loss", mean_and_interval("held_out")),
        Column("minus QK", difference_from_first("held_out", found)),
        Column("published", lambda numbers: f"{published(numbers):.3f}"),
        Column("its minus QK", lambda numbers: f"{published(numbers) - first:+.3f}"),
    ]
    ordered = sorted(found, key=mean_loss)
    names = " < ".join(numbers["arm"]["name"] for numbers in ordered)
    rho = rank_correlation([mean_loss(n) for n in found], [published(n) for n in found])
    return (
        f"{markdown(columns, ordered)}\n\n"
        f"Our order, from the lowest loss: {names}.\n\n"
        f"The published order: {' < '.join(setting.name for setting in SETTINGS)} ({SOURCE}; one "
        "run each of a model of about 1B, text and tokens not stated).\n\n"
        f"Spearman's rank correlation of both: {rho:.2f}. {group_order(found)}\n"
    )


def group_order(found: list[Numbers]) -> str:
    """Which neighbouring groups of the published order come in that order here."""
    members: dict[int, list[float]] = {}
    for setting, numbers in zip(SETTINGS, found, strict=True):
        members.setdefault(setting.group, []).append(mean_loss(numbers))
    names = {
        group: "{" + ", ".join(s.name for s in SETTINGS if s.group == group) + "}"
        for group in members
    }
    held = []
    for first, second in zip(members, list(members)[1:], strict=False):
        holds = max(members[first]) < min(members[second])
        held.append(f"{names[first]} < {names[second]} {'holds' if holds else 'does not hold'}")
    return f"Of its groups, every member against every one: {'; '.join(held)}."


def published(numbers: Numbers) -> float:
    """The loss that was published for an arm."""
    return next(s.published for s in SETTINGS if s.name == numbers["arm"]["name"])


def mean_loss(numbers: Numbers) -> float:
    """Over the seeds; a seed that came to nothing makes it infinite."""
    losses = numbers["held_out"]
    return float("inf") if None in losses else sum(losses) / len(losses)


if __name__ == "__main__":
    with readable_errors():
        main(read(RopePlacement, __doc__))
