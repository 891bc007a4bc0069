"""The 38 rows of the lecture's table "Variations of transformers", in its order."""

from jaxformer.zoo import rows_2017_to_2021, rows_2022_to_2023, rows_2024_to_2025
from jaxformer.zoo.row import SurveyRow


def survey() -> tuple[SurveyRow, ...]:
    """Every row: as listed, as released, the preset's name, what differs and why."""
    return (*rows_2017_to_2021.ROWS, *rows_2022_to_2023.ROWS, *rows_2024_to_2025.ROWS)
