"""The rows of the lecture's table "Variations of transformers", in its order."""

import functools
import tomllib
from importlib import resources
from typing import Any

from jaxformer import config
from jaxformer.zoo.survey_cells import SurveyCells
from jaxformer.zoo.survey_row import SurveyRow


@functools.cache
def survey(*, edition: int = 2026) -> tuple[SurveyRow, ...]:
    """Return the survey's rows: as listed, as released, preset, differences and reasons.

    Args:
        edition: Edition of the lecture: 2025 has 38 rows, 2026 adds 7 to them.

    Returns:
        The rows, first the transformer of 2017.

    Example:
        >>> from jaxformer import zoo
        >>> row = zoo.survey()[13]
        >>> row.name, row.listed.block, row.released.block
        ('BLOOM (175B)', 'Parallel', 'Serial')
        >>> print(row.differences[0])
        The table says parallel; released code runs attention, then feed-forward.
    """
    rows = (_row(i, entry) for i, entry in enumerate(read_table("survey"), start=1))
    return tuple(row for row in rows if row.edition <= edition)


def read_table(name: str) -> list[dict[str, Any]]:
    """The rows of a TOML file beside this one."""
    text = resources.files("jaxformer.zoo").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["row"]
    return rows


def _row(number: int, entry: dict[str, Any]) -> SurveyRow:
    fields = with_tuples(entry) | {"listed": SurveyCells(**with_tuples(entry.get("listed", {})))}
    for name in ("relative_positions", "topology"):
        if name in entry:
            fields[name] = config.from_python(entry[name], vars(config))
    return SurveyRow(number=number, **fields)


def with_tuples(table: dict[str, Any]) -> dict[str, Any]:
    """The table with tuples in place of lists."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in table.items()}
