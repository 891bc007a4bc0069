"""Synthetic dates with a train / held-out split, a pure function of (seed, index).

How they are written: `date_forms`.
"""

import datetime
import hashlib
from typing import Literal, NamedTuple

from experiments.translate.date_forms import FORMS, SeededChoice
from jaxformer.data import Pair

SplitName = Literal["train", "held_out"]
HELD_OUT_FRACTION = 0.1  # share of the calendar's days


class WrittenDate(NamedTuple):
    """A date and one written form of it."""

    form: str
    text: str
    date: datetime.date

    @property
    def pair(self) -> Pair:
        """Source text and target: the date in ISO 8601."""
        return Pair(self.text, self.date.isoformat())


def written_date(
    index: int, *, seed: int, split: SplitName = "train", form: str | None = None
) -> WrittenDate:
    """The date of this index, with its form and text, the same on every machine.

    Args:
        index: Index of the date.
        seed: Random seed.
        split: Training days or held-out days; no day is in both, in any form.
        form: Written form; None draws one.

    Returns:
        The date.

    Raises:
        ValueError: There is no such form.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"There is no form {form!r}. Forms: {', '.join(FORMS)}.")
    pick = SeededChoice(seed, split, index)
    by_weight = [name for name, kind in FORMS.items() for _ in range(kind.weight)]
    name = pick(*by_weight) if form is None else form
    date_form = FORMS[name]
    first = datetime.date(date_form.first_year, 1, 1).toordinal()
    days = datetime.date(date_form.last_year, 12, 31).toordinal() - first + 1
    while True:
        date = datetime.date.fromordinal(first + pick.below(days))
        if is_held_out(date) == (split == "held_out"):
            text = date_form.write(date, pick)
            if date_form.language == "en":
                text = pick(text, text, text.lower(), text.upper())
            return WrittenDate(name, text, date)


def is_held_out(date: datetime.date) -> bool:
    """Whether a day is held out, decided by a hash of the day."""
    digest = hashlib.md5(date.isoformat().encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:6]) / 2**48 < HELD_OUT_FRACTION
