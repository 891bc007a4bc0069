"""Presets of published models, and the lecture's tables of models.

    zoo.get("llama-2-70b")    a TransformerConfig at its published size; `.tiny()` shrinks it
    zoo.names()               every preset
    zoo.survey()              the rows of the lecture's table: as listed, as released
    zoo.mixtures()            the rows of its table of mixtures of experts
    zoo.choices("norm")       which of these models made which choice

`jaxformer zoo` prints the tables, `jaxformer zoo llama-2-70b` one model.
"""

from jaxformer.zoo.axes import AXES as AXES
from jaxformer.zoo.axes import Model as Model
from jaxformer.zoo.axes import choices as choices
from jaxformer.zoo.mixtures import MixtureCells as MixtureCells
from jaxformer.zoo.mixtures import MixtureRow as MixtureRow
from jaxformer.zoo.mixtures import mixtures as mixtures
from jaxformer.zoo.presets import get as get
from jaxformer.zoo.presets import names as names
from jaxformer.zoo.survey import survey as survey
from jaxformer.zoo.survey_cells import SurveyCells as SurveyCells
from jaxformer.zoo.survey_row import SurveyRow as SurveyRow
