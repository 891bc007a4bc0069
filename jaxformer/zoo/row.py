"""`SurveyRow`: a row of the lecture's table, with the released model beside the listed one."""

from dataclasses import dataclass, replace

from jaxformer.config import Decoder, Positions, T5Bias, TransformerConfig
from jaxformer.config.model import Topology
from jaxformer.zoo.catalogue import get
from jaxformer.zoo.cells import Cells, build, cells


@dataclass(frozen=True, kw_only=True)
class SurveyRow:
    """One model: as listed, as released, and why the two differ.

    Attributes:
        number: 1 to 38, the place in the table.
        name: As listed.
        year: As listed.
        listed: The cells as listed; None is a blank one.
        release: What was released or published, with what no column tells.
        preset: Name of the preset with the released design at the listed size; None where nothing
            is published.
        also: Further presets of the family.
        differences: What differs from the listed cells and why, a sentence each; blank cells that a
            publication fills are differences too.
        assumptions: What is not published, or was taken from the paper and not checked against
            released files, a sentence each.
        reference: Authors, title, year.
        z_loss: Published weight of the z-loss, which is part of training and not of the model
            (`training.gradient.Objective`); None where there was none.
        relative: What "Relative" stands for in this row.
        topology: Which stacks it has; the table has no column for it.
    """

    number: int
    name: str
    year: int
    listed: Cells
    release: str
    preset: str | None = None
    also: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    reference: str
    z_loss: float | None = None
    relative: Positions = T5Bias()
    topology: Topology = Decoder()

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of the row's preset and of the others of its family."""
        return self.also if self.preset is None else (self.preset, *self.also)

    @property
    def released(self) -> Cells | None:
        """Cells of the preset; None without a preset."""
        if self.preset is None:
            return None
        released_cells = cells(get(self.preset))
        return (
            replace(released_cells, tricks=("Z-loss", *released_cells.tricks))
            if self.z_loss
            else released_cells
        )

    @property
    def assumed(self) -> bool:
        """Whether blank cells were filled by assumption, without a publication."""
        return None in vars(self.listed).values() and not self.differences

    def as_listed(self) -> TransformerConfig:
        """Build a small configuration exactly as the lecture lists the row.

        Blank cells become those of GPT-3, the plainest decoder of the table (`cells.NEUTRAL`): for
        GPT-4 and Anthropic LM that is all there is, since nothing else is listed. Z-loss changes no
        model; train with `Objective(z_loss=row.z_loss)`. `cells.build` says what is chosen where
        the table has no column.
        """
        return build(self.listed, relative=self.relative, topology=self.topology)
