import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import data
from jaxformer.data import Document, StandardLibrary, TextFiles


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def named(count):
    return [Document(f"{i}.txt", f"text {i}\n") for i in range(count)]


def test_standard_library_is_megabytes_of_source_on_this_machine():
    found = data.documents(StandardLibrary())
    assert len(found) > 500
    assert sum(len(text.encode()) for _, text in found) > 8_000_000
    names = [name for name, _ in found]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"ast.py", "json/decoder.py"} < set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    root = Path(sysconfig.get_path("stdlib"))
    assert dict(found)["ast.py"].encode() == (root / "ast.py").read_bytes()

    parts = data.split(found)
    share = sum(len(d.text) for d in parts.held_out) / sum(len(d.text) for d in found)
    assert 0.03 < share < 0.08
    assert 1.7 < data.gzip_bits_per_byte(parts.held_out) < 2.2


def test_standard_library_prints_its_version_and_licence():
    version = ".".join(map(str, sys.version_info[:3]))
    assert str(StandardLibrary()) == f"Python {version} standard library (licence PSF-2.0)"
    assert str(TextFiles(path="a/b")) == "a/b"


def test_a_standard_library_without_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="no text: 0 files to read, 0 documents, all empty"):
        data.documents(StandardLibrary())


def test_a_folder_is_read_in_order_of_relative_names(tmp_path):
    files = {
        "b.txt": "b",
        "a/z.md": "z",
        "a.txt": "a",
        "a/deep/er/c.py": "c",
        "image.png": b"\xff",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "empty.txt": "",
    }
    write(tmp_path, files)
    found = data.documents(TextFiles(path=str(tmp_path)))
    assert found == [("a.txt", "a"), ("a/deep/er/c.py", "c"), ("a/z.md", "z"), ("b.txt", "b")]
    found = data.documents(TextFiles(path=str(tmp_path), suffixes=(".md",)))
    assert found == [("a/z.md", "z")]


def test_one_file_of_any_name_is_one_document_with_its_line_ends(tmp_path):
    write(tmp_path, {"notes.anything": "a\r\nb\rc\n\ufeff\u2028"})
    found = data.documents(TextFiles(path=str(tmp_path / "notes.anything")))
    assert found == [("notes.anything", "a\r\nb\rc\n\ufeff\u2028")]


def test_each_line_of_jsonl_is_a_document(tmp_path):
    lines = ['{"body": "eins\\n\u2028 zwei"}', "", '{"body": ""}', '{"other": 1, "body": "drei"}']
    write(tmp_path, {"a/x.jsonl": "\r\n".join(lines) + "\n"})
    expected = [("a/x.jsonl:1", "eins\n\u2028 zwei"), ("a/x.jsonl:4", "drei")]
    assert data.documents(TextFiles(path=str(tmp_path), field="body")) == expected
    one = data.documents(TextFiles(path=str(tmp_path / "a/x.jsonl"), field="body"))
    assert one == [("x.jsonl:1", "eins\n\u2028 zwei"), ("x.jsonl:4", "drei")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"body": "b", "id": 3}'], r"no field 'text'; it has \['body', 'id'\]"),
        (['{"text": "a"}', "{oops}"], "is not JSON: Expecting property name.* at column 2"),
        (['{"text": "a"}', "[1]"], "is a list, not an object"),
        (['{"text": "a"}', '{"text": 5}'], "field 'text' is a int, not text"),
        (['{"text": "a"}', '{"text": "b\\ud800"}'], r"'\\ud800', at character 1"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path, lines, message):
    write(tmp_path, {"x.jsonl": "\n".join(lines)})
    with pytest.raises(ValueError, match=rf"x\.jsonl line 2.*{message}"):
        data.documents(TextFiles(path=str(tmp_path)))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    write(tmp_path, {"bad.txt": b"abc\xe4d"})
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8: byte 0xe4 at offset 3 of 5\."):
        data.documents(TextFiles(path=str(tmp_path)))


def test_a_missing_or_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        data.documents(TextFiles(path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="no text: 0 files to read, 0 documents, all empty"):
        data.documents(TextFiles(path=str(tmp_path)))
    write(tmp_path, {"a.txt": "", "b.jsonl": '{"text": ""}\n{"text": ""}'})
    with pytest.raises(ValueError, match="no text: 2 files to read, 3 documents, all empty"):
        data.documents(TextFiles(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"a\.txt has no text: 1 files to read, 1 documents"):
        data.documents(TextFiles(path=str(tmp_path / "a.txt")))


@given(names=st.sets(st.text(max_size=8), min_size=60, max_size=90), share=st.floats(0.2, 0.8))
@settings(max_examples=20, deadline=None)
def test_a_split_is_disjoint_whole_and_in_order(names, share):
    documents = [Document(name, "x") for name in names]
    train, held_out = data.split(documents, held_out=share)
    assert set(train) | set(held_out) == set(documents)
    assert not set(train) & set(held_out)
    assert train == [d for d in documents if d in set(train)]
    assert held_out == [d for d in documents if d in set(held_out)]


def test_a_split_moves_no_document_when_others_come_or_go():
    documents = named(200)
    before = data.split(documents)
    more = [Document("new.txt", "new"), *documents, Document("newer.txt", "newer")]
    after = data.split(random.Random(0).sample(more, len(more)))
    assert set(before.held_out) <= set(after.held_out) and set(before.train) <= set(after.train)
    fewer = data.split(documents[:150])
    assert set(fewer.held_out) == set(before.held_out) & set(documents[:150])


def test_a_larger_share_holds_out_the_same_documents_and_more():
    small, large = data.split(named(2000), held_out=0.05), data.split(named(2000), held_out=0.3)
    assert set(small.held_out) < set(large.held_out)
    assert 70 < len(small.held_out) < 130
    assert 540 < len(large.held_out) < 660


def test_a_split_is_known_by_value():
    """Every result on the built-in corpus rests on it. ``md5sum`` of these names begins so."""
    names = {"0.txt": "008f", "32.txt": "0fab", "49.txt": "0430"}
    assert all(int(digest, 16) / 16**4 < 0.1 for digest in names.values())
    assert [d.name for d in data.split(named(60), held_out=0.1).held_out] == list(names)


def test_a_single_document_is_cut_after_the_line_that_reaches_the_share():
    text = "".join(f"line {i}\n" for i in range(10))
    (train,), (held_out,) = data.split([Document("a.txt", text)], held_out=0.25)
    assert train == ("a.txt[:56]", text[:56]) and held_out == ("a.txt[56:]", text[56:])
    assert train.text.endswith("line 7\n") and held_out.text.startswith("line 8")


@pytest.mark.parametrize(("text", "at"), [("abcdefgh", 6), ("abcdefg\n", 6), ("\n" * 8, 6)])
def test_a_single_document_without_lines_is_cut_where_the_share_is_reached(text, at):
    (train,), (held_out,) = data.split([Document("a", text)], held_out=0.25)
    assert (train.text, held_out.text) == (text[:at], text[at:])


@given(text=st.text(min_size=2), share=st.floats(0.01, 0.49))
@settings(max_examples=20, deadline=None)
def test_a_cut_document_is_whole(text, share):
    try:
        (train,), (held_out,) = data.split([Document("a", text)], held_out=share)
    except ValueError:
        assert len(text) * share < 1.001
    else:
        assert train.text + held_out.text == text
        assert len(train.text) >= len(text) * (1 - share)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=f"held_out must lie between 0 and 1; got {share}"):
        data.split(named(3), held_out=share)


def test_a_split_with_an_empty_part_is_refused():
    with pytest.raises(ValueError, match="held_out=0.001 of 9 documents leaves 9 .* and 0 held"):
        data.split(named(9), held_out=0.001)
    with pytest.raises(ValueError, match="held_out=0.999 of 9 documents leaves 0 .* and 9 held"):
        data.split(named(9), held_out=0.999)
    with pytest.raises(ValueError, match="of 0 documents leaves 0 to train on and 0 held out"):
        data.split([])
    with pytest.raises(ValueError, match="a has 1 characters; held_out=0.5 leaves a part empty"):
        data.split([Document("a", "x")], held_out=0.5)
    with pytest.raises(ValueError, match="3 documents have 2 names"):
        data.split([Document("a", "x"), Document("b", "x"), Document("a", "y")])


def test_gzip_bits_per_byte_is_that_of_the_joined_text():
    documents = [Document("a", "ä" * 500), Document("b", "b" * 300)]
    size = len(gzip.compress(("ä" * 500 + "b" * 300).encode(), 9))
    assert data.gzip_bits_per_byte(documents) == 8 * size / 1300
    noise = random.Random(0).randbytes(20_000).hex()
    assert 4.0 < data.gzip_bits_per_byte([Document("n", noise)]) < 4.7
    with pytest.raises(ValueError, match="1 documents have 0 bytes of text"):
        data.gzip_bits_per_byte([Document("a", "")])


def test_corpus_and_split_are_the_same_in_every_process(tmp_path):
    write(tmp_path, {f"{i % 7}/{i}.txt": f"text {i}" for i in range(60)})
    script = (
        "import sys, json; from jaxformer import data\n"
        "found = data.documents(data.TextFiles(path=sys.argv[1]))\n"
        "print(json.dumps([found, *data.split(found, held_out=0.3)]))"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(data.__file__).parents[2],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert seen[0] == seen[1]
    assert [len(part) for part in json.loads(seen[0])][0] == 60
