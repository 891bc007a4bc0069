"""`SurveyRow`: a row of the lecture's table, with the released model beside the listed one."""

from dataclasses import dataclass, replace

from jaxformer.config import Decoder, Positions, T5Bias, TransformerConfig
from jaxformer.config.topology import Topology
from jaxformer.zoo.presets import get
from jaxformer.zoo.survey_cells import SurveyCells, cells_from_config, config_from_cells


@dataclass(frozen=True, kw_only=True)
class SurveyRow:
    """One model: as listed, as released, and why the two differ.

    Attributes:
        number: 1 to 38, the place in the table.
        name: As listed.
        year: As listed.
        listed: The cells as listed; None is a blank one.
        release_notes: What was released or published, with what no column tells.
        preset: Name of the preset with the released design at the listed size; None where nothing
            is published.
        other_presets: Further presets of the family.
        differences: What differs from the listed cells and why, a sentence each; blank cells that a
            publication fills are differences too.
        assumptions: What is not published, or was taken from the paper and not checked against
            released files, a sentence each.
        reference: Authors, title, year.
        z_loss: Published weight of the z-loss, which is part of training and not of the model
            (`training.gradient.Objective`); None where there was none.
        relative_positions: What "Relative" stands for in this row.
        topology: Which stacks it has; the table has no column for it.
    """

    number: int
    name: str
    year: int
    listed: SurveyCells
    release_notes: str
    preset: str | None = None
    other_presets: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    reference: str
    z_loss: float | None = None
    relative_positions: Positions = T5Bias()
    topology: Topology = Decoder()

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of the row's preset and of the others of its family."""
        return self.other_presets if self.preset is None else (self.preset, *self.other_presets)

    @property
    def released(self) -> SurveyCells | None:
        """Cells of the preset; None without a preset."""
        if self.preset is None:
            return None
        released_cells = cells_from_config(get(self.preset))
        return (
            replace(released_cells, tricks=("Z-loss", *released_cells.tricks))
            if self.z_loss
            else released_cells
        )

    @property
    def is_assumed(self) -> bool:
        """Whether blank cells were filled by assumption, without a publication."""
        return None in vars(self.listed).values() and not self.differences

    def as_listed(self) -> TransformerConfig:
        """Build a small configuration exactly as the lecture lists the row.

        Blank cells become those of GPT-3, the plainest decoder of the table
        (`survey_cells.BLANK_DEFAULTS`): for GPT-4 and Anthropic LM that is all there is, since
        nothing else is listed. Z-loss changes no model; train with `Objective(z_loss=row.z_loss)`.
        `survey_cells.config_from_cells` says what is chosen where the table has no column.
        """
        return config_from_cells(
            self.listed, relative_positions=self.relative_positions, topology=self.topology
        )
