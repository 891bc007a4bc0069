"""Ablate one choice of a run; text, data order and seeds are shared by all variants.

    python -m experiments.ablate --axis position --size smoke   # minutes: to see that it runs
    python -m experiments.ablate --axis placement               # about an hour of two cores
    python -m experiments.ablate --axis optimizer --run default --steps 300
    python -m experiments.ablate --axis model.norm --arms "RMSNorm(eps=0.1)" "LayerNorm()"

Axes: norm, block, qk_norm, z_loss, placement, activation, position, softcap, optimizer, or any
field of a run's model, optimizer or objective. Trains each arm from several seeds and compares it
with the run's own choice, seed by seed. Writes JSON, a table and a plot. A study that is
interrupted goes on where it was when it is started again.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.command_line import read, readable_errors
from experiments.studies.arms import arms_of
from experiments.studies.measures import MEASURES, nothing_more
from experiments.studies.plots import plot_losses, plot_more
from experiments.studies.sizes import ABLATION_SIZES
from experiments.studies.study import Study, base_run, conduct
from experiments.studies.tables import ablation_report


@dataclass(frozen=True, kw_only=True)
class Ablation(Study):
    """Options of an ablation of one axis.

    Attributes:
        axis: What differs between the arms: one of those above, or a field, such as model.norm.
        arms: Names of those to train beside the baseline; none are all. Of a field, its values as
            Python prints them, such as "LayerNorm()", imported ones too. So also on the axis
            "position", and on "activation" the name of an imported one.
    """

    axis: str
    arms: tuple[str, ...] = ()


def main(study: Ablation) -> Path:
    """Run the study and write its report; returns the results folder."""
    run = base_run(study, ABLATION_SIZES)
    variants = arms_of(study.axis, run, study.arms)
    measure = MEASURES.get(study.axis, nothing_more)
    output, results = conduct(study, f"ablate_{study.axis}", run, variants, measure)
    text = ablation_report(study.axis, results)
    (output / "table.md").write_text(text)
    plot_losses(output / "plot.png", results, title=f"Ablation: {study.axis}")
    plot_more(output / "more.png", results, length=run.length)
    print(f"\n{text}\nEverything is in {output}.")
    return output


if __name__ == "__main__":
    with readable_errors():
        main(read(Ablation, __doc__))
