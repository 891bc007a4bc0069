"""Corpora that are tokenized once, in parts, and read in rows of any length."""

import itertools
import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxformer import data
from jaxformer.data import tokenization
from jaxformer.data.__main__ import main
from jaxformer.data.token_files import describe_token_file

WORDS = [f"{n}: the quick brown fox\u00e9 jumps {n * n} times\n" * (1 + n % 5) for n in range(60)]
TRAINED = "BPE(vocab_size=280)"


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (json.dumps({"text": text}) + "\n" for text in WORDS)
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    return tmp_path


def tokenize(*flags, corpus="texts.jsonl", tokenizer=TRAINED, output="tokens"):
    main([corpus, "--tokenizer", tokenizer, "--output", output, *flags])


def opened_source(tokenizer=None, path="tokens", **options):
    tokenizer = tokenizer or data.load_tokenizer(path)
    return data.Corpus(
        data.Packed(path=str(path)), tokenizer=tokenizer, folder=Path("cache"), **options
    )


def opened(row_length, tokenizer=None, path="tokens", **options):
    source = opened_source(tokenizer, path, **options)
    tokenizer = tokenizer or data.load_tokenizer(path)
    return [source.pack(part, tokenizer, row_length=row_length) for part in ("train", "held_out")]


@pytest.mark.parametrize("row_length", [1, 7, 64, 10_000])
def test_rows_are_those_of_the_documents(texts, row_length):
    """Of the first documents and of the last ones, in rows of a length that is chosen later."""
    tokenize()
    tokenizer = data.load_tokenizer("tokens")
    documents = [*data.documents(data.TextFiles(path="texts.jsonl"))]
    train, held_out = opened(row_length, held_out=0.3)
    for rows, part in (
        (train, documents[: train.num_documents]),
        (held_out, documents[train.num_documents :]),
    ):
        expected = data.pack(part, tokenizer, row_length=row_length, folder=texts / "cache")
        names = ("num_documents", "num_bytes", "num_targets", "epoch", "end_of_text")
        assert [getattr(rows, n) for n in names] == [getattr(expected, n) for n in names]
        for x, y in zip(rows[:], expected[:], strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(
            rows.loss_mask_at(slice(None)), expected.loss_mask_at(slice(None))
        )
    share = held_out.num_targets / (train.num_targets + held_out.num_targets)
    assert 0.25 < share <= 0.3 and train.digest != held_out.digest


@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_are_one_corpus(count):
    for number in reversed(range(1, count + 1)):
        tokenize("--part", f"{number}/{count}")
    source = opened_source(held_out=0.2)
    held_out = [document.text for document in source.documents("held_out")]
    train = [document.text for document in source.documents("train")]
    order = [i for part in range(count) for i in range(part, len(WORDS), count)]
    assert train + held_out == [WORDS[i] for i in order]
    rows = opened(16, held_out=0.2)
    assert [r.num_documents for r in rows] == [len(train), len(held_out)]
    assert sum(r.num_bytes for r in rows) == len("".join(WORDS).encode())
    tokenizer = data.load_tokenizer("tokens")
    for part, documents in zip(rows, (train, held_out), strict=True):
        masks = part.loss_mask_at(np.arange(len(part)))
        targets = part[np.arange(len(part))].tokens[:, 1:][masks]
        texts = np.split(targets, np.flatnonzero(targets == tokenizer.end_of_text) + 1)
        assert [tokenizer.decode(ids) for ids in texts[:-1]] == documents
    batch = data.Batches(rows[0], batch_size=8, seed=0)[0]
    assert batch.tokens.shape == (8, 16)
    seen = list(data.evaluation_batches(rows[1], batch_size=4))
    assert sum(b.loss_mask.sum() for b in seen) == rows[1].num_targets


def test_no_more_is_held_out_than_the_limit():
    tokenize(tokenizer="ByteLevel()")
    _, held_out = opened(16, held_out=0.5, max_bytes=2000)
    assert 200 < held_out.num_targets <= 500


def test_a_killed_one_goes_on(monkeypatch):
    tokenize()
    expected = data.open_packed("tokens/part-1-of-1").digest
    shutil.rmtree("tokens")
    monkeypatch.setattr(tokenization, "CHARACTERS_PER_PART", 300)
    encode, calls = data.BPETokenizer.encode_batch, itertools.count(1)

    def ending(self, texts):
        if (call := next(calls)) in (3, 5):
            raise KeyboardInterrupt
        seen.append((call, texts))
        return encode(self, texts)

    monkeypatch.setattr(data.BPETokenizer, "encode_batch", ending)
    seen = []
    for _ in range(2):
        with pytest.raises(SystemExit):  # by Ctrl-C
            tokenize()
    tokenize()
    assert [text for _, texts in seen for text in texts] == WORDS  # none of them twice
    assert data.open_packed("tokens/part-1-of-1").digest == expected


def test_what_is_complete_is_left_alone(capsys, monkeypatch):
    tokenize()
    monkeypatch.setattr("jaxformer.data.corpus._read_documents", None)
    capsys.readouterr()
    tokenize()
    assert capsys.readouterr().out.startswith("tokens/part-1-of-1 is complete.")


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(tokenizer="ByteLevel()"), "tokens has another tokenizer; pass another --output"),
        (dict(corpus="other.jsonl"), "tokens has another text and another tokenizer; pass"),
        (dict(corpus="nowhere"), "nowhere does not exist"),
        (dict(tokenizer="BPE(vocab=3)"), "BPE"),
        (dict(tokenizer="nowhere"), "nowhere"),
        (("--part", "2/1"), "--part must be NUMBER/COUNT, .* got '2/1'"),
        (("--part", "0/1"), "counted from 1; got '0/1'"),
        (("--part", "x"), "got 'x'"),
        (("--part", "1/3"), "tokens has another number of parts"),
        (dict(output="new", corpus="one.txt"), "new/part-2-of-2 has no document; use fewer"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(texts, flags, message, capsys):
    (texts / "other.jsonl").write_text((texts / "texts.jsonl").read_text() * 2)
    (texts / "one.txt").write_text("a text " * 99)
    tokenize()
    with pytest.raises(SystemExit) as ended:
        if isinstance(flags, dict):
            tokenize(*(("--part", "2/2") if "output" in flags else ()), **flags)
        else:
            tokenize(*flags)
    assert ended.value.code == 1
    assert re.search(message, capsys.readouterr().err)


def test_parts_that_do_not_fit_are_named():
    for part in ("1/3", "3/3"):
        tokenize("--part", part)
    with pytest.raises(ValueError, match="tokens lacks part-2-of-3; tokenize them first"):
        opened(16)
    tokenize("--part", "2/3")
    shutil.copytree("tokens/part-1-of-3", "tokens/part-1-of-1")
    with pytest.raises(ValueError, match="tokens has parts of 1 and of 3; remove one kind"):
        opened(16)
    shutil.rmtree("tokens/part-1-of-1")
    with pytest.raises(ValueError, match="part-1-of-3 was tokenized by another tokenizer; pass"):
        opened(16, data.ByteTokenizer())
    tokenize("--part", "2/3", tokenizer="ByteLevel()", output="bytes")
    shutil.rmtree("tokens/part-2-of-3")
    shutil.move("bytes/part-2-of-3", "tokens")
    with pytest.raises(ValueError, match="part-2-of-3 was tokenized by another tokenizer; pass"):
        opened(16)
    with pytest.raises(
        ValueError, match=r"empty has no tokenized text: neither parts that jaxformer data"
    ):
        opened_source(data.ByteTokenizer(), "empty")


@pytest.mark.parametrize("held_out, what", [(1e-6, "held out"), (0.99999, "for training")])
def test_a_part_without_a_token_is_refused(held_out, what):
    tokenize()
    with pytest.raises(ValueError, match=rf"of \d+ tokens leaves none {what}; use more"):
        opened(16, held_out=held_out)


def test_one_document_is_cut(texts):
    """With its bytes in proportion to its tokens."""
    (texts / "one.txt").write_text("".join(WORDS))
    tokenize(corpus="one.txt")
    train, held_out = opened(16, held_out=0.25)
    total = len("".join(WORDS).encode())
    assert train.num_bytes + held_out.num_bytes == total
    assert abs(held_out.num_bytes / total - 0.25) < 1e-3
    assert held_out.num_documents == 1 and held_out[0].segments.tolist() == [1] * 16
    source = opened_source(held_out=0.25)
    (first,), (last,) = (list(source.documents(part)) for part in ("train", "held_out"))
    assert "".join(WORDS).startswith(first.text) and "".join(WORDS).endswith(last.text)
    assert 0 <= len(first.text) + len(last.text) - len("".join(WORDS)) < 12  # a token in both


def test_a_run_is_told_that_its_tokens_changed():
    tokenize()
    source = opened_source()
    assert opened_source(recorded=source.record).key == source.key
    shutil.rmtree("tokens")
    tokenize(tokenizer="ByteLevel()")
    message = "tokens is not that of the run: part-1-of-1/metadata.json has changed. Restore it"
    with pytest.raises(ValueError, match=message):
        opened_source(recorded=source.record)


# Files of other programs, written as their own documents say


def stream(*, opens):
    """Tokens of all texts; with an end of text before each (llm.c), or after each (nanoGPT)."""
    ids = [BYTES.encode(text).tolist() for text in WORDS]
    parts = ([END, *x] if opens else [*x, END] for x in ids)
    return list(itertools.chain.from_iterable(parts))


BYTES = data.ByteTokenizer()
END = BYTES.end_of_text


def write_llmc(folder, magic=20240520, version=1, dtype="<u2"):
    for name, ids in zip("ab", np.array_split(stream(opens=True), 2), strict=True):
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        (folder / f"{name}.bin").write_bytes(header.tobytes() + ids.astype(dtype).tobytes())


def write_llama3(folder):
    write_llmc(folder, 20240801, 7, "<u4")


def write_nanogpt(folder):
    np.array(stream(opens=False), np.uint16).tofile(folder / "train.bin")


def write_megatron(folder):
    """Each document is a sequence, with an end of text by --append-eod."""
    lengths = [len(text.encode()) + 1 for text in WORDS]
    np.array(stream(opens=False), "<i4").tofile(folder / "c.bin")
    with open(folder / "c.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(WORDS), len(WORDS) + 1))
        index.write(np.array(lengths, "<i4").tobytes())
        index.write((4 * np.append(0, np.cumsum(lengths)[:-1])).astype("<i8").tobytes())
        index.write(np.arange(len(WORDS) + 1, dtype="<i8").tobytes())


def write_parquet(folder):
    ids = [BYTES.encode(text).tolist() + [END] * (n % 2) for n, text in enumerate(WORDS)]
    parquet.write_table(pyarrow.table({"input_ids": ids, "other": WORDS}), folder / "c.parquet")


WRITERS = [write_llmc, write_llama3, write_nanogpt, write_megatron, write_parquet]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_tokens_of_other_programs_are_read(texts, write):
    folder = texts / "tokens"
    folder.mkdir()
    write(folder)
    rows = opened(16, BYTES, held_out=0.2)
    source = opened_source(BYTES, held_out=0.2)
    documents = [d.text for part in ("train", "held_out") for d in source.documents(part)]
    assert "".join(documents) == "".join(WORDS)
    assert len(documents) - len(WORDS) in (0, 1)  # one may lie in two shards
    assert rows[1].num_bytes == sum(len(d.text.encode()) for d in source.documents("held_out"))
    total = len("".join(WORDS).encode())
    assert abs(sum(part.num_bytes for part in rows) / total - 1) < 0.01
    for part in rows:
        tokens, segments, positions = part[np.arange(len(part))]
        inputs = tokens[:, :-1]
        starts = (inputs == END) & (segments > 0)
        assert (positions[starts] == 0).all() and starts.sum() > 5
        assert (np.diff(segments, axis=1)[starts[:, 1:]] == 1).all()
        assert (np.diff(segments, axis=1)[~starts[:, 1:] & (segments[:, 1:] > 0)] == 0).all()


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8"])
@pytest.mark.parametrize("most", [300, 9000, 100_000])
def test_ids_without_a_header_have_the_width_that_fits_a_vocabulary(texts, dtype, most):
    if most >= 1 << 16 and dtype == "<u2":
        dtype = "<u4"
    ids = np.random.default_rng(0).integers(1, most, 400)
    ids[::20], path = 0, texts / "x.bin"
    ids.astype(dtype).tofile(path)
    expected = np.dtype(dtype).itemsize
    for vocab_size in (most, 2 * most):
        file = describe_token_file(path, vocab_size)
        assert np.dtype(file.dtype).itemsize == expected
        assert np.fromfile(path, file.dtype).tolist() == ids.tolist()
    if most > 1 << 16:  # of another vocabulary: the ids are not halved
        assert np.dtype(describe_token_file(path, 50_000).dtype).itemsize == expected


def test_the_size_is_the_width_of_ids_after_a_header(texts):
    (texts / "tokens").mkdir()
    write_llmc(texts / "tokens", dtype="<u4")
    documents = (
        d.text for part in ("train", "held_out") for d in opened_source(BYTES).documents(part)
    )
    assert "".join(documents) == "".join(WORDS)


class WithBos(data.ByteTokenizer):
    """Bytes, of which 1 is the bos token."""

    bos_token_id = 1


@pytest.mark.parametrize("ends", [False, True])
def test_documents_that_begin_with_a_bos_token_have_one(texts, ends):
    """With and without an end of text after each; batches add no second one."""
    texts_ids = [[1, *BYTES.encode(text).tolist()] + [END] * ends for text in WORDS]
    np.concatenate(texts_ids).astype("<u2").tofile(texts / "x.bin")
    rows, _ = opened(29, WithBos(), "x.bin", held_out=0.2)
    segments = np.concatenate([[n] * len(ids) for n, ids in enumerate(texts_ids)])
    inputs, index = np.concatenate(texts_ids), 0
    for batch in data.evaluation_batches(rows, batch_size=4):
        for tokens, own, mask in zip(batch.tokens, batch.segments, batch.loss_mask, strict=True):
            count = mask.sum()
            assert tokens[:count].tolist() == inputs[index : index + count].tolist()
            expected = np.diff(segments[index : index + count])
            assert np.diff(own[:count]).tolist() == expected.tolist()
            index += count
    assert index > 1000 and rows.num_documents == segments[index - 1] + 1


@pytest.mark.parametrize("block", [1 << 20, 7, 64])
def test_documents_of_an_index_are_separated(texts, block, monkeypatch):
    """Documents of two sequences each, of which one has an end of text."""
    monkeypatch.setattr("jaxformer.data.token_files.TOKENS_PER_BLOCK", block)
    folder = texts / "tokens"
    folder.mkdir()
    ids = [BYTES.encode(text).tolist() for text in WORDS]
    ids[3].append(END)
    np.concatenate(ids).astype("<u2").tofile(folder / "c.bin")
    with open(folder / "c.idx", "wb") as file:
        bounds = np.arange(0, len(WORDS) + 1, 2, dtype="<i8")
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(WORDS), len(bounds)))
        file.write(np.array([len(x) for x in ids], "<i4").tobytes())
        file.write(np.zeros(len(WORDS), "<i8").tobytes() + bounds.tobytes())
    source = opened_source(BYTES, held_out=0.2)
    documents = [d.text for part in ("train", "held_out") for d in source.documents(part)]
    assert documents == [a + b for a, b in zip(WORDS[::2], WORDS[1::2], strict=True)]
    (rows,) = source.shards[""].split[None]
    assert len(rows.tokens) == len("".join(WORDS).encode()) + len(documents)
    assert source.record == opened_source(BYTES, held_out=0.2).record
    (folder / "c.idx").write_bytes((folder / "c.idx").read_bytes()[:-8])
    with pytest.raises(ValueError, match="is cut off: it has 30 of 31 documents"):
        opened(16, BYTES)


def test_a_token_file_is_indexed_once(texts, monkeypatch):
    folder = texts / "tokens"
    folder.mkdir()
    write_llmc(folder)
    digests = [part.digest for part in opened(16, BYTES)]
    monkeypatch.setattr("jaxformer.data.token_files._index", None)
    monkeypatch.setattr(data.ByteTokenizer, "decode", None)
    assert [part.digest for part in opened(32, BYTES)] == digests


@pytest.mark.parametrize(("ids", "count"), [([5, 6] * 20, 1), ([5, END, 6] * 20, 0)])
def test_tokens_without_an_end_of_text_are_named(texts, ids, count, caplog):
    (texts / "tokens").mkdir()
    np.array(ids, np.uint16).tofile(texts / "tokens" / "train.bin")
    opened(4, BYTES)
    said = [x.message for x in caplog.records if "no end of text" in x.message]
    assert len(said) == count
    assert all(f"(id {END}) between its 40 tokens, so they are one document" in x for x in said)


def test_a_bit_of_a_token_file_that_flipped_is_found(texts):
    folder = texts / "tokens"
    folder.mkdir()
    write_llmc(folder)
    train, _ = opened(16, BYTES)
    content = bytearray((folder / "a.bin").read_bytes())
    content[1024 + 500] ^= 1
    (folder / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.bin does not match its SHA-256 in bytes 0 to "):
        train[np.arange(len(train))]


def edit(at, end, name="a.bin"):
    """A function that puts an end in place of all of a file from an index on."""

    def change(folder):
        path = folder / name
        content = path.read_bytes() if path.exists() else b""
        path.write_bytes(content[:at] + end(content) if callable(end) else content[:at] + end)

    return change


def index(version, dtype, count, lengths):
    return b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, dtype, count, 1) + lengths


@pytest.mark.parametrize(
    "change, message",
    [
        (edit(-2, b""), r"a\.bin has \d+ bytes; \d+ tokens of uint16 are \d+\. It is cut off"),
        (edit(4, lambda x: b"\x09" + x[5:]), "version 9, which is unknown"),
        (edit(0, b""), r"a\.bin has 0 tokens; it needs two or more"),
        (edit(0, b"123"), r"a\.bin has 3 bytes; 1\.5 tokens of uint16 are 3"),
        (edit(-2, b"\xe8\x03"), r"a\.bin has the id 1000, but the tokenizer has 257 tokens"),
        (edit(0, b"MMIDIDX" * 9, "a.idx"), r"a\.idx is not an index of Megatron-LM"),
        (edit(0, index(2, 8, 1, b"1234"), "a.idx"), "has version 2 and dtype 8; version 1 and the"),
        (edit(0, index(1, 8, 3, b"12345678"), "a.idx"), "is cut off: it has 2 of 3 lengths"),
    ],
    ids=["cut off", "version", "empty", "odd", "vocabulary", "idx", "idx version", "idx cut off"],
)
def test_a_token_file_that_cannot_be_is_refused(texts, change, message):
    folder = texts / "tokens"
    folder.mkdir()
    write_llmc(folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        opened(16, BYTES)


def test_a_column_that_is_not_there_is_named(texts):
    folder = texts / "tokens"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"tokens": [[1, 2]], "n": [1]}), folder / "c.parquet")
    with pytest.raises(ValueError, match=r"has no column 'input_ids'; it has tokens, n\."):
        opened(16, BYTES)
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2], [3, 999]]}), folder / "c.parquet")
    with pytest.raises(ValueError, match="has the id 999, but the tokenizer has 257 tokens"):
        opened(16, BYTES)


def test_columns_of_one_table_have_indices_of_their_own(texts):
    ids = {"a": [[1, 2, 3]] * 40, "b": [[7, 8, 9, 10, 11]] * 40}
    parquet.write_table(pyarrow.table(ids), texts / "c.parquet")
    for field, (document, *_) in ids.items():
        source = data.Packed(path="c.parquet", field=field)
        corpus = data.Corpus(source, tokenizer=BYTES, folder=Path("cache"), held_out=0.2)
        held_out = corpus.documents("held_out")
        assert {x.text for x in held_out} == {BYTES.decode(np.array(document))}
