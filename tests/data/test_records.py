"""What a file is follows from what it holds: from its bytes, and then from its name."""

import codecs
import gzip
import json

import pyarrow
import pytest
from pyarrow import parquet

from jaxformer import data
from jaxformer.data import Instructions, TextFiles

BOM = codecs.BOM_UTF8
TEXTS = ["a\u2028b\x85c\x0cd", "é"]
ROWS = [{"text": text} for text in TEXTS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ROLES = data.ChatTemplate(
    "{% for m in messages %}<{{ m.role }}{% if 'name' in m %} {{ m.name }}{% endif %}>"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)


def texts(path, **corpus):
    return [document.text for document in data.documents(TextFiles(path=str(path), **corpus))]


def table(rows, kind="parquet"):
    columns, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(columns, sink)
    else:
        with getattr(pyarrow.ipc, f"new_{kind}")(sink, columns.schema) as writer:
            writer.write_table(columns)
    return sink.getvalue().to_pybytes()


FILES = {
    "x.jsonl": LINES,
    "x.ndjson": LINES,
    "x.jl": LINES,
    "x.json": LINES,
    "X.JSONL": LINES,
    "X.NDJSON.GZ": gzip.compress(LINES),
    "unpacked already.jsonl.gz": LINES,
    "packed.jsonl": gzip.compress(LINES),
    "part-00000": LINES,
    "x.txt": LINES,
    "marked.jsonl": BOM + b"\n" + LINES,
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "marked array.json": BOM + b"\n" + json.dumps(ROWS).encode(),
    "rows.bin": table(ROWS),
    "rows.PARQUET": table(ROWS),
    "rows.parquet.gz": gzip.compress(table(ROWS)),
    "stream.bin": table(ROWS, "stream"),
    "stream.parquet": table(ROWS, "stream"),
    "index.bin": table(ROWS, "file"),
}


@pytest.mark.parametrize("name", FILES)
def test_records_are_documents_by_whatever_name(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    assert texts(tmp_path / name) == TEXTS


def test_a_text_that_begins_with_another_object_or_a_bracket_is_a_text(tmp_path):
    for text in ('{"title": "text"}\nA tale.\n', "[a link]\n", '{"text": 1', ""):
        (tmp_path / "x.md").write_text(text + "end")
        assert texts(tmp_path / "x.md") == [text + "end"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(BOM + "a\ufeff".encode())
    assert texts(tmp_path / "x.txt") == ["a\ufeff"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "né".encode("utf-16"), "x.txt is not UTF-8: byte 0xff at offset 0 .*-f UTF-16"),
        ("x.txt", b"a\nb\0", "x.txt is not text: byte 0x00 at offset 3 of 4, in line 2"),
        ("x.csv", b"text\na\n", r"x.csv is a table; .csv and .tsv files are not supported"),
        (
            "x.tsv.gz",
            gzip.compress(b"text\n", mtime=0),
            r"x.tsv.gz is a table; .csv and .tsv files are not",
        ),
        ("x.jsonl", "{}".encode("utf-16"), "x.jsonl line 1 is not JSON: .*byte 0xff"),
        ("x.json", b'{\n "text": "a"\n}\n', "x.json line 1 is not JSON"),
        ("x.json", b'[{"text": "a"}, 5]', "x.json entry 2 is an integer, not an object"),
        ("x.json", b'[{"text": "a"}, {"a": 1}]', "x.json entry 2 has no field 'text'; it has a"),
        ("x.json", b'[{"text": "a"}', "x.json is not JSON: .*column 15"),
        ("x.parquet", LINES, "x.parquet cannot be read: "),
        ("x.arrow", LINES, "x.arrow cannot be read: "),
    ],
)
def test_what_is_no_text_and_no_record_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(tmp_path / name)


def test_bytes_of_a_table_that_are_no_text_are_named_by_their_row(tmp_path):
    column = pyarrow.array([b"a", b"b", b"\xff", b"c"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"x\.parquet row 3 is not UTF-8: .* byte 0xff"):
        texts(tmp_path / "x.parquet")


@pytest.mark.parametrize("where", ["prompt", "messages"])
def test_half_a_surrogate_pair_in_an_instruction_is_named_by_its_line(where, tmp_path):
    bad = "b \ud83d"
    talk = [{"role": "user", "content": bad}, {"role": "assistant", "content": "c"}]
    lines = [
        {"prompt": "a", "answer": "b", "unread": bad},
        {"prompt": bad, "answer": "b"} if where == "prompt" else {"messages": talk},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = rf"x\.jsonl line 2: field '{where}' has an unpaired surrogate, '\\ud83d', at char.* 2"
    with pytest.raises(ValueError, match=message):
        list(data.documents(Instructions(path=str(tmp_path)), template=ROLES))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.arrow"])
def test_null_is_absent(name, tmp_path):
    """Tables fill with null what a row, or a message in it, lacks."""
    talk = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": talk, "prompt": None, "answer": None},
        {"messages": None, "prompt": "q", "answer": "r"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kinds = {"x.jsonl": lines, "x.parquet": table(rows), "x.arrow": table(rows, "stream")}
    (tmp_path / name).write_bytes(kinds[name])
    documents = data.documents(Instructions(path=str(tmp_path)), template=ROLES)
    assert [x.text for x in documents] == ["<user Ann>a<assistant>b", "<user>q<assistant>r"]


def test_a_message_whose_content_is_null_has_none(tmp_path):
    """As one that calls tools; transformers leaves null out of messages too."""
    turns = [("user", "a"), ("assistant", None), ("tool", "b"), ("assistant", "c")]
    talk = [{"role": role, "content": content} for role, content in turns]
    talk[1]["tool_calls"] = [{"name": "f"}]
    (tmp_path / "x.parquet").write_bytes(table([{"messages": talk}]))
    (document,) = data.documents(Instructions(path=str(tmp_path)), template=ROLES)
    assert document.text == "<user>a<assistant><tool>b<assistant>c"
