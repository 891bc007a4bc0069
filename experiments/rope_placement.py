"""Ablation: RoPE on queries, keys, values, the output, and combinations of them.

    python -m experiments.rope_placement --size smoke       # a test of minutes
    python -m experiments.rope_placement                    # hours on two cores
    python -m experiments.rope_placement --size gpu --seeds 3

A blog post reports one loss of a 1B model for each of nine settings. This study trains each setting
from several seeds and compares the two orders. Writes JSON, a table and a plot. The same command
resumes an interrupted study.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from experiments.studies.extra_metrics import no_extra_metrics
from experiments.studies.plots import write_report
from experiments.studies.results import ResultDict
from experiments.studies.sizes import PLACEMENT_SIZES
from experiments.studies.statistics import paired_difference, rank_correlation, rank_p_value
from experiments.studies.study import Study, base_run, run_study
from experiments.studies.tables import (
    NOTE,
    Column,
    difference_from,
    initial_loss,
    markdown,
    mean_and_interval,
    seed_values,
    std_over_seeds,
)
from experiments.studies.train_seeds import Variant
from jaxformer.config import Rope
from jaxformer.config.positions import RopeTarget
from jaxformer.run.command_line import run_program

SOURCE = "Su, Rotary Position Embedding of the Second Kind, 2025. spaces.ac.cn/archives/10862"


class RopeSetting(NamedTuple):
    """Which of queries, keys and values are rotated, and the published loss."""

    name: str
    targets: tuple[RopeTarget, ...]
    published_loss: float
    published_group: int  # in the published order; the post calls losses of a group about equal


SETTINGS = (
    RopeSetting("QK", ("q", "k"), 2.712, 1),
    RopeSetting("QKVO", ("q", "k", "v", "o"), 2.719, 1),
    RopeSetting("K", ("k",), 2.769, 2),
    RopeSetting("VO", ("v", "o"), 2.770, 2),
    RopeSetting("QKV", ("q", "k", "v"), 2.783, 3),
    RopeSetting("none", (), 2.795, 4),
    RopeSetting("O", ("o",), 2.841, 5),
    RopeSetting("Q", ("q",), 2.851, 5),
    RopeSetting("V", ("v",), 2.856, 5),
)
GROUPS = max(setting.published_group for setting in SETTINGS)


@dataclass(frozen=True, kw_only=True)
class RopePlacement(Study):
    """Options of the study of nine RoPE settings."""


def main(study: RopePlacement) -> Path:
    """Run the study and write its report; returns the results folder."""
    run = base_run(study, PLACEMENT_SIZES)
    variants = [
        Variant(
            name=setting.name,
            model=run.model.with_positions(
                Rope(targets=setting.targets) if setting.targets else None
            ),
            optimizer=run.optimizer,
            objective=run.objective,
        )
        for setting in SETTINGS
    ]
    output, results = run_study(study, "rope_placement", run, variants, no_extra_metrics)
    table = format_report(results)
    write_report(output, results, table, title="RoPE placement", length=run.length)
    print(f"\n{table}\nResults are in {output}.")
    return output


def format_report(results: list[ResultDict]) -> str:
    """Table of the losses, and their rank correlation with the published losses."""
    first = SETTINGS[0].published_loss
    columns = [
        Column("RoPE on", lambda numbers: numbers["variant"]["name"]),
        Column("held-out loss", mean_and_interval("held_out")),
        Column("std", std_over_seeds("held_out")),
        Column("minus QK", difference_from("held_out", results[0])),
        Column("minus none", difference_from("held_out", find_result(results, "none"))),
        Column("initial loss", initial_loss),
        Column("published", lambda numbers: f"{published_loss_of(numbers):.3f}"),
        Column("published minus QK", lambda numbers: f"{published_loss_of(numbers) - first:+.3f}"),
    ]
    ordered = sorted(results, key=mean_loss)
    names = " < ".join(numbers["variant"]["name"] for numbers in ordered)
    published_losses = [published_loss_of(numbers) for numbers in results]
    rho = rank_correlation([mean_loss(numbers) for numbers in results], published_losses)
    p_value = rank_p_value([mean_loss(numbers) for numbers in results], published_losses)
    by_seed = zip(*map(losses_of, results), strict=True)
    seeds = [rank_correlation(losses, published_losses) for losses in by_seed]
    return (
        f"{markdown(columns, ordered)}\n\n{NOTE}\n\n"
        f"Order here, lowest loss first: {names}.\n\n"
        f"Published order: {' < '.join(setting.name for setting in SETTINGS)} ({SOURCE}; one "
        "run each of a model of about 1B, text and number of tokens not stated).\n\n"
        f"Spearman's rank correlation of the two: {rho:.2f} (p = {p_value:.3f}, two-sided); of "
        f"single seeds {min(seeds):.2f} to {max(seeds):.2f}. {compare_group_order(results)}\n"
    )


def compare_group_order(results: list[ResultDict]) -> str:
    """Whether each pair of neighbouring groups of the published order has the same order here.

    An order holds or is reversed if the intervals of all differences between members exclude zero.
    """
    groups = [[s for s in SETTINGS if s.published_group == group] for group in range(1, 1 + GROUPS)]
    verdicts = []
    for before, after in pairwise(groups):
        pairs = [
            paired_difference(
                seed_values(find_result(results, b.name), "held_out"),
                seed_values(find_result(results, a.name), "held_out"),
            )
            for a, b in product(before, after)
        ]
        verdict = "is not significant"
        if all(mean - half > 0 for mean, _, half in pairs):
            verdict = "holds"
        elif all(mean + half < 0 for mean, _, half in pairs):
            verdict = "is reversed"
        names = (f"{{{', '.join(s.name for s in group)}}}" for group in (before, after))
        verdicts.append(f"{' < '.join(names)} {verdict}")
    return (
        "Order of neighbouring published groups, by the intervals of all pairwise differences: "
        f"{'; '.join(verdicts)}."
    )


def find_result(results: list[ResultDict], name: str) -> ResultDict:
    """Result of the variant of that name."""
    return next(numbers for numbers in results if numbers["variant"]["name"] == name)


def losses_of(numbers: ResultDict) -> list[float]:
    """Loss of each seed; infinite for a diverged one."""
    return [float("inf") if x is None else x for x in numbers["held_out"]]


def mean_loss(numbers: ResultDict) -> float:
    """Mean loss over the seeds; infinite if one of them diverged."""
    losses = losses_of(numbers)
    return sum(losses) / len(losses)


def published_loss_of(numbers: ResultDict) -> float:
    """Published loss of a variant."""
    return next(s.published_loss for s in SETTINGS if s.name == numbers["variant"]["name"])


if __name__ == "__main__":
    run_program(main, RopePlacement, __doc__)
