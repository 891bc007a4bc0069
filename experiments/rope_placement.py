"""Ablation: RoPE on queries, keys, values, the output, and combinations of them.

    python -m experiments.rope_placement --size smoke       # minutes: to see that it runs
    python -m experiments.rope_placement                    # hours of two cores
    python -m experiments.rope_placement --size gpu --seeds 3

Trains the nine settings of a blog post that reports one loss each of a model of 1B, from several
seeds each, and compares the orders. Writes JSON, a table and a plot. A study that is interrupted
goes on where it was when it is started again.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from experiments.command_line import read, readable_errors
from experiments.studies.measures import nothing_more
from experiments.studies.plots import plot_losses
from experiments.studies.results import Numbers
from experiments.studies.seeds import Arm
from experiments.studies.sizes import PLACEMENT_SIZES
from experiments.studies.statistics import paired_difference, rank_chance, rank_correlation
from experiments.studies.study import Study, base_run, conduct
from experiments.studies.tables import (
    NOTE,
    Column,
    deviation,
    difference_from,
    first_loss,
    markdown,
    mean_and_interval,
    values,
)
from jaxformer.config import Rope
from jaxformer.config.positions import RopeTarget

SOURCE = "Su, Rotary Position Embedding of the Second Kind, 2025. spaces.ac.cn/archives/10862"


class Setting(NamedTuple):
    """Which of queries, keys and values are rotated, and the published loss."""

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
GROUPS = max(setting.group for setting in SETTINGS)


@dataclass(frozen=True, kw_only=True)
class RopePlacement(Study):
    """Options of the study of nine RoPE settings."""


def main(study: RopePlacement) -> Path:
    """Run the study and write its report; returns the results folder."""
    run = base_run(study, PLACEMENT_SIZES)
    variants = [
        Arm(
            name=setting.name,
            model=run.model.with_positions(
                Rope(targets=setting.targets) if setting.targets else None
            ),
            optimizer=run.optimizer,
            objective=run.objective,
        )
        for setting in SETTINGS
    ]
    output, results = conduct(study, "rope_placement", run, variants, nothing_more)
    text = report(results)
    (output / "table.md").write_text(text)
    plot_losses(output / "plot.png", results, title="Where rotary positions act")
    print(f"\n{text}\nEverything is in {output}.")
    return output


def report(found: list[Numbers]) -> str:
    """Table of the losses, and how they agree with the published order."""
    first = SETTINGS[0].published
    columns = [
        Column("rotary positions on", lambda numbers: numbers["arm"]["name"]),
        Column("held-out loss", mean_and_interval("held_out")),
        Column("spread", deviation("held_out")),
        Column("minus QK", difference_from("held_out", found[0])),
        Column("minus none", difference_from("held_out", named(found, "none"))),
        Column("loss at first", first_loss),
        Column("published", lambda numbers: f"{published(numbers):.3f}"),
        Column("its minus QK", lambda numbers: f"{published(numbers) - first:+.3f}"),
    ]
    ordered = sorted(found, key=mean_loss)
    names = " < ".join(numbers["arm"]["name"] for numbers in ordered)
    published_losses = [published(numbers) for numbers in found]
    rho = rank_correlation([mean_loss(numbers) for numbers in found], published_losses)
    p_value = rank_chance([mean_loss(numbers) for numbers in found], published_losses)
    seeds = [rank_correlation(losses, published_losses) for losses in by_seed(found)]
    return (
        f"{markdown(columns, ordered)}\n\n{NOTE}\n\n"
        f"Our order, from the lowest loss: {names}.\n\n"
        f"The published order: {' < '.join(setting.name for setting in SETTINGS)} ({SOURCE}; one "
        "run each of a model of about 1B, text and tokens not stated).\n\n"
        f"Spearman's rank correlation of both: {rho:.2f} (an order drawn at random is as near, or "
        f"as near to the reverse, with probability {p_value:.3f}); of single seeds "
        f"{min(seeds):.2f} to {max(seeds):.2f}. {group_order(found)}\n"
    )


def group_order(found: list[Numbers]) -> str:
    """Whether each pair of neighbouring groups of the published order has the same order here.

    An order holds, or is reversed, where the intervals of all differences between their members
    say so.
    """
    groups = [[s for s in SETTINGS if s.group == group] for group in range(1, 1 + GROUPS)]
    verdicts = []
    for before, after in pairwise(groups):
        pairs = [
            paired_difference(
                values(named(found, b.name), "held_out"), values(named(found, a.name), "held_out")
            )
            for a, b in product(before, after)
        ]
        verdict = "are not told apart"
        if all(mean - half > 0 for mean, _, half in pairs):
            verdict = "holds"
        elif all(mean + half < 0 for mean, _, half in pairs):
            verdict = "is reversed"
        names = (f"{{{', '.join(s.name for s in group)}}}" for group in (before, after))
        verdicts.append(f"{' < '.join(names)} {verdict}")
    return (
        "Of its groups, every member against every one by the interval of their difference: "
        f"{'; '.join(verdicts)}."
    )


def named(found: list[Numbers], name: str) -> Numbers:
    """Result of the variant of that name."""
    return next(numbers for numbers in found if numbers["arm"]["name"] == name)


def by_seed(found: list[Numbers]) -> list[list[float]]:
    """Losses of all variants, one row for each seed; infinite for a diverged seed."""
    losses = [[float("inf") if x is None else x for x in numbers["held_out"]] for numbers in found]
    return [list(one) for one in zip(*losses, strict=True)]


def published(numbers: Numbers) -> float:
    """Published loss of a variant."""
    return next(s.published for s in SETTINGS if s.name == numbers["arm"]["name"])


def mean_loss(numbers: Numbers) -> float:
    """Mean loss over the seeds; infinite if one of them diverged."""
    losses = numbers["held_out"]
    return float("inf") if None in losses else sum(losses) / len(losses)


if __name__ == "__main__":
    with readable_errors():
        main(read(RopePlacement, __doc__))
