"""The rows of the lecture's table of mixtures of experts, in its order."""

import functools
from dataclasses import dataclass
from fractions import Fraction

from jaxformer import config as c
from jaxformer.zoo.presets import get
from jaxformer.zoo.survey import read_table, with_tuples
from jaxformer.zoo.survey_row import TableRow


@dataclass(frozen=True, kw_only=True)
class MixtureCells:
    """Cells of one row; None is a blank cell.

    Attributes:
        routed: Experts that a router chooses from.
        active: Experts that it chooses for a token.
        shared: Experts that every token meets; a wider one counts as several.
        ratio: Width of an expert as a fraction of a dense network's width. As released, it is a
            fraction of 4 * model_dim; the lecture mixes several dense networks.
    """

    routed: int | None = None
    active: int | None = None
    shared: int | None = None
    ratio: str | None = None


@dataclass(frozen=True, kw_only=True)
class MixtureRow(TableRow):
    """One mixture of experts: as listed, as released, and why the two differ.

    Attributes:
        listed: Cells as listed; None is a blank cell.
        missing: What the library lacks to build the release, or to have a preset of it.
    """

    listed: MixtureCells
    missing: str | None = None

    @property
    def released(self) -> MixtureCells | None:
        """Cells of the preset; None without a preset."""
        return None if self.preset is None else mixture_cells(get(self.preset))


@functools.cache
def mixtures() -> tuple[MixtureRow, ...]:
    """Return the lecture's mixtures of experts: as listed, as released, and what differs.

    Returns:
        The rows, first GShard.

    Example:
        >>> from jaxformer import zoo
        >>> row = zoo.mixtures()[8]
        >>> row.name, row.listed.active, row.released.ratio
        ('DeepSeek v3', 8, '1/14')
    """
    return tuple(
        MixtureRow(number=i, **with_tuples(entry) | {"listed": MixtureCells(**entry["listed"])})
        for i, entry in enumerate(read_table("mixtures"), start=1)
    )


def mixture_cells(config: c.TransformerConfig) -> MixtureCells | None:
    """Cells of a configuration's last layer; None if that has no experts."""
    moe = config.layers[-1].feed_forward
    if not isinstance(moe, c.MoE):
        return None
    width = moe.expert.hidden_dim
    return MixtureCells(
        routed=moe.num_experts,
        active=moe.top_k,
        shared=0 if moe.shared is None else moe.shared.expert.hidden_dim // width,
        ratio=str(Fraction(width, 4 * config.model_dim)),
    )
