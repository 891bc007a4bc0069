"""Corpora that are tokenized once, in parts, and read in rows of any length."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest

from jaxformer import data
from jaxformer.data import tokenization
from jaxformer.data.__main__ import main

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


def opened(row_length, tokenizer=None, **options):
    source = data.TokenizedSource(data.Packed(path="tokens"), **options)
    tokenizer = tokenizer or data.load_tokenizer("tokens")
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
    source = data.TokenizedSource(data.Packed(path="tokens"), held_out=0.2)
    held_out = [document.text for document in source.lazy("held_out")]
    train = [document.text for document in source.lazy("train")]
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
    assert capsys.readouterr().out.startswith("tokens/part-1-of-1 is complete: ")


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
        (("--part", "1/3"), "tokens has another parts"),
        (dict(output="new", corpus="one.txt"), "Part 2 of 2 has no document; use fewer parts"),
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
    with pytest.raises(ValueError, match=r"empty has no tokenized text; write it by python -m"):
        data.TokenizedSource(data.Packed(path="empty"))


@pytest.mark.parametrize("held_out, what", [(1e-6, "held out"), (0.99999, "for training")])
def test_a_part_without_a_document_is_refused(held_out, what):
    tokenize()
    with pytest.raises(ValueError, match=rf"of \d+ tokens leaves no document {what}; use more"):
        opened(16, held_out=held_out)


def test_a_run_is_told_that_its_tokens_changed():
    tokenize()
    source = data.TokenizedSource(data.Packed(path="tokens"))
    assert (
        data.TokenizedSource(data.Packed(path="tokens"), recorded=source.digests).key == source.key
    )
    shutil.rmtree("tokens")
    tokenize(tokenizer="ByteLevel()")
    with pytest.raises(ValueError, match="tokens are not those of the run. Restore them, or"):
        data.TokenizedSource(data.Packed(path="tokens"), recorded=source.digests)
