"""Tokens that are written to a store and read from it."""

import json
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxformer import data
from jaxformer.data import __main__ as data_main
from jaxformer.data import shard_files, stores
from jaxformer.data.__main__ import main

TEXTS, TOKENS = "memory://texts", "memory://tokens"
SIZES = (30, 40, 50)  # documents of each file


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(shard_files, "MIN_SHARD_BYTES", 1)
    filesystem = fsspec.filesystem("memory")
    for shard, size in enumerate(SIZES):
        lines = (json.dumps({"text": text(shard, i)}) for i in range(size))
        filesystem.pipe(f"/texts/{shard}.jsonl", "\n".join(lines).encode())
    yield filesystem
    for folder in ("/texts", "/tokens"):
        if filesystem.exists(folder):
            filesystem.rm(folder, recursive=True)


def text(shard, number):
    return f"{shard}.{number}: the quick brown fox jumps {number * number} times\n"


def tokenize(*flags, corpus=TEXTS, output=TOKENS, tokenizer="BPE(vocab_size=280)"):
    main([corpus, "--tokenizer", tokenizer, "--output", output, *flags])


def source(url=TOKENS, tokenizer=None, seed=0, **options):
    tokenizer = tokenizer or data.load_tokenizer(
        data.fetch_tokenizer(data.Packed(path=TOKENS), Path("cache"))
    )
    options = {"folder": Path("cache").absolute(), "held_out": 0.1, **options}
    return data.Corpus(data.Packed(path=url), tokenizer=tokenizer, seed=seed, **options), tokenizer


def rows(opened, tokenizer, length=16):
    return [opened.pack(part, tokenizer, row_length=length) for part in ("train", "held_out")]


def sets(packed):
    return sorted(map(bytes, packed.tokens.astype(np.int32)))


def test_each_file_becomes_a_part_and_the_stream_has_all_rows(store, capsys):
    tokenize("--part", "2/2")
    with pytest.raises(ValueError, match=r"lacks part-1-of-3, part-3-of-3; tokenize them first"):
        source()
    tokenize("--part", "1/2")
    tokenize()
    assert capsys.readouterr().out.count("is complete.") == 3
    opened, tokenizer = source()
    train, held_out = rows(opened, tokenizer)
    expected, held_out_documents = list[bytes](), list[str]()
    for shard, size in enumerate(SIZES):
        documents = [data.Document(str(i), text(shard, i)) for i in range(size)]
        part = data.pack(documents, tokenizer, row_length=16, folder=Path("own"))
        if f"part-{shard + 1}-of-3" == opened.first:
            held_out_documents = [x.text for x in opened.documents("held_out")]
            first = size - len(held_out_documents)
            assert held_out_documents == [text(shard, i) for i in range(first, size)]
            part = data.pack(documents[:first], tokenizer, row_length=16, folder=Path("own"))
        expected += sets(part[:])
    assert sets(train[np.arange(len(expected))]) == sorted(expected)
    assert 0 < len(held_out_documents) < 20
    assert held_out.num_bytes == sum(len(x.encode()) for x in held_out_documents)
    assert train.num_bytes + held_out.num_bytes == sum(
        len(text(s, i).encode()) for s, size in enumerate(SIZES) for i in range(size)
    )


def test_the_same_tokens_come_from_a_store_and_from_a_folder(store, tmp_path):
    tokenize()
    tokenize(output="local")
    for number in (1, 2, 3):
        for name in ("tokens.bin", "metadata.json"):
            path = f"part-{number}-of-3/{name}"
            assert store.cat(f"/tokens/{path}") == (tmp_path / "local" / path).read_bytes()
    assert not [*Path("runs/cache/tokens").glob("*/part-*")]
    local = data.Corpus(
        data.Packed(path="local"), tokenizer=data.load_tokenizer("local"), folder=Path("cache")
    )
    assert len(local.record["files"]) == 3


def test_a_restart_reads_the_shards_that_it_needs(monkeypatch):
    tokenize()
    opened, tokenizer = source()
    train, _ = rows(opened, tokenizer)
    batches = data.Batches(train, batch_size=8, seed=0)
    expected = [batches[step] for step in range(60)]
    train._thread.join()  # which reads ahead
    names, download = list[str](), shard_files.download
    monkeypatch.setattr(
        shard_files, "download", lambda f, *x: (names.append(f.name), download(f, *x))
    )
    folder = Path("other").absolute()
    again, _ = source(recorded=opened.record, folder=folder, tokenizer=tokenizer, buffer_bytes=0)
    stream = again.pack("train", tokenizer, row_length=16)
    batch = data.Batches(stream, batch_size=8, seed=0)[59]
    assert all(np.array_equal(a, b) for a, b in zip(batch, expected[59], strict=True))
    assert {name.partition("/")[0] for name in names} < {
        "part-1-of-3",
        "part-2-of-3",
        "part-3-of-3",
    }


def test_shards_of_another_program_are_read(store):
    tokenizer = data.build_tokenizer(data.ByteLevel(), ())
    for shard in range(3):
        ids = [[tokenizer.end_of_text, *text(shard, i).encode()] for i in range(SIZES[shard])]
        store.pipe(f"/tokens/s{shard}.bin", np.concatenate(ids).astype("<u2").tobytes())
    for url in (TOKENS, f"{TOKENS}/*.bin"):
        opened, _ = source(url, tokenizer)
        train, held_out = rows(opened, tokenizer)
        assert len(opened.shards) == 3 and opened.first.endswith(".bin")
        letters = bytes(train[np.arange(50)].tokens[:, :-1].astype(np.uint8).ravel())
        assert letters.count(b"quick") > 8
        (last,) = {x.text.partition(".")[0] for x in opened.documents("held_out")}
        assert opened.first == f"s{last}.bin" and held_out.num_bytes > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pipe("/tokens/s.bin", b""),
            "memory:///tokens/s.bin has 0 tokens; it needs two or more",
        ),
        (
            lambda s: s.pipe("/tokens/s.bin", b"abc"),
            "memory:///tokens/s.bin has 3 bytes; .*It is cut off",
        ),
        (lambda s: s.pipe("/tokens/a.txt", b"abc"), "memory://tokens has no tokenized text: neit"),
        (
            lambda s: s.pipe("/tokens/s.bin", np.full(9, 999, "<u2").tobytes()),
            "tokens/s.bin has the id 999, but the tokenizer has 257 tokens",
        ),
    ],
)
def test_a_shard_that_does_not_fit_is_named(store, change, message):
    tokenizer = data.build_tokenizer(data.ByteLevel(), ())
    change(store)
    with pytest.raises(ValueError, match=message):
        rows(*source(tokenizer=tokenizer))


def test_another_tokenizer_is_refused(store, capsys):
    tokenize()
    with pytest.raises(SystemExit):
        tokenize(tokenizer="BPE(vocab_size=290)")
    assert "memory://tokens has another tokenizer; pass another --output" in capsys.readouterr().err
    tokenizer = data.build_tokenizer(data.ByteLevel(), ())
    with pytest.raises(ValueError, match="part-.* by another tokenizer; pass .* memory://tokens"):
        rows(*source(tokenizer=tokenizer))


def test_a_damaged_shard_is_downloaded_again():
    tokenize()
    opened, tokenizer = source()
    rows(opened, tokenizer)[0][np.arange(60)]
    for damage in ("tokens.bin", "starts.bin", "metadata.json"):
        for path in Path("cache/shards").glob(f"*/tokens/0/{damage}"):
            path.write_bytes(b"") if damage != "starts.bin" else path.unlink()
        again, _ = source(tokenizer=tokenizer)
        assert len(rows(again, tokenizer)[0][np.arange(60)].tokens) == 60


def test_bytes_of_shards_of_another_program_are_estimated(store):
    tokenizer = data.build_tokenizer(data.ByteLevel(), ())
    for shard in range(3):
        ids = [[tokenizer.end_of_text, *text(shard, i).encode()] for i in range(50)]
        store.pipe(f"/tokens/s{shard}.bin", np.concatenate(ids).astype("<u2").tobytes())
    opened, _ = source(tokenizer=tokenizer)
    train, _ = rows(opened, tokenizer)
    train[np.arange(300)]
    assert train.num_targets / train.num_bytes == pytest.approx(1.02, abs=0.02)
    assert not [*Path("cache").glob("token_files/*")]


def test_what_an_upload_left_is_of_one_tokenizer(store, monkeypatch, capsys):
    def fails(files, url):
        if url.endswith("-of-3"):
            raise ValueError("away")
        stores.upload(files, url)

    monkeypatch.setattr(data_main, "upload", fails)
    with pytest.raises(ValueError, match="away"):
        tokenize()
    monkeypatch.setattr(data_main, "upload", stores.upload)
    store.rm("/tokens", recursive=True)
    tokenize(tokenizer="ByteLevel()")
    tokenizer = data.build_tokenizer(data.ByteLevel(), ())
    opened, _ = source(tokenizer=tokenizer)
    assert rows(opened, tokenizer)[0].row_length == 16


def test_an_empty_file_becomes_an_empty_part(store):
    store.pipe("/texts/0.jsonl", b'{"text": ""}')
    tokenize()
    opened, tokenizer = source()
    train, _ = rows(opened, tokenizer)
    train[np.arange(300)]
    assert opened.record["sizes"]["part-1-of-3"][0] == 0


def test_parts_of_several_folders_are_refused(store):
    for folder in "ab":
        store.pipe(f"/tokens/{folder}/part-1-of-1/metadata.json", b"{}")
    with pytest.raises(ValueError, match="memory://tokens has tokenized text in several folders"):
        source(tokenizer=data.build_tokenizer(data.ByteLevel(), ()))
