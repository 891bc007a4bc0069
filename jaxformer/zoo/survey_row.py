"""`SurveyRow`: a row of the lecture's table, with the released model beside the listed one."""

from dataclasses import dataclass, replace

from jaxformer import config as c
from jaxformer.config.topology import Topology
from jaxformer.zoo.presets import get
from jaxformer.zoo.survey_cells import SurveyCells, cells_from_config, config_from_cells


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of one of the lecture's tables.

    Attributes:
        number: Row number, from 1 on.
        name: Name as listed.
        year: Year of the paper or the release.
        release_notes: Description of the release, including properties without a column.
        preset: Name of the preset; None if there is none.
        other_presets: Other presets of the family.
        differences: Differences from the lecture and their reasons, a sentence each; a blank cell
            that is published counts as a difference.
        reference: Authors, title, year.
    """

    number: int
    name: str
    year: int
    release_notes: str
    preset: str | None = None
    other_presets: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    reference: str

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of the row's preset and of the others of its family."""
        return self.other_presets if self.preset is None else (self.preset, *self.other_presets)


@dataclass(frozen=True, kw_only=True)
class SurveyRow(TableRow):
    """One model: as listed, as released, and why the two differ.

    Rows 1 to 38 are in the edition of 2025; 2026 adds the rows from 39 on.

    Attributes:
        edition: First edition of the lecture that lists the model.
        listed: Cells as listed; None is a blank cell.
        assumptions: Properties that are not published, or are from the paper and not checked
            against released files, a sentence each.
        z_loss: Published weight of the z-loss in training (`training.gradient.Objective`); None
            if there was none.
        relative_positions: Position option for "Relative" in this row.
        topology: Decoder, encoder, or both; the table has no column for it.
    """

    edition: int = 2025
    listed: SurveyCells
    assumptions: tuple[str, ...] = ()
    z_loss: float | None = None
    relative_positions: c.Positions = c.T5Bias()
    topology: Topology = c.Decoder()

    @property
    def released(self) -> SurveyCells | None:
        """Cells of the preset; None without a preset."""
        if self.preset is None:
            return None
        released_cells = cells_from_config(get(self.preset), edition=self.edition)
        return (
            replace(released_cells, tricks=("Z-loss", *released_cells.tricks))
            if self.z_loss
            else released_cells
        )

    @property
    def is_assumed(self) -> bool:
        """Whether blank cells were filled by assumption, without a publication."""
        return None in vars(self.listed).values() and not self.differences

    def as_listed(self) -> c.TransformerConfig:
        """Build a small configuration exactly as the lecture lists the row.

        Blank cells become GPT-3's cells (`survey_cells.BLANK_DEFAULTS`); all cells of GPT-4 and
        Anthropic LM are blank. Z-loss is not part of the model: train with
        `Objective(z_loss=row.z_loss)`. `survey_cells.config_from_cells` describes the properties
        without a column.

        Raises:
            ValueError: There is no option for a cell: row 44.
        """
        return config_from_cells(
            self.listed, relative_positions=self.relative_positions, topology=self.topology
        )
