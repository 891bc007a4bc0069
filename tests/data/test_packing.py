import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import data, json_files
from jaxformer.data import Document, checked_files, packing, temporary_folders
from jaxformer.data import tokenization as tokenised

END = 256


def whole_of(tmp_path):
    """The caches that are there; what begins with a dot is not whole."""
    return [path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]


def folder_of(tmp_path):
    (folder,) = whole_of(tmp_path)
    return folder


def only_parts_are_left(tmp_path):
    (parts,) = (tmp_path / "cache").iterdir()
    return parts.name.endswith(".parts") and {path.suffix for path in parts.iterdir()} == {".npz"}


def by_hand(tokens, starts, row_length):
    """Segments and positions of every input by a loop over single tokens."""
    segments, positions = [], []
    for i in range(len(tokens) - 1):
        if i % row_length == 0:
            segment, position = 1, 0
        elif starts[i]:
            segment, position = segment + 1, 0
        else:
            position += 1
        segments.append(segment)
        positions.append(position)
    fill = [0] * (-len(segments) % row_length)
    shape = (-1, row_length)
    return np.reshape(segments + fill, shape), np.reshape(positions + fill, shape)


def test_the_picture_of_the_module(pack):
    """E a a a E b b E c c c c E in rows of five inputs."""
    rows = pack([Document("1", "aaa"), Document("2", "bb"), Document("3", "cccc")], row_length=5)
    a, b, c = b"abc"
    assert rows[:].tokens.tolist() == [
        [END, a, a, a, END, b],
        [b, b, END, c, c, c],
        [c, c, END, END, END, END],
    ]
    assert rows[:].segments.tolist() == [[1, 1, 1, 1, 2], [1, 1, 2, 2, 2], [1, 1, 0, 0, 0]]
    assert rows[:].positions.tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert (rows.num_targets, rows.num_bytes, rows.num_documents) == (12, 9, 3)
    assert (len(rows), rows.row_length, rows.end_of_text) == (3, 5, END)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), row_length=st.integers(1, 17))
@settings(max_examples=20, deadline=None)
def test_rows_are_the_stream_segments_and_positions_those_of_a_loop(lengths, row_length):
    stream, starts = [END], []
    for length in lengths:
        starts += [True] + [False] * length
        stream += [*range(length), END]
    starts = np.array([*starts, False])
    expected = by_hand(stream, starts, row_length)
    num_inputs = len(stream) - 1
    filled = stream + [END] * (-num_inputs % row_length)
    rows = data.PackedRows(
        tokens=np.array(filled, np.uint16),
        starts=np.flatnonzero(starts),
        document_bytes=np.zeros(len(lengths), int),
        num_inputs=num_inputs,
        row_length=row_length,
        end_of_text=END,
        num_documents=len(lengths),
        num_bytes=0,
        num_targets=num_inputs,
    )
    tokens, segments, positions = rows[:]
    assert np.array_equal(segments, expected[0])
    assert np.array_equal(positions, expected[1])
    assert np.array_equal(tokens[:, 1:][segments > 0], stream[1:])
    assert np.array_equal(tokens[:, :-1][segments > 0], stream[:-1])
    assert (tokens[:, 1:][segments == 0] == END).all()
    assert np.array_equal(tokens[1:, 0], tokens[:-1, -1])


@pytest.mark.parametrize("row_length", [1, 13, 5000])
def test_the_rows_give_back_every_text(pack, documents, tokenizer, row_length):
    rows = pack(documents, row_length=row_length)
    targets = rows[:].tokens[:, 1:][rows[:].segments > 0]
    texts = np.split(targets, np.flatnonzero(targets == END) + 1)
    assert [tokenizer.decode(ids) for ids in texts[:-1]] == [d.text for d in documents]
    assert texts[-1].size == 0


@pytest.mark.parametrize("row_length", [1, 7, 13, 64, 5000])
def test_every_token_is_a_target_once(pack, documents, tokenizer, row_length):
    """Bits per byte rest on this: nothing is lost between rows, nothing counts twice."""
    rows = pack(documents, row_length=row_length)
    tokens = sum(len(tokenizer.encode(document.text)) + 1 for document in documents)
    assert rows.num_targets == tokens == (rows[:].segments > 0).sum()
    assert rows.num_bytes == sum(len(document.text.encode()) for document in documents)
    assert rows.num_bytes == tokens - len(documents)  # one token is one byte here
    assert (rows[:-1].segments > 0).all()


def test_a_document_looks_the_same_wherever_it_lies(pack):
    """Within one row: its inputs, targets and positions depend on no other document."""
    seen = []
    for before in ("", "x", "y" * 17):
        documents = [Document("0", before), Document("1", "hello"), Document("2", "zz")]
        row = pack(documents, row_length=61)[0]
        part = row.segments == 2
        seen.append((row.tokens[:-1][part], row.tokens[1:][part], row.positions[part]))
    for inputs, targets, positions in seen:
        assert inputs.tolist() == [END, *b"hello"]
        assert targets.tolist() == [*b"hello", END]
        assert positions.tolist() == list(range(6))


@pytest.mark.parametrize("kind", ["texts", "instructions"])
@pytest.mark.parametrize("row_length", [13, 100, 3000])
def test_writing_in_parts_gives_the_same_files(
    tmp_path, documents, tokenizer, monkeypatch, kind, row_length
):
    if kind == "instructions":
        documents = [
            data.Instruction(name, text, ((text[:9], False), (text[9:], True), ("", True)), True)
            for name, text in documents
        ]
        row_length *= 20  # none is longer
    whole = data.pack(documents, tokenizer, row_length=row_length, folder=tmp_path / "a")
    monkeypatch.setattr(checked_files, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(tokenised, "CHARACTERS_PER_PART", 100)
    parts = data.pack(documents, tokenizer, row_length=row_length, folder=tmp_path / "b")
    files = [{p.name: p.read_bytes() for p in tmp_path.rglob(f"{x}/*/*")} for x in "ab"]
    assert files[0] == files[1] and len(files[0]) == 7 + 2 * (kind == "instructions")
    assert whole.num_targets == parts.num_targets == whole.loss_mask_at(slice(None)).sum()


def test_rows_are_sequences(pack, documents):
    rows = pack(documents)
    assert sum(1 for _ in rows) == len(rows)
    row = rows[3]
    assert row.tokens.shape == (14,) and row.segments.shape == row.positions.shape == (13,)
    several = rows[np.array([3, 1])]
    assert np.array_equal(several.tokens[0], row.tokens)
    assert np.array_equal(several.segments[1], rows[1].segments)
    assert np.array_equal(rows[-1].tokens, rows[len(rows) - 1].tokens)
    with pytest.raises(IndexError, match=rf"There are {len(rows)} rows; got the index {len(rows)}"):
        rows[len(rows)]
    is_wanted = np.arange(len(rows)) % 5 == 3
    assert np.array_equal(rows[is_wanted].tokens, rows[np.flatnonzero(is_wanted)].tokens)
    with pytest.raises(IndexError, match="indexed by integers or booleans; got float64"):
        rows[np.array([1.5])]
    assert np.array_equal(pickle.loads(pickle.dumps(rows))[3].tokens, row.tokens)


class Wide(data.ByteTokenizer):
    """Bytes shifted up, and an end of text beyond 16 bits."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.end_of_text = vocab_size - 1

    def to_json(self):
        return json.dumps(self.vocab_size)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_tokens_have_the_bits_the_vocabulary_needs(pack, documents, vocab_size, dtype):
    rows = pack(documents, tokenizer=Wide(vocab_size))
    assert rows.tokens.dtype == dtype
    assert rows[:].tokens.max() == vocab_size - 1


def test_packing_again_opens_what_is_there(pack, tmp_path, documents, monkeypatch):
    first = pack(documents)
    monkeypatch.setattr(packing, "tokenize_documents", None)
    again = pack(documents)
    assert np.array_equal(first[:].tokens, again[:].tokens) and again.num_bytes == first.num_bytes
    opened = data.open_packed(folder_of(tmp_path))
    assert np.array_equal(first[:].tokens, opened[:].tokens)


def test_another_text_tokenizer_or_length_is_another_cache(pack, tmp_path):
    pack([Document("a", "bc")])
    pack([Document("other name", "bc")])
    assert len(whole_of(tmp_path)) == 1
    pack([Document("a", "b"), Document("b", "c")])
    pack([Document("a", "bd")])
    pack([Document("a", "bc")], row_length=11)
    pack([Document("a", "bc")], tokenizer=Wide(300))
    assert len(list((tmp_path / "cache").iterdir())) == 5


@pytest.mark.slow
def test_the_cache_is_the_same_in_every_process(tmp_path):
    script = (
        "import sys; from jaxformer import data\n"
        "d = [data.Document(str(i), 'text %d' % i) for i in range(9)]\n"
        "t = data.train_bpe([x.text for x in d], vocab_size=270)\n"
        "data.pack(d, t, row_length=7, folder=sys.argv[1])"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-W", "error", "-c", script, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(data.__file__).parents[2],
            check=True,
        )
    files = [
        {p.relative_to(tmp_path / seed): p.read_bytes() for p in (tmp_path / seed).rglob("*.*")}
        for seed in ("1", "2")
    ]
    assert len(files[0]) == 7 and files[0] == files[1]


def damage_truncate(folder):
    path = folder / "starts.bin"
    path.write_bytes(path.read_bytes()[:-1])


def damage_metadata(folder):
    path = folder / "metadata.json"
    path.write_text(path.read_text().replace('"num_bytes": ', '"num_bytes": 1'))


def flip(name, at):
    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return damage


def without(*path):
    """Another program's metadata, which lacks a key and has the right checksum."""

    def damage(folder):
        saved = json.loads((folder / "metadata.json").read_text())
        content = saved["content"]
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]
        saved["checksum"] = json_files.json_digest(saved["content"])
        (folder / "metadata.json").write_text(json.dumps(saved))

    return damage, rf"metadata\.json.* lacks {path[-1]}"


DAMAGES = {
    "no format": without("format"),
    "no files": without("files"),
    "no tokens": without("files", "tokens"),
    "no digest": without("files", "tokens", "sha256_of_digests"),
    "no number": without("metadata", "num_bytes"),
    "a bit of the starts": (
        flip("starts.bin", -1),
        r"starts\.bin does not match its SHA-256 in by",
    ),
    "a bit of a digest": (flip("tokens.digests", 3), r"tokens\.digests does not match its SHA-256"),
    "no digests": (
        lambda f: (f / "starts.digests").unlink(),
        r"starts\.digests does not match its",
    ),
    "truncated": (damage_truncate, r"is damaged: starts\.bin has (\d+) of (\d+) bytes"),
    "missing": (lambda f: (f / "tokens.bin").unlink(), r"tokens\.bin has 0 of (\d+) bytes"),
    "changed": (damage_metadata, r"metadata\.json does not match its checksum [0-9a-f]{64}"),
    "empty": (lambda f: (f / "metadata.json").write_text(""), r"metadata\.json cannot be read"),
    "list": (lambda f: (f / "metadata.json").write_text("[1]"), r"metadata\.json cannot be read"),
    "none": (lambda f: (f / "metadata.json").unlink(), r"has no packed rows: metadata\.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_cache_is_told_and_packed_again(pack, tmp_path, documents, kind):
    damage, message = DAMAGES[kind]
    digest = pack(documents).digest
    folder = folder_of(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        data.open_packed(folder)
    with pytest.warns(UserWarning, match=f"Cached rows are packed again: .*{message}"):
        again = pack(documents)
    assert again.digest == data.open_packed(folder_of(tmp_path)).digest == digest


@pytest.mark.parametrize("kind", ["tokens", "loss_mask"])
def test_a_bit_that_flipped_is_found_where_its_block_is_first_read(
    pack, tmp_path, documents, monkeypatch, kind
):
    """And the next start packs the rows again."""
    monkeypatch.setattr(checked_files, "BLOCK_BYTES", 64)
    if kind == "loss_mask":
        spans = [((text[:1], False), (text[1:], True), ("", True)) for _, text in documents]
        documents = [
            data.Instruction(name, text, each, True)
            for (name, text), each in zip(documents, spans, strict=True)
        ]
    length = max(len(document.text.encode()) for document in documents) + 2
    digest = pack(documents, row_length=length).digest
    folder = folder_of(tmp_path)
    size = (folder / f"{kind}.bin").stat().st_size
    flip(f"{kind}.bin", size // 2)(folder)
    rows, read = data.open_packed(folder), []
    message = rf"{kind}\.bin does not match its SHA-256 in bytes (\d+) to (\d+); the next start"
    with pytest.raises(ValueError, match=message) as error:
        for row in range(len(rows)):
            rows[row], rows.loss_mask_at(row)
            read.append(row)
    begin, end = map(int, re.search(message, str(error.value)).groups())
    assert begin <= size // 2 < end <= begin + 64 and 0 < len(read) < len(rows) - 1
    with pytest.warns(UserWarning, match="packed again: .* metadata.json cannot be read"):
        again = pack(documents, row_length=length)
    again.check()
    assert again.digest == digest


def test_a_block_is_digested_once(pack, documents, monkeypatch):
    rows = pack(documents)
    first = rows[:]
    monkeypatch.setattr(checked_files.hashlib, "sha256", None)
    assert np.array_equal(rows[::-1].tokens, first.tokens[::-1])


def test_what_a_batch_is_made_of_is_int32(pack, documents):
    """Narrow integers wrap in arithmetic; the files stay narrow."""
    rows = pack(documents)
    assert rows.tokens.dtype == np.uint16
    assert {x.dtype for index in (0, [1, 2], np.arange(2)) for x in rows[index]} == {
        np.dtype(np.int32)
    }


@pytest.mark.parametrize("changed", ["token", "start", "loss"])
def test_the_digest_is_of_all_that_makes_a_batch(pack, changed):
    def instruction(name, text, asked):
        return data.Instruction(
            name, text, ((text[:asked], False), (text[asked:], True), ("", True)), True
        )

    before = pack([instruction("a", "abcd", 1), instruction("b", "efg", 1)], row_length=50)
    match changed:
        case "token":
            other = [instruction("a", "abcd", 1), instruction("b", "efh", 1)]
        case "start":
            other = [instruction("a", "abcd", 1), instruction("b", "efg", 1)][::-1]
        case "loss":
            other = [instruction("a", "abcd", 2), instruction("b", "efg", 1)]
    assert pack(other, row_length=50).digest != before.digest


def test_what_another_put_in_place_of_a_damaged_one_is_not_emptied(
    pack, tmp_path, documents, monkeypatch
):
    """Between finding it damaged and moving it, another process mends it."""
    pack(documents)
    folder = folder_of(tmp_path)
    shutil.copytree(folder, tmp_path / "whole")
    damage_truncate(folder)
    is_whole = packing._is_intact

    def meanwhile(final):
        intact = is_whole(final)
        shutil.rmtree(final)
        shutil.copytree(tmp_path / "whole", final)
        return intact

    monkeypatch.setattr(packing, "_is_intact", meanwhile)
    with pytest.warns(UserWarning, match="Cached rows are packed again"):
        rows = pack(documents)
    assert rows.digest == data.open_packed(folder_of(tmp_path)).digest


def test_text_that_cannot_be_encoded_is_named_with_its_document(pack):
    tokenizer = data.CharacterTokenizer("ab")
    with pytest.raises(ValueError, match=r"two\.txt: Character 'c' \(U\+0063\) at 1, in line 1"):
        pack([Document("one.txt", "ab"), Document("two.txt", "acb")], tokenizer=tokenizer)


def test_a_truncated_file_is_told_with_its_numbers(pack, tmp_path, documents):
    pack(documents)
    folder = folder_of(tmp_path)
    size = (folder / "starts.bin").stat().st_size
    damage_truncate(folder)
    with pytest.raises(ValueError, match=rf"starts\.bin has {size - 1} of {size} bytes"):
        data.open_packed(folder)


def test_another_format_is_told(pack, tmp_path, documents, monkeypatch):
    pack(documents)
    monkeypatch.setattr(packing, "FORMAT_VERSION", 7)
    with pytest.raises(ValueError, match="has format 6; this version reads 7"):
        data.open_packed(folder_of(tmp_path))
    pack(documents)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("where", ["_write_metadata", "_move_into_place"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_writer_leaves_parts_alone(
    pack, tmp_path, documents, monkeypatch, where, error
):
    def interrupted(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(packing, where, interrupted)
        with pytest.raises(error):
            pack(documents)
    assert only_parts_are_left(tmp_path)
    assert len(pack(documents)) > 1
    assert list((tmp_path / "cache").iterdir()) == [folder_of(tmp_path)]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_tokenised_is_not_tokenised_again(pack, tmp_path, documents, monkeypatch, damaged):
    """Ended within the third part; a part that was damaged since is made anew."""
    expected = pack(documents).digest
    shutil.rmtree(folder_of(tmp_path))
    monkeypatch.setattr(tokenised, "CHARACTERS_PER_PART", 400)
    texts, encoded = "".join(d.text for d in documents), []

    class Ending(data.ByteTokenizer):
        def encode_batch(self, texts):
            if len(encoded) == ends:
                raise KeyboardInterrupt
            encoded.append("".join(texts))
            return super().encode_batch(texts)

    ends = 2
    with pytest.raises(KeyboardInterrupt):
        pack(documents, tokenizer=Ending())
    assert only_parts_are_left(tmp_path) and 0 < len("".join(encoded)) < len(texts)
    again = encoded.pop(0) if damaged else ""
    if damaged:
        (part,) = (tmp_path / "cache").glob(".*.parts/0-*.npz")
        flip(part.name, 300)(part.parent)
    ends = None
    assert pack(documents, tokenizer=Ending()).digest == expected
    assert sorted("".join(encoded)) == sorted(texts) and again in encoded + [""]


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_is_used(tmp_path):
    """Killed between writing and renaming: no clean-up runs, and the next writer does not care."""
    script = (
        "import os, signal, sys; from jaxformer import data\n"
        "if sys.argv[2] == 'kill':\n"
        "    os.rename = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "d = [data.Document('a', 'text')]\n"
        "print(len(data.pack(d, data.ByteTokenizer(), row_length=2, folder=sys.argv[1])))"
    )

    def run(how):
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", script, str(tmp_path), how],
            cwd=Path(data.__file__).parents[2],
            capture_output=True,
        )

    assert run("kill").returncode == -9
    left, parts = sorted(tmp_path.iterdir(), key=lambda path: path.name.endswith(".parts"))
    assert left.name.startswith(".") and (left / "metadata.json").exists()
    assert [path.name.partition("-")[0] for path in parts.iterdir()] == ["0"]
    after = run("finish")
    assert after.returncode == 0 and after.stdout == b"3\n"
    (final,) = tmp_path.iterdir()  # what the killed one left is deleted
    assert not final.name.startswith(".") and not (final / "lock").exists()


def test_two_writers_at_once_agree(pack, tmp_path, documents, monkeypatch):
    """Both find nothing, both write, the later one leaves the earlier one's files in place."""
    barrier = threading.Barrier(2, timeout=30)
    describe = packing._write_metadata

    def together(*args, **kwargs):
        describe(*args, **kwargs)
        barrier.wait()

    monkeypatch.setattr(packing, "_write_metadata", together)
    packed = []
    threads = [threading.Thread(target=lambda: packed.append(pack(documents))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == 2 and np.array_equal(packed[0][:].tokens, packed[1][:].tokens)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_losing_the_race_to_rename_is_no_failure(pack, tmp_path, documents, monkeypatch):
    def slower(partial, final):
        shutil.copytree(partial, final)
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rename", slower)
    assert len(pack(documents)) > 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_rename_that_fails_is_a_failure(pack, tmp_path, documents, monkeypatch):
    def refused(partial, final):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(OSError, match="Permission denied"):
        pack(documents)
    assert only_parts_are_left(tmp_path)


def test_a_full_disk_leaves_parts_alone_and_says_how_far_it_went(
    pack, tmp_path, documents, monkeypatch
):
    size = sum(len(document.text.encode()) for document in documents)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = rf"in .*cache after tokenizing {size:,} of {size:,} bytes of text; free space"
    with pytest.raises(OSError, match=message) as caught:
        pack(documents)
    assert caught.value.errno == errno.ENOSPC
    assert only_parts_are_left(tmp_path)


def test_another_failure_to_write_is_passed_on(pack, documents, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        pack(documents)


def test_the_cache_has_ordinary_permissions(pack, tmp_path, documents):
    """Others may read it as they may read what `mkdir` makes."""
    pack(documents)
    (tmp_path / "plain").mkdir()
    assert folder_of(tmp_path).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_to_pack_is_refused(pack, documents):
    with pytest.raises(ValueError, match="row_length must be at least 1; got 0"):
        pack(documents, row_length=0)
    with pytest.raises(ValueError, match="There are no documents to pack"):
        pack([])
    with pytest.raises(ValueError, match="There are no documents to pack"):
        data.pack([], data.ByteTokenizer(), row_length=3, folder="nowhere", key="x")


def test_a_folder_that_is_deleted_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, deleted = temporary_folders.fcntl.flock, []

    def flock(file, how):
        if not deleted:
            (folder,) = tmp_path.glob(".new.*")
            deleted.append(folder)
            shutil.rmtree(folder)
        lock(file, how)

    monkeypatch.setattr(temporary_folders.fcntl, "flock", flock)
    with temporary_folders.temporary_folder(tmp_path / "new") as folder:
        assert [*tmp_path.iterdir()] == [folder] == deleted and (folder / "lock").exists()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("first", ["use", "delete"])
def test_a_lock_is_of_the_folder_that_is_there(tmp_path, monkeypatch, first):
    """One process deletes a folder and another uses a new one while a third waits for its lock."""
    folder, (flock, others) = tmp_path / "x", (temporary_folders.fcntl.flock, [])
    temporary_folders.use_folder(folder).close()

    def late(file, how):
        if not others:
            shutil.rmtree(folder)
            others.append(None)
            others.append(temporary_folders.use_folder(folder))
        flock(file, how)

    monkeypatch.setattr(temporary_folders.fcntl, "flock", late)
    if first == "use":
        with temporary_folders.use_folder(folder):
            others[1].close()
            assert not temporary_folders.delete_unused(folder)
    else:
        assert not temporary_folders.delete_unused(folder) and folder.exists()
    others[1].close()
    assert temporary_folders.delete_unused(folder) and not [*tmp_path.iterdir()]
