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
    for axis, heading in (item for half in choices.HALVES for item in half.items()):
        start = shown.index(heading, start) + 1
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


def test_the_picture_uses_terms_of_the_field():
    """No text is a name of code or of a flag, but words with capitals in them."""
    words = {"RoPE", "LayerNorm", "RMSNorm", "GeLU", "GeGLU", "SwiGLU", "SqReLu", "ReLU", "ALiBi"}
    words |= {"xIELU", "QK-norm", "pre-norm", "post-norm", "feed-forward", "Transformer-XL"}
    words |= {"multi-head", "multi-query", "grouped-query", "RG-LRU"}
    names = re.findall(r"[\w-]*(?:[a-z][A-Z]|[_-])[\w-]*", " ".join(texts()))
    assert set(names) <= words


def test_numbers_can_be_read_on_every_shade():
    """Contrast by the Web Content Accessibility Guidelines of at least 4.5."""
    root = ElementTree.fromstring(choices.picture())
    rectangles = root.iter("{http://www.w3.org/2000/svg}rect")
    opacities = [float(r.get("fill-opacity")) for r in rectangles if r.get("fill-opacity")]
    assert max(opacities) - min(opacities) > 0.4
    blue = [int(choices.COLOUR[i : i + 2], 16) for i in (1, 3, 5)]
    darkest = [max(opacities) * x + (1 - max(opacities)) * 0xF3 for x in blue]
    linear = [((x / 255 + 0.055) / 1.055) ** 2.4 for x in (*darkest, 0x22)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / (linear[3] + 0.05) > 4.5
    assert "fill: #222" in choices.STYLE and "fill:white" not in choices.picture()


def test_the_command_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "PICTURE", tmp_path / "choices.svg")
    choices.main()
    assert (tmp_path / "choices.svg").read_text() == choices.picture()
