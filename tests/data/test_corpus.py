import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from jaxformer import data
from jaxformer.data import Document, StandardLibrary, TextFiles, splits


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read(corpus):
    return list(data.documents(corpus))


def split(documents, **share):
    return data.Split(*map(list, data.split(documents, **share)))


def named(count):
    return [Document(f"{i}.txt", f"text {i}\n") for i in range(count)]


def test_standard_library_is_megabytes_of_source_on_this_machine():
    documents = read(StandardLibrary())
    assert len(documents) > 500
    assert sum(len(text.encode()) for _, text in documents) > 8_000_000
    names = [name for name, _ in documents]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"ast.py", "json/decoder.py"} < set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    root = Path(sysconfig.get_path("stdlib"))
    assert dict(documents)["ast.py"].encode() == (root / "ast.py").read_bytes()

    parts = split(documents)
    share = sum(len(d.text) for d in parts.held_out) / sum(len(d.text) for d in documents)
    assert abs(share - 0.05) < 1e-4
    assert 1.7 < data.gzip_bits_per_byte(parts.held_out) < 2.2


def test_standard_library_prints_its_version_and_licence():
    version = ".".join(map(str, sys.version_info[:3]))
    assert str(StandardLibrary()) == f"Python {version} standard library (licence PSF-2.0)"
    assert str(TextFiles(path="a/b")) == "a/b"


def test_a_standard_library_without_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no text: no file in it .* the suffix \.py\."):
        read(StandardLibrary())


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
    actual = read(TextFiles(path=str(tmp_path)))
    assert actual == [("a.txt", "a"), ("a/deep/er/c.py", "c"), ("a/z.md", "z"), ("b.txt", "b")]
    actual = read(TextFiles(path=str(tmp_path), suffixes=(".md",)))
    assert actual == [("a/z.md", "z")]


def test_one_file_of_any_name_is_one_document_with_its_line_ends(tmp_path):
    write(tmp_path, {"notes.anything": "a\r\nb\rc\n\ufeff\u2028"})
    actual = read(TextFiles(path=str(tmp_path / "notes.anything")))
    assert actual == [("notes.anything", "a\r\nb\rc\n\ufeff\u2028")]


def test_each_line_of_jsonl_is_a_document(tmp_path):
    lines = ['{"body": "eins\\n\u2028 zwei"}', "", '{"body": ""}', '{"other": 1, "body": "drei"}']
    write(tmp_path, {"a/x.jsonl": "\r\n".join(lines) + "\n"})
    expected = [("a/x.jsonl:1", "eins\n\u2028 zwei"), ("a/x.jsonl:4", "drei")]
    assert read(TextFiles(path=str(tmp_path), field="body")) == expected
    documents = read(TextFiles(path=str(tmp_path / "a/x.jsonl"), field="body"))
    assert documents == [("x.jsonl:1", "eins\n\u2028 zwei"), ("x.jsonl:4", "drei")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"body": "b", "id": 3}'], "has no field 'text'; it has body, id"),
        (
            ['{"text": "a"}', '{"prompt": "b", "answer": "c"}'],
            r"it has prompt, answer\. Prompts and answers are read by 'Instr",
        ),
        (['{"text": "a"}', '{"conversations": []}'], r"it has conversations\. Prompts and answers"),
        (['{"text": "a"}', '{"text": null}'], "field 'text' is null; remove the record"),
        (['{"text": "a"}', "[" * 100_000], "is nested too deeply"),
        (['{"text": "a"}', "{oops}"], "is not JSON: Expecting property name.* column 2"),
        (['{"text": "a"}', "[1]"], "is a list, not an object"),
        (['{"text": "a"}', '{"text": 5}'], "field 'text' must be a string; got a int"),
        (['{"text": "a"}', '{"text": "b\\ud800"}'], r"'\\ud800', at character 1"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path, lines, message):
    write(tmp_path, {"x.jsonl": "\n".join(lines)})
    with pytest.raises(ValueError, match=rf"x\.jsonl line 2.*{message}"):
        read(TextFiles(path=str(tmp_path)))


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    write(tmp_path, {"bad.txt": b"a\nc\xe4d"})
    message = r"bad\.txt is not UTF-8: byte 0xe4 at offset 3 of 5, in line 2\. Convert it .*iconv"
    with pytest.raises(ValueError, match=message):
        read(TextFiles(path=str(tmp_path)))


def test_a_missing_or_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^/dev/null is neither a file nor a folder; write the"):
        data.documents(TextFiles(path="/dev/null"))
    with pytest.raises(ValueError, match=f"^{tmp_path} is a folder; pass a file in it"):
        data.lines(tmp_path, field="text")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read(TextFiles(path=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"no file in it .* the suffix \.txt or \.md or"):
        read(TextFiles(path=str(tmp_path)))
    write(tmp_path, {"a.txt": "", "b.jsonl": '{"text": ""}\n{"text": ""}'})
    with pytest.raises(ValueError, match="no text: all 3 documents in 2 files are empty"):
        read(TextFiles(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"a\.txt has no text: all 1 documents in 1 files"):
        read(TextFiles(path=str(tmp_path / "a.txt")))


@given(
    texts=st.dictionaries(st.text(max_size=8), st.text("aé→🙂\n", max_size=40), min_size=1),
    share=st.floats(0.01, 0.99),
)
@settings(max_examples=60, deadline=None)
def test_a_split_holds_out_the_share_to_the_character(texts, share):
    documents = [Document(name, text) for name, text in texts.items()]
    total = sum(len(text.encode()) for text in texts.values())
    try:
        train, held_out = split(documents, held_out=share)
    except ValueError:
        # Without the bytes that a cut may not part, one side has nothing.
        assert round(share * total) == 0 or total - round(share * total) <= 3
        return
    size = sum(len(document.text.encode()) for document in held_out)
    assert 0 <= size - round(share * total) <= 3
    assert size + sum(len(document.text.encode()) for document in train) == total


def test_a_split_parts_no_text_twice_and_keeps_the_order():
    documents = named(60)
    train, held_out = split(documents, held_out=0.3)
    halves = [d for part in (train, held_out) for d in part if d not in documents]
    assert len(halves) == 2 and halves[0].name.endswith("]") and halves[1].name.endswith(":]")
    before = halves[0].name.split("[")[0]
    (cut,) = [d for d in documents if d.name == before]
    assert halves[0].text + halves[1].text == cut.text
    assert set(train + held_out) - set(halves) == set(documents) - {cut}
    for part in (train, held_out):
        whole = [d for d in part if d in documents]
        assert whole == [d for d in documents if d in whole]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_few_books_leave_the_share_asked_for(count):
    """Unlike books: placed by a digest of their names alone, five left none and three two."""
    books = [
        Document(f"book {i}.txt", "A line of a book.\n" * (1000 + 700 * i)) for i in range(count)
    ]
    total = sum(len(book.text) for book in books)
    train, held_out = split(books, held_out=0.05)
    assert sum(len(part.text) for part in held_out) == round(0.05 * total)
    assert sum(len(part.text) for part in train) == total - round(0.05 * total)


def test_a_split_does_not_depend_on_the_order_of_the_list():
    documents = named(200)
    before = split(documents, held_out=0.13)
    after = split(random.Random(0).sample(documents, 200), held_out=0.13)
    assert [set(part) for part in after] == [set(part) for part in before]


def test_a_larger_share_holds_out_the_same_text_and_more():
    small, large = (split(named(2000), held_out=share) for share in (0.05, 0.3))
    whole = {d for d in small.held_out if not d.name.endswith(":]")}
    assert len(whole) >= len(small.held_out) - 1 and whole < set(large.held_out)


def test_a_split_is_known_by_value():
    """Every result on the built-in corpus rests on it. ``md5sum`` of these names begins so."""
    digests = {"0.txt": "008f", "32.txt": "0fab", "49.txt": "0430"}
    assert sorted(digests, key=digests.get) == ["0.txt", "49.txt", "32.txt"]
    documents = [Document(f"{i}.txt", "twenty bytes of text") for i in range(60)]
    actual = split(documents, held_out=50 / 1200).held_out
    assert actual == [
        ("0.txt", "twenty bytes of text"),
        ("32.txt[10:]", "es of text"),
        ("49.txt", "twenty bytes of text"),
    ]


def test_one_book_is_split_inside():
    text = "".join(f"line {i}\n" for i in range(10))
    (train,), (held_out,) = split([Document("a.txt", text)], held_out=0.25)
    assert train == ("a.txt[:52]", text[:52]) and held_out == ("a.txt[52:]", text[52:])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=f"held_out must lie between 0 and 1; got {share}"):
        split(named(3), held_out=share)


def test_no_more_is_held_out_than_the_limit():
    documents = named(100)
    whole = split(documents, held_out=0.3)
    assert split(documents, held_out=0.3, max_bytes=10**6) == whole
    limited = split(documents, held_out=0.3, max_bytes=100)
    assert sum(len(d.text.encode()) for d in limited.held_out) == 100
    sizes = [sum(len(d.text) for d in part) for part in (*limited, documents)]
    assert sizes[0] + sizes[1] == sizes[2]
    names = [{d.name.partition("[")[0] for d in part.held_out} for part in (limited, whole)]
    assert names[0] < names[1]  # the first of them


def test_a_split_with_an_empty_part_is_refused():
    error = (
        "held_out=0.001 of 9 documents with 63 bytes leaves 63 bytes for training and 0 held out"
    )
    with pytest.raises(ValueError, match=error):
        data.split(named(9), held_out=0.001)  # before a part is read
    with pytest.raises(ValueError, match="leaves 0 bytes for training and 63 held out"):
        split(named(9), held_out=0.999)
    with pytest.raises(ValueError, match="of 0 documents with 0 bytes leaves 0 bytes"):
        split([])
    with pytest.raises(ValueError, match="of 1 documents with 4 bytes leaves 0 bytes for train"):
        split([Document("a", "🙂")], held_out=0.5)
    with pytest.raises(ValueError, match="3 documents have 2 distinct names"):
        split([Document("a", "x"), Document("b", "x"), Document("a", "y")])


def test_a_folder_that_cannot_be_read_is_no_smaller_corpus(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "a", "closed/b.txt": "b"})
    scandir = os.scandir

    def closed(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="closed"):
        read(TextFiles(path=str(tmp_path)))


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path, {"a/b.txt": "b"})
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    assert read(TextFiles(path=str(tmp_path))) == [("a/b.txt", "b")]


def test_a_byte_order_mark_before_jsonl_is_no_text(tmp_path):
    write(tmp_path, {"x.jsonl": '\ufeff{"text": "a"}'})
    assert read(TextFiles(path=str(tmp_path))) == [("x.jsonl:1", "a")]


@pytest.mark.parametrize("sizes", [[1] * 4000, [40, 3000, 7, 900], [100_000]])
@pytest.mark.parametrize("num_bytes", [100, 1000, 2500])
def test_a_sample_is_drawn_from_all_of_a_text(sizes, num_bytes):
    """Of documents of any size; at most as many bytes, and not many fewer."""
    text = "".join(f"{n:05}" for n in range(sum(sizes) // 5 + 1))
    documents, end = [], 0
    for n, size in enumerate(sizes):
        documents.append(Document(f"{n}", text[end : end + size]))
        end += size
    corpus = data.Documents(lambda: iter(documents))
    (parts,) = ([*splits.sample_texts([corpus], num_bytes)],)
    assert parts == [*splits.sample_texts([corpus, data.Documents(lambda: iter(()))], num_bytes)]
    assert 0.5 * num_bytes < len("".join(parts)) <= num_bytes
    places = [text.index(part) for part in parts if len(part) > 8]
    assert places == sorted(places) and (not places or places[-1] - places[0] > end / 2)


def test_a_small_text_is_sampled_whole():
    documents = [Document("a", "text"), Document("b", "\u00e9"), Document("c", "x" * 50)]
    corpus = data.Documents(lambda: iter(documents))
    assert [*splits.sample_texts([corpus, corpus], 112)] == [d.text for d in documents] * 2
    assert len([*splits.sample_texts([corpus, corpus], 111)]) != 6


def test_gzip_bits_per_byte_is_that_of_the_joined_text():
    documents = [Document("a", "ä" * 500), Document("b", "b" * 300)]
    size = len(gzip.compress(("ä" * 500 + "b" * 300).encode(), 9))
    assert data.gzip_bits_per_byte(documents) == 8 * size / 1300
    noise = random.Random(0).randbytes(20_000).hex()
    assert 4.0 < data.gzip_bits_per_byte([Document("n", noise)]) < 4.7
    with pytest.raises(ValueError, match="The documents have no text"):
        data.gzip_bits_per_byte([Document("a", "")])


@pytest.mark.slow
def test_corpus_and_split_are_the_same_in_every_process(tmp_path):
    write(tmp_path, {f"{i % 7}/{i}.txt": f"text {i}" for i in range(60)})
    script = (
        "import sys, json; from jaxformer import data\n"
        "found = [*data.documents(data.TextFiles(path=sys.argv[1]))]\n"
        "print(json.dumps([found, *map(list, data.split(found, held_out=0.3))]))"
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


def test_what_is_packed_is_read_as_what_it_holds(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"drei"))
    (tmp_path / "c.bin.gz").write_bytes(gzip.compress(b"not read"))
    actual = read(data.TextFiles(path=str(tmp_path)))
    assert actual == [("a.jsonl.gz:1", "one"), ("a.jsonl.gz:2", "two"), ("b.txt.gz", "drei")]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"drei")[:-9])
    with pytest.raises(ValueError, match=r"b\.txt\.gz cannot be decompressed: "):
        read(data.TextFiles(path=str(tmp_path / "b.txt.gz")))


ROWS = [{"text": f"row {i}", "number": i} for i in range(2500)]


def write_table(path, rows=ROWS):
    """As their makers write them: Parquet, a stream of Arrow, or Arrow with an index."""
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        return parquet.write_table(table, path, row_group_size=700)
    new = pyarrow.ipc.new_stream if path.name.startswith("data") else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


@pytest.mark.parametrize("name", ["x.parquet", "data-0.arrow", "index.arrow", "x.jsonl.zst"])
def test_rows_of_tables_are_documents(tmp_path, name):
    if name.endswith(".zst"):
        lines = "".join(json.dumps(row) + "\n" for row in ROWS)
        with pyarrow.output_stream(tmp_path / name, compression="zstd") as file:
            file.write(lines.encode())
    else:
        write_table(tmp_path / name)
    expected = [(f"{name}:{i}", row["text"]) for i, row in enumerate(ROWS, start=1)]
    assert read(TextFiles(path=str(tmp_path))) == expected
    with pytest.raises(
        ValueError, match=rf"{name} (row|line) 1 has no field 'body'; it has text, n"
    ):
        read(TextFiles(path=str(tmp_path), field="body"))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{name} cannot be (read|decompressed): "):
        read(TextFiles(path=str(tmp_path)))


def test_a_table_is_never_whole_in_memory(tmp_path):
    """Arrow's own allocations while 14 MB in 20 groups of rows are read."""
    rng, path = random.Random(0), tmp_path / "x.parquet"
    write_table(path, [{"text": rng.randbytes(500).hex()} for _ in range(14_000)])
    before, peak = pyarrow.total_allocated_bytes(), 0
    for _ in data.documents(TextFiles(path=str(path))):
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert path.stat().st_size > 14e6 and peak < path.stat().st_size / 3


def test_conversations_stand_in_tables_too(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    write_table(tmp_path / "x.parquet", [{"messages": talk}, {"messages": talk[:2]}])
    template = data.ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}", {})
    corpus = data.Instructions(path=str(tmp_path))
    assert [d.text for d in data.documents(corpus, template=template)] == ["Hi;Yes;"] * 2


def test_a_dataset_that_was_saved_is_read_by_its_split(tmp_path):
    """The folder as `Dataset.save_to_disk` and `DatasetDict.save_to_disk` of datasets lay it."""
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "data-00000-of-00001.arrow", ROWS[:9])
        (tmp_path / name / "state.json").write_text("{}")
    write_table(tmp_path / "train" / "cache-0123.arrow", ROWS[:2])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(read(TextFiles(path=str(tmp_path / "train")))) == 9
    with pytest.raises(ValueError, match="has the dataset splits test, train; pass the"):
        read(TextFiles(path=str(tmp_path)))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_table(tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxformer\[data\]'"):
        read(TextFiles(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ((), None, r"parts must have at least one entry; got \(\)"),
        ((StandardLibrary(),), (1.0, 2.0), "each of the 1 parts; got 2"),
        (
            (StandardLibrary(),) * 2,
            (1.0, 0.0),
            r"weights\[1\] must be positive; got 0\.0\. To leave out",
        ),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused(parts, weights, message):
    with pytest.raises(ValueError, match=message):
        data.Mixture(parts=parts, weights=weights)


TEXTS = ["one", "", "\u2028 \x85\x0c\x0b\x1c", " ", "a\rb", ""]


@pytest.mark.parametrize(
    "name, content",
    [
        ("x.txt", "\n".join([*TEXTS, ""])),
        ("x.md", "\r\n".join([*TEXTS, ""])),
        ("x.txt", "\n".join([*TEXTS[:-1], "end"])),
        ("x.jsonl", "\n".join(json.dumps({"prompt": text}) for text in TEXTS)),
        ("x.jsonl", "\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in TEXTS)),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_lines_end_in_a_newline_and_nothing_else(name, content, packed, tmp_path):
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    lines = data.lines(path, field="prompt")
    assert [text for text, _ in lines] == [*TEXTS[:-1], "end" if content[-3:] == "end" else ""]
    assert [where for _, where in lines] == [f"{path} line {i}" for i in range(1, 7)]


def test_rows_of_a_table_are_lines(tmp_path):
    parquet.write_table(pyarrow.table({"prompt": ["one", ""]}), tmp_path / "x.parquet")
    actual = data.lines(tmp_path / "x.parquet", field="prompt")
    assert actual == [(text, f"{tmp_path}/x.parquet row {i}") for i, text in ((1, "one"), (2, ""))]
