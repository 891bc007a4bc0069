"""Ablate one choice of a run; text, data order and seeds are shared by all variants.

    python -m experiments.ablate --axis position --size smoke   # a test of minutes
    python -m experiments.ablate --axis placement               # about an hour on two cores
    python -m experiments.ablate --axis optimizer --run default --steps 300
    python -m experiments.ablate --axis model.norm --variants "RMSNorm(eps=0.1)" "LayerNorm()"

Axes: norm, block, qk_norm, z_loss, placement, activation, position, mixer, softcap, optimizer, or
any field of a run's model, optimizer or objective. Trains each variant from several seeds and
compares it with the baseline, the unchanged run, paired by seed. Writes JSON, a table and a plot.
The same command resumes an interrupted study.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.studies.extra_metrics import EXTRA_METRICS, no_extra_metrics
from experiments.studies.plots import write_report
from experiments.studies.sizes import ablation_sizes
from experiments.studies.study import Study, base_run, run_study
from experiments.studies.tables import ablation_report
from experiments.studies.variants import make_variants
from jaxformer.run.command_line import run_program


@dataclass(frozen=True, kw_only=True)
class Ablation(Study):
    """Options of an ablation of one axis.

    Attributes:
        axis: What differs between the variants: an axis listed above, or a field like model.norm.
        variants: Names of the variants to train besides the baseline; empty means all. For a field
            and for the axis "position", values as Python expressions, such as "LayerNorm()", of
            imported types too; for the axis "activation" also names of imported activations.
    """

    axis: str
    variants: tuple[str, ...] = ()


def main(study: Ablation) -> Path:
    """Run the study and write its report; returns the results folder."""
    run = base_run(study, ablation_sizes(study.axis))
    variants = make_variants(study.axis, run, study.variants)
    measure = EXTRA_METRICS.get(study.axis, no_extra_metrics)
    output, results = run_study(study, f"ablate_{study.axis}", run, variants, measure)
    title, table = f"Ablation: {study.axis}", ablation_report(study.axis, results)
    write_report(output, results, table, title=title, length=run.length)
    print(f"\n{table}\nResults are in {output}.")
    return output


if __name__ == "__main__":
    run_program(main, Ablation, __doc__)
