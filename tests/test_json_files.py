"""JSON that others wrote is read strictly, or refused in a sentence that names the file."""

import json
import math

import pytest

from jaxformer.json_files import get_field, parse_json, parse_json_object, read_json


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_what_json_says_is_read(file):
    value = {"layers": 2, "eps": 1e-6, "names": ["ä", None, True, {}], "large": 2**100}
    assert read_json(file(json.dumps(value)), "layers", "eps") == value
    assert read_json(file(b"\xef\xbb\xbf{}")) == {}
    assert parse_json("[1, 2]", location="a line") == [1, 2]
    assert read_json(file('{"limits": [0.0, Infinity]}'), allow_infinity=True) == {
        "limits": [0.0, math.inf]
    }
    with pytest.raises(ValueError, match="-Infinity is not a finite number"):
        parse_json("-Infinity", location="a line", allow_infinity=True)


REFUSED = {
    "empty": ("", "is not JSON: Expecting value: line 1 column 1"),
    "cut": ('{"a": [1,\n 2', "is not JSON: Expecting ',' delimiter: line 2 column 3"),
    "latin": (b'{"a": "\xe9"}', "is not JSON: 'utf-8' codec can't decode byte 0xe9 in position 7"),
    "deep": ("[" * 50_000, "is nested too deeply"),
    "NaN": ('{"eps": NaN}', "is not JSON: NaN is not a finite number"),
    "Infinity": ('{"eps": -Infinity}', "-Infinity is not a finite number"),
    "overflow": ('{"eps": 1e999}', "1e999 is not a finite number"),
    "digits": ('{"n": 1' + "0" * 5000 + "}", "is not JSON: Exceeds the limit"),
    "a list": ("[]", "is a list, not an object"),
    "null": ("null", "is null, not an object"),
    "missing": ('{"b": 1, "a": 2}', "lacks layers; it has a, b"),
}


@pytest.mark.parametrize("text, message", REFUSED.values(), ids=REFUSED)
def test_untrusted_json_is_refused_in_a_sentence_that_names_the_file(file, text, message):
    path = file(text)
    with pytest.raises(ValueError) as raised:
        read_json(path, "layers")
    refusal = str(raised.value)
    assert message in refusal and refusal.startswith(str(path)), refusal
    assert len(refusal) < len(str(path)) + 160 and "\n" not in refusal


def test_a_field_has_the_type_that_belongs_there():
    parsed = parse_json_object(
        '{"n": 3, "x": 0.5, "yes": true, "map": [], "no": null}', location="a.json"
    )
    assert get_field(parsed, "n", int, location="a.json") == 3
    assert type(get_field(parsed, "n", float, location="a.json")) is float
    wrong = {
        ("map", dict): "a.json: map is a list, not an object",
        ("yes", int): "a.json: yes is a boolean, not an integer",
        ("x", int): "a.json: x is a number, not an integer",
        ("no", str): "a.json: no is null, not a string",
        ("gone", str): "a.json lacks gone; it has map, n, no, x, yes",
    }
    for (name, kind), message in wrong.items():
        with pytest.raises(ValueError, match=message.replace(".", "[.]")):
            get_field(parsed, name, kind, location="a.json")
