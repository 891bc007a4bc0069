"""Ablate one choice of a run; text, data order and seeds are shared by all variants.

    python -m experiments.ablate --axis position --size smoke   # minutes: to see that it runs
    python -m experiments.ablate --axis placement               # about an hour of two cores
    python -m experiments.ablate --axis optimizer --run default --steps 300
    python -m experiments.ablate --axis model.norm --variants "RMSNorm(eps=0.1)" "LayerNorm()"

Axes: norm, block, qk_norm, z_loss, placement, activation, position, softcap, optimizer, or any
field of a run's model, optimizer or objective. Trains each variant from several seeds and compares
it with the run's own choice, seed by seed. Writes JSON, a table and a plot. A study that is
interrupted goes on where it was when it is started again.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.command_line import parse_args, readable_errors
from experiments.studies.extra_metrics import EXTRA_METRICS, no_extra_metrics
from experiments.studies.plots import plot_extra_metrics, plot_losses
from experiments.studies.sizes import ABLATION_SIZES
from experiments.studies.study import Study, base_run, run_study
from experiments.studies.tables import ablation_report
from experiments.studies.variants import make_variants


@dataclass(frozen=True, kw_only=True)
class Ablation(Study):
    """Options of an ablation of one axis.

    Attributes:
        axis: What differs between the variants: one of those above, or a field, such as model.norm.
        variants: Names of those to train beside the baseline; none are all. Of a field, its values
            as Python prints them, such as "LayerNorm()", imported ones too. So also on the axis
            "position", and on "activation" the name of an imported one.
    """

    axis: str
    variants: tuple[str, ...] = ()


def main(study: Ablation) -> Path:
    """Run the study and write its report; returns the results folder."""
    run = base_run(study, ABLATION_SIZES)
    variants = make_variants(study.axis, run, study.variants)
    measure = EXTRA_METRICS.get(study.axis, no_extra_metrics)
    output, results = run_study(study, f"ablate_{study.axis}", run, variants, measure)
    text = ablation_report(study.axis, results)
    (output / "table.md").write_text(text)
    plot_losses(output / "plot.png", results, title=f"Ablation: {study.axis}")
    plot_extra_metrics(output / "more.png", results, length=run.length)
    print(f"\n{text}\nEverything is in {output}.")
    return output


if __name__ == "__main__":
    with readable_errors():
        main(parse_args(Ablation, __doc__))
