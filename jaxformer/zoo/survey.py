"""The 38 rows of the lecture's table "Variations of transformers", in its order."""

import functools
import tomllib
from importlib import resources
from typing import Any

from jaxformer import config
from jaxformer.zoo.survey_cells import SurveyCells
from jaxformer.zoo.survey_row import SurveyRow


@functools.cache
def survey() -> tuple[SurveyRow, ...]:
    """Return the 38 rows of the survey: as listed, as released, preset, differences and reasons.

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
    text = resources.files("jaxformer.zoo").joinpath("survey.toml").read_text(encoding="utf-8")
    return tuple(_row(i, entry) for i, entry in enumerate(tomllib.loads(text)["row"], start=1))


def _row(number: int, entry: dict[str, Any]) -> SurveyRow:
    fields = _with_tuples(entry) | {"listed": SurveyCells(**_with_tuples(entry.get("listed", {})))}
    for name in ("relative_positions", "topology"):
        if name in entry:
            fields[name] = config.from_python(entry[name], vars(config))
    return SurveyRow(number=number, **fields)


def _with_tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in table.items()}
