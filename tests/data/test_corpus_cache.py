"""What is made of a corpus is made once, and again only where the content of its files changes."""

import os
import shutil
import time

import pytest

from jaxformer import data
from jaxformer.data import cached_files, corpus, corpus_cache, file_digests, shard_files
from jaxformer.data.tokenizers import BPE, ByteLevel, Characters

WORDS = [f"{n}: the quick brown fox jumps {n * n} times\n" for n in range(200)]
TRAINED = BPE(vocab_size=270)
OLD = time.time() - 60  # a file that has just changed is digested again


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "TIME_RESOLUTION_NS", 0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, lines in (("a.txt", WORDS[:90]), ("b.txt", WORDS[90:150]), ("c.txt", WORDS[150:])):
        write(folder / name, "".join(lines))
    return folder


def write(path, text, at=OLD):
    path.write_text(text)
    os.utime(path, (at, at))


def start(texts, tokenizer=TRAINED, length=32, **options):
    """All that a run makes of its text."""
    cache = texts.parent / "cache"
    options = {"held_out": 0.2, "folder": cache, **options}
    source = data.Corpus(data.TextFiles(path=str(texts)), **options)
    built = data.cached_tokenizer(tokenizer, [source], cache)
    rows = [source.pack(part, built, row_length=length) for part in ("train", "held_out")]
    gzip = data.cached_gzip_bits_per_byte([source], built, cache)
    return built.to_json(), [each.digest for each in rows], gzip


@pytest.fixture
def no_text(monkeypatch):
    """Whoever reads a text fails, and so does whoever digests a file."""

    def use(*, digests=False):
        monkeypatch.setattr(corpus, "_read_documents", None)
        monkeypatch.setattr(corpus_cache, "build_tokenizer", None)
        if not digests:
            monkeypatch.setattr(file_digests, "check_unchanged", None)

    return use


def test_it_is_what_split_train_and_pack_make(texts, tmp_path):
    made = start(texts)
    parts = data.split(data.documents(data.TextFiles(path=str(texts))), held_out=0.2)
    tokenizer = data.train_bpe((x.text for x in parts.train), vocab_size=270)
    source = data.Corpus(data.TextFiles(path=str(texts)), held_out=0.2, folder=tmp_path / "cache")
    assert made[0] == tokenizer.to_json() and made[2] == data.gzip_bits_per_byte(parts.held_out)
    for part, documents in zip(("train", "held_out"), parts, strict=True):
        rows = data.pack(documents, tokenizer, row_length=32, folder=tmp_path / "other")
        assert source.pack(part, tokenizer, row_length=32).digest == rows.digest


@pytest.mark.parametrize("tokenizer", [TRAINED, Characters(), ByteLevel()])
def test_the_second_start_reads_no_text(texts, no_text, tokenizer, monkeypatch):
    first = start(texts, tokenizer)
    if isinstance(tokenizer, ByteLevel):
        monkeypatch.setattr(corpus, "_read_documents", None)
    else:
        no_text()
    assert start(texts, tokenizer) == first


def test_files_of_another_time_or_place_are_the_same_text(texts, no_text):
    first = start(texts)
    no_text(digests=True)
    for file in texts.iterdir():
        os.utime(file, (OLD - 5, OLD - 5))
    assert start(texts) == first
    moved = texts.rename(texts.with_name("moved"))
    assert start(moved) == first


def test_another_length_needs_no_other_tokenizer(texts, monkeypatch):
    first = start(texts)
    monkeypatch.setattr(corpus_cache, "build_tokenizer", None)
    other = start(texts, length=16)
    assert other[0] == first[0] and other[2] == first[2] and other[1] != first[1]


@pytest.mark.parametrize("change", ["content", "same size", "one less", "one more"])
def test_a_text_that_changed_is_read_again(texts, change):
    first = start(texts)
    match change:
        case "content":
            write(texts / "a.txt", "".join(WORDS[:91]))
        case "same size":
            write(texts / "a.txt", "".join(WORDS[:90]).replace("fox", "cat"), OLD + 1)
        case "one less":
            (texts / "b.txt").unlink()
        case "one more":
            write(texts / "d.txt", "another")
    assert start(texts)[1] != first[1]


def test_a_file_that_has_just_changed_is_not_taken_by_its_time(texts, monkeypatch):
    """It may change again within the resolution of times."""
    now = time.time_ns()
    for module in (file_digests, shard_files):
        monkeypatch.setattr(module, "file_state", lambda path: [path.stat().st_size, now, 0])
    monkeypatch.setattr(file_digests, "TIME_RESOLUTION_NS", 10**10)
    first = start(texts)
    write(texts / "a.txt", "".join(WORDS[:90]).replace("fox", "cat"))
    assert start(texts)[1] != first[1]


def test_another_file_of_the_same_size_and_time_is_another_text(texts):
    first = start(texts)
    write(texts / "new", "".join(WORDS[:90]).replace("fox", "cat"))
    (texts / "new").rename(texts / "a.txt")
    assert start(texts)[1] != first[1]


def test_a_file_that_comes_after_the_digests_is_not_read(texts):
    source = data.Corpus(
        data.TextFiles(path=str(texts)), held_out=0.2, folder=texts.parent / "cache"
    )
    write(texts / "d.txt", "new")
    names = {
        d.name.partition("[")[0] for part in ("train", "held_out") for d in source.documents(part)
    }
    assert names == {"a.txt", "b.txt", "c.txt"} == source.record["files"].keys()


def test_sources_of_one_folder_have_their_own_records(texts, no_text):
    write(texts / "n.md", "".join(WORDS))
    sources = [data.TextFiles(path=str(texts), suffixes=(suffix,)) for suffix in (".md", ".txt")]

    def digests():
        cache = texts.parent / "cache"
        return [data.Corpus(source, folder=cache).record["files"] for source in sources]

    first = digests()
    no_text()  # so no file is digested again
    assert digests() == first and [len(each) for each in first] == [1, 3]


def test_a_cache_that_cannot_be_written_can_be_read(texts, monkeypatch):
    first = start(texts)

    def refused(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(file_digests, "write_json_with_checksum", refused)
    monkeypatch.setattr(cached_files, "write_json_with_checksum", refused)
    os.utime(texts / "a.txt")
    assert start(texts) == first


def test_parts_of_a_text_that_changed_are_not_used(texts, monkeypatch):
    """It changed after it was digested, and was restored after a part of it was tokenized."""
    monkeypatch.setattr("jaxformer.data.tokenization.CHARACTERS_PER_PART", 500)
    expected = start(texts, ByteLevel())
    shutil.rmtree(texts.parent / "cache")
    text = (texts / "a.txt").read_text()
    source = data.Corpus(
        data.TextFiles(path=str(texts)), held_out=0.2, folder=texts.parent / "cache"
    )
    source.documents("train").size()
    write(texts / "a.txt", text.replace("fox", "cat"))
    with pytest.raises(ValueError, match="a.txt changed while it was read"):
        source.pack("train", data.ByteTokenizer(), row_length=32)
    write(texts / "a.txt", text)
    assert start(texts, ByteLevel()) == expected


@pytest.mark.parametrize("options", [{"held_out": 0.3}, {"max_bytes": 99}, {"length": 33}])
def test_what_decides_the_rows_is_in_their_name(texts, options):
    assert start(texts, **options)[1] != start(texts)[1]


def test_a_run_goes_on_without_its_text(texts, no_text):
    cache = texts.parent / "cache"
    source = data.Corpus(data.TextFiles(path=str(texts)), held_out=0.2, folder=cache)
    first = start(texts)
    texts.rename(texts.with_name("gone"))
    no_text()
    assert start(texts, recorded=source.record) == first
    with pytest.raises(ValueError, match="texts does not exist"):
        start(texts)
    with pytest.raises(ValueError, match="texts does not exist"):
        start(texts, length=99, recorded=source.record)


def test_a_run_whose_text_changed_is_told_which_files(texts):
    cache = texts.parent / "cache"
    corpus = data.TextFiles(path=str(texts))
    before = data.Corpus(corpus, held_out=0.2, folder=cache).record
    write(texts / "a.txt", "other")
    (texts / "b.txt").unlink()
    write(texts / "d.txt", "new")
    write(texts / "e.txt", "new")
    message = "a.txt has changed, b.txt is missing, d.txt is new and 1 more. Restore it"
    with pytest.raises(ValueError, match=f"texts is not that of the run: {message}"):
        data.Corpus(corpus, held_out=0.2, folder=cache, recorded=before)


@pytest.mark.parametrize("change", ["longer", "another number of documents"])
def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_kept(texts, change):
    cache = texts.parent / "cache"
    path = texts / "a.jsonl"
    write(path, "".join(f'{{"text": "{line[:-1]}"}}\n' for line in WORDS))
    source = data.Corpus(data.TextFiles(path=str(path)), held_out=0.2, folder=cache)
    documents = iter(source.documents("train"))
    next(documents)
    more = ' {"text": "more"}\n' if change == "another number of documents" else " \n"
    write(path, path.read_text() + more)
    with pytest.raises(ValueError, match=r"a\.jsonl changed while it was read; start again"):
        source.pack("train", data.ByteTokenizer(), row_length=32)
    assert not [path for path in cache.glob("[!.]*") if (path / "metadata.json").exists()]


@pytest.mark.parametrize("where", ["files", "tokenizers", "gzip"])
@pytest.mark.parametrize("damage", [b"", b"[1]", None])
def test_a_damaged_file_of_the_cache_is_made_again(texts, where, damage):
    first = start(texts)
    (file,) = (texts.parent / "cache" / where).iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b"1", b"2", 1) if damage is None else damage)
    assert start(texts) == first
    assert file.read_bytes() == content
