"""Presets of published models, and the survey of 38 models.

    zoo.get("llama-2-70b")    a TransformerConfig at its published size; `.tiny()` shrinks it
    zoo.names()               every preset
    zoo.survey()              the 38 rows of the lecture's table: as listed, as released

`python -m jaxformer.zoo` prints the table, `python -m jaxformer.zoo llama-2-70b` one model.
"""

from jaxformer.zoo.presets import get as get
from jaxformer.zoo.presets import names as names
from jaxformer.zoo.survey import survey as survey
from jaxformer.zoo.survey_cells import SurveyCells as SurveyCells
from jaxformer.zoo.survey_row import SurveyRow as SurveyRow
