"""Corpora in a store: the same rows in the same order for every process and after every start."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxformer import data
from jaxformer.data import shard_files, shards
from jaxformer.data.parted_rows import permutation

URL = "memory://corpus"
SIZES = (40, 50, 60, 70)  # documents of each file
TOKENIZER = data.build_tokenizer(data.ByteLevel(), ())


def text(shard, number):
    return f"{shard}.{number}: the quick brown fox jumps {number * number} times\n"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shard_files, "MIN_SHARD_BYTES", 1)
    filesystem = fsspec.filesystem("memory")
    for shard, size in enumerate(SIZES):
        lines = [json.dumps({"text": text(shard, i)}) for i in range(size)]
        filesystem.pipe(f"/corpus/{shard}.jsonl", "\n".join(lines).encode())
    yield filesystem
    filesystem.rm("/corpus", recursive=True)


def source(seed=0, url=URL, kind=data.TextFiles, **options):
    options = {"folder": Path("cache").absolute(), "held_out": 0.1, **options}
    return data.Corpus(kind(path=url), seed=seed, **options)


def rows(opened, length=32, tokenizer=TOKENIZER):
    return [opened.pack(part, tokenizer, row_length=length) for part in ("train", "held_out")]


def batches(stream, **options):
    return data.Batches(stream, batch_size=16, seed=0, **options)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def sets(packed_row):
    return sorted(map(bytes, packed_row.tokens.astype(np.int32)))


def shards_opened(monkeypatch):
    """Names of the files that are downloaded from now on."""
    for thread in threading.enumerate():
        if thread.name == "reading ahead":
            thread.join()
    names, download = list[str](), shard_files.download

    def note(file, *arguments):
        names.append(file.name)
        download(file, *arguments)

    monkeypatch.setattr(shard_files, "download", note)
    return names


def test_an_epoch_has_every_row_of_every_file_once(tmp_path):
    opened = source()
    train, held_out = rows(opened)
    parts = []
    for shard, size in enumerate(SIZES):
        documents = [data.Document(f"{shard}.jsonl:{i + 1}", text(shard, i)) for i in range(size)]
        if f"{shard}.jsonl" == opened.first:
            split = data.split(documents, held_out=0.4)  # of one file of four
            parts.append(data.pack(split.train, TOKENIZER, row_length=32, folder=tmp_path / "a"))
            last = data.pack(split.held_out, TOKENIZER, row_length=32, folder=tmp_path / "a")
        else:
            parts.append(data.pack(documents, TOKENIZER, row_length=32, folder=tmp_path / "a"))
    assert equal(held_out[:], last[:]) and held_out.num_bytes == last.num_bytes
    count = sum(map(len, parts))
    first, second = train[np.arange(count)], train[np.arange(count, 2 * count)]
    assert sets(first) == sorted(x for part in parts for x in sets(part[:])) == sets(second)
    assert not equal(first, second)
    assert train.num_targets == sum(part.num_targets for part in parts)
    assert train.num_bytes == sum(part.num_bytes for part in parts) and len(opened.shards) == 4
    ends = np.cumsum([opened.record["sizes"][f"{i}.jsonl"][0] for i in range(4)])
    assert ends[-1] == count


def test_a_batch_depends_on_seed_and_step_alone(monkeypatch):
    stream, _ = rows(opened := source())
    batch = batches(stream)
    expected = {step: batch[step] for step in (0, 3, 9, 50, 51)}
    restarted, _ = rows(source(recorded=opened.record))
    for step in (51, 0, 9):
        assert equal(batches(restarted)[step], expected[step])
    names, empty = shards_opened(monkeypatch), Path("another cache").absolute()
    elsewhere, _ = rows(source(recorded=opened.record, buffer_bytes=0, folder=empty))
    for first in (0, 8):
        part = batches(elsewhere, local_rows=slice(first, first + 8))[9]
        assert equal(part, [x[first : first + 8] for x in expected[9]])
    assert len(names) <= 2 and len(set(names)) == len(names)  # not those before
    unrecorded, _ = rows(source(buffer_bytes=0, folder=empty))
    assert all(equal(batches(unrecorded)[step], expected[step]) for step in expected)
    other, _ = rows(source(seed=1))
    assert not equal(batches(other)[0], expected[0]) and other.digest != stream.digest
    assert stream.digest == restarted.digest == elsewhere.digest


@pytest.mark.slow
def test_the_disk_has_one_text_and_the_newest_tokens(store):
    for shard in range(len(SIZES), 9):
        lines = [json.dumps({"text": text(shard, i)}) for i in range(40)]
        store.pipe(f"/corpus/{shard}.jsonl", "\n".join(lines).encode())
    stream, _ = rows(source(buffer_bytes=0))
    texts, shards = set(), set()
    for step in range(100):
        batches(stream)[step]
        shards.add(len([*Path("cache/shards").iterdir()]))
        texts.add(
            len([*Path("cache/shards").glob("*/.files.*"), *Path("cache").glob(".download.*")])
        )
    assert 4 <= max(shards) <= 5 and max(texts) <= 2, (shards, texts)
    kept, _ = rows(source(folder=Path("other")))
    for step in range(100):
        batches(kept)[step]
    assert len([*Path("other/shards").iterdir()]) == 9


def test_rows_that_are_there_are_not_made_again(monkeypatch):
    train, _ = rows(source())
    for step in range(30):
        batches(train)[step]
    names = shards_opened(monkeypatch)
    again, _ = rows(source())
    for step in range(30):
        batches(again)[step]
    assert names == []


def test_the_text_of_a_run_must_not_change(store):
    record = source().record
    store.pipe("/corpus/9.jsonl", b'{"text": "new"}')
    store.pipe("/corpus/1.jsonl", b'{"text": "other"}')
    message = f"^The text of {URL} is not .*: 1.jsonl has changed, 9.jsonl is new. Restore"
    with pytest.raises(ValueError, match=message):
        source(recorded=record)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b', r"corpus/\d.jsonl line 2 is not JSON"),
        (b'{"content": "a"}', r"corpus/\d.jsonl line 1 has no field 'text'; it has content"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(store, content, message):
    name = next(f"{i}.jsonl" for i in range(4) if f"{i}.jsonl" != source().first)
    before = store.cat(f"/corpus/{name}")
    store.pipe(f"/corpus/{name}", content)
    stream, _ = rows(source())
    with pytest.raises(ValueError, match=f"memory://.*{message}"):
        stream[np.arange(500)]
    store.pipe(f"/corpus/{name}", before)
    with pytest.raises(ValueError, match=rf"{name} has changed since the run began. Restore it"):
        stream[np.arange(500)]
    stream, _ = rows(source())
    assert len(stream[np.arange(500)].tokens) == 500


def test_a_mixture_needs_weights(tmp_path):
    stream, _ = rows(source())
    other = data.pack([data.Document("a", "Z" * 500)], TOKENIZER, row_length=32, folder=tmp_path)
    with pytest.raises(ValueError, match=r"store needs weights, .* pass weights=\(1, 1\) or"):
        data.mix_rows([stream, other])
    mixed = data.mix_rows([other, stream], (1, 3))
    assert mixed.epoch is None
    batch = batches(mixed)[0]
    assert np.sum((batch.tokens == ord("Z")).any(axis=1)) == 4
    of_stream = batch.tokens[~(batch.tokens == ord("Z")).any(axis=1)]
    assert np.array_equal(of_stream, stream[np.arange(12)].tokens[:, :-1])


def test_instructions_of_a_store_have_loss_on_the_answers(store):
    lines = [json.dumps({"prompt": f"p{i}", "answer": f"a{i}"}) for i in range(90)]
    store.pipe("/corpus/sub/i.jsonl", "\n".join(lines).encode())
    opened = source(url=f"{URL}/sub/*.jsonl", kind=data.Instructions)
    train, held_out = rows(opened, length=16)
    batch = batches(train)[0]
    answers = bytes(batch.targets[batch.loss_mask & (batch.targets < 256)].astype(np.uint8))
    assert answers.startswith(b"a") and b"p" not in answers
    assert held_out.loss_mask is not None


def test_a_permutation_is_the_same_everywhere():
    """By the bits of Philox, which NumPy keeps, not by its shuffle."""
    assert permutation(8, 0, 1, "a").tolist() == [6, 5, 1, 2, 7, 0, 4, 3]
    counts = np.bincount([permutation(4, seed)[0] for seed in range(4000)])
    assert counts.min() > 900


def test_the_end_of_a_process_does_not_wait_for_a_file():
    program = (
        "import time\n"
        "from jaxformer.data import ByteTokenizer, StreamedRows, shard_files\n"
        "def work(name):\n"
        "    while True:\n"
        "        shard_files.raise_if_exiting()\n"
        "        time.sleep(0.1)\n"
        "stream = StreamedRows(['a'], work, ByteTokenizer(), row_length=1, seed=0, sizes={},"
        " digest='')\n"
        "stream._open_in_thread('a')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_an_empty_file_has_no_rows(store):
    name = next(f"{i}.jsonl" for i in range(4) if f"{i}.jsonl" != source().first)
    store.pipe(f"/corpus/{name}", b'{"text": ""}')
    opened = source()
    stream, _ = rows(opened)
    stream[np.arange(2000)]
    assert opened.record["sizes"][name] == (0, 0, 0, 0)
    assert sum(size[0] > 0 for size in opened.record["sizes"].values()) == 3


def test_no_rows_of_a_stream():
    stream, _ = rows(source())
    nothing = stream[np.zeros(0, int)]
    assert nothing.tokens.shape == (0, 33) and nothing.segments.shape == (0, 32)
    assert stream.loss_mask_at([]).shape == (0, 32)


def test_a_mixture_that_draws_no_row_of_a_stream(tmp_path):
    stream, _ = rows(source())
    other = data.pack([data.Document("a", "Z" * 5000)], TOKENIZER, row_length=32, folder=tmp_path)
    for mixed in (data.mix_rows(parts, (1, 30)) for parts in ((other, stream), (stream, other))):
        for step in range(12):
            assert batches(mixed)[step].tokens.shape == (16, 32)


def test_small_files_are_one_shard(monkeypatch):
    monkeypatch.setattr(shard_files, "MIN_SHARD_BYTES", 5000)
    opened = source()
    assert [*opened.shards] == ["0.jsonl", "2.jsonl"] and len(opened.record["files"]) == 4
    stream, held_out = rows(opened)
    stream[np.arange(500)]
    counts = [size[1] for size in opened.record["sizes"].values()]
    assert sum(counts) + held_out.num_documents in (sum(SIZES), sum(SIZES) + 1)  # one is cut


def test_held_out_text_is_of_a_large_file(store):
    store.pipe("/corpus/a.jsonl", b'{"text": "a"}')
    for i in range(20):
        store.pipe(f"/corpus/t{i}.jsonl", b'{"text": "a"}')
    assert source().first in ("0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl")


def test_equal_files_at_another_address_are_others(tmp_path):
    """Of a store whose files have no digest, only a size and a time."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder, letter in zip(folders, "xy", strict=True):
        folder.mkdir()
        (folder / "1.txt").write_text(letter * 500)
        os.utime(folder / "1.txt", (1e9, 1e9))
    letters = []
    for folder in folders:
        stream, _ = rows(source(url=f"file://{folder}"))
        letters.append(chr(stream[[0]].tokens[0, -2]))
    assert letters == ["x", "y"]


def test_a_shard_that_is_used_stays_and_what_a_killed_process_left_goes(monkeypatch):
    opened, reseeded = source(buffer_bytes=0), source(seed=1, buffer_bytes=0)
    (stream, _), (other, _) = rows(opened), rows(reseeded)
    left = Path("cache/shards/left/.parts").absolute()
    left.mkdir(parents=True)
    (left / "0.npz").write_bytes(b"x" * 1000)
    for step in range(0, 60, 3):  # both go through all files, each deleting what it may
        assert len(batches(stream)[step].tokens) == len(batches(other)[step].tokens) == 16
    assert not left.exists()


def test_rows_are_ready_when_their_file_is_read(monkeypatch):
    stream, _ = rows(source())
    stream[[0]]
    may_read, document_of = threading.Event(), shards.documents

    def wait(*arguments, **options):
        may_read.wait(timeout=30)
        return document_of(*arguments, **options)

    fresh, _ = rows(source(folder=Path("other")))
    monkeypatch.setattr(shards, "documents", wait)
    assert not batches(fresh).is_ready(0) and batches(stream).is_ready(0)
    may_read.set()
    assert len(batches(fresh)[0].tokens) == 16 and batches(fresh).is_ready(0)


def test_the_record_of_a_local_text_is_not_that_of_a_store():
    with pytest.raises(ValueError, match="0.jsonl is new, .* more. Restore it, or start a"):
        source(recorded={"files": {"a.txt": "0" * 64}})
