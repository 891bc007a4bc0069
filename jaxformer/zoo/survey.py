"""The 38 rows of the lecture's table "Variations of transformers", in its order."""

from jaxformer.zoo import rows_2017_to_2021, rows_2022_to_2023, rows_2024_to_2025
from jaxformer.zoo.row import SurveyRow


def survey() -> tuple[SurveyRow, ...]:
    """Every row: as listed, as released, the preset's name, what differs and why.

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
    return (*rows_2017_to_2021.ROWS, *rows_2022_to_2023.ROWS, *rows_2024_to_2025.ROWS)
