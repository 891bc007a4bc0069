"""JSON that others wrote is read strictly, or refused in a sentence that names the file."""

import json

import pytest

from jaxformer.json_files import MAX_DEPTH, field, parse_json, parse_object, read_json


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_what_json_says_is_read(file):
    said = {"layers": 2, "eps": 1e-6, "names": ["ä", None, True, {}], "large": 2**100}
    assert read_json(file(json.dumps(said)), "layers", "eps") == said
    assert read_json(file(b"\xef\xbb\xbf{}")) == {}
    assert parse_json("[1, 2]", where="a line") == [1, 2]


DEEP = 50_000
REFUSED = {
    "empty": ("", "is empty"),
    "blank": (" ", "is not JSON: Expecting value at column 2"),
    "cut": ('{"a": [1,\n 2', "is not JSON: Expecting ',' delimiter at line 2, column 3"),
    "latin": (b'{"a": "\xe9"}', "is not UTF-8: byte 0xe9 at offset 7 of 10"),
    "deep lists": ("[" * DEEP, f"is nested deeper than {MAX_DEPTH} levels"),
    "deep objects": ('{"a":' * DEEP + "1" + "}" * DEEP, f"nested deeper than {MAX_DEPTH} levels"),
    "a little too deep": ("[" * 101 + "]" * 101, "nested deeper than 100 levels"),
    "NaN": ('{"eps": NaN}', "has NaN where a finite number belongs"),
    "Infinity": ('{"eps": -Infinity}', "has -Infinity where a finite number belongs"),
    "overflow": ('{"eps": 1e999}', "has 1e999 where a finite number belongs"),
    "digits": ('{"n": 1' + "0" * 5000 + "}", "has a number of 5001 digits"),
    "twice": ('{"b": {"a": 1, "c": 2, "a": 3}}', "has keys twice in one object: 'a'"),
    "a list": ("[]", "is a list, not an object"),
    "null": ("null", "is null, not an object"),
    "missing": ('{"b": 1, "a": 2}', "does not say layers; it has a, b"),
}


@pytest.mark.parametrize("text, message", REFUSED.values(), ids=REFUSED)
def test_untrusted_json_is_refused_in_a_sentence_that_names_the_file(file, text, message):
    path = file(text)
    with pytest.raises(ValueError) as raised:
        read_json(path, "layers")
    said = str(raised.value)
    assert message in said and said.startswith(str(path)), said
    assert len(said) < len(str(path)) + 120 and "\n" not in said


def test_as_deep_as_is_allowed():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, where="a file")
    assert parse_json('{"a": [1]}' + " " * 5, where="a file")


def test_a_field_has_the_type_that_belongs_there():
    found = parse_object('{"n": 3, "x": 0.5, "yes": true, "map": [], "no": null}', where="a.json")
    assert field(found, "n", int, where="a.json") == 3
    assert type(field(found, "n", float, where="a.json")) is float
    wrong = {
        ("map", dict): "a.json: map is a list, not an object",
        ("yes", int): "a.json: yes is a truth value, not a whole number",
        ("x", int): "a.json: x is a number, not a whole number",
        ("no", str): "a.json: no is null, not a string",
        ("gone", str): "a.json does not say gone; it has map, n, no, x, yes",
    }
    for (name, kind), message in wrong.items():
        with pytest.raises(ValueError, match=message.replace(".", "[.]")):
            field(found, name, kind, where="a.json")
