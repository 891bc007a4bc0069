"""The picture of choices by year is drawn from the tables."""

import re
from xml.etree import ElementTree

from experiments import choices
from jaxformer import zoo


def texts():
    """Texts of the picture, in order."""
    root = ElementTree.fromstring(choices.picture())
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_stored_picture_is_the_one_that_is_drawn():
    """Otherwise run `python -m experiments.choices`."""
    assert choices.PICTURE.read_text() == choices.picture()


def test_the_numbers_are_those_of_the_tables():
    """Behind the name of a choice stand the numbers of its models, year by year."""
    shown, start = texts(), 0
    for axis in (axis for half in choices.HALVES for axis in half):
        start = shown.index(axis, start) + 1
        for choice, models in zoo.choices(axis).items():
            start = shown.index(choice, start) + 1
            counts = re.match(r"(?:\d+,)+", ",".join(shown[start:]) + ",")[0].split(",")[:-1]
            years = sorted({model.year for model in models})
            counts = [int(x) for x in counts if int(x) < 2000]
            assert counts == [sum(model.year == year for model in models) for year in years]


def test_no_text_is_outside():
    """Names are no wider than their column, at 7 of 12 pixels a letter."""
    longest = max(len(x) for half in choices.HALVES for axis in half for x in zoo.choices(axis))
    assert 7 * longest <= choices.LABEL_WIDTH


def test_the_command_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "PICTURE", tmp_path / "choices.svg")
    choices.main()
    assert (tmp_path / "choices.svg").read_text() == choices.picture()
