"""Files of stores: which are listed, and how downloads that fail are tried again."""

import errno
import logging
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from jaxformer.data import stores

TEXT = bytes(range(256)) * 100
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")


class Flaky(MemoryFileSystem):
    """A store whose next openings and reads have faults."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    faults, opened = [], []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("flaky://"))

    def _open(self, path, mode="rb", **options):
        if mode != "rb":
            return super()._open(path, mode, **options)
        self.opened.append(path)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        data = self.store[path].getvalue()
        return MemoryFile(self, path, data if fault is None else data[:fault])


fsspec.register_implementation("flaky", Flaky)


class RefusalError(Exception):
    """An error of a client, with the status of the response."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture(autouse=True)
def store(monkeypatch):
    for name in ("store", "pseudo_dirs", "faults", "opened"):
        monkeypatch.setattr(Flaky, name, type(getattr(Flaky, name))())
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(stores, "MAX_PAUSES", (0.05, 0.1))
    monkeypatch.setattr(stores, "CHUNK_BYTES", 1000)
    return fsspec.filesystem("flaky")


def listed(url):
    return list(stores.list_store(url, SUFFIXES))


def downloaded(path, url="flaky://b/a.txt"):
    (file,) = stores.list_store(url, SUFFIXES).values()
    stores.download(file, path, lambda: None)
    return path.read_bytes()


def test_files_of_a_folder_of_a_pattern_and_one(store):
    for name in ("a.txt", "s/b.md", ".hidden/c.txt", "d.json", "e.csv"):
        store.pipe(f"/b/c/{name}", b"x")
    assert listed("flaky://b/c") == listed("flaky://b/c/") == ["a.txt", "s/b.md"]
    assert listed("flaky://b/c/*.json") == listed("flaky://b/c/d.json") == ["d.json"]
    assert listed("flaky://b/*/[ae].*") == ["c/a.txt", "c/e.csv"]
    store.pipe("/b/c/s/f.jsonl", b"{}")
    store.pipe("/b/c/README.md", b"of the dataset, not its text")
    assert listed("flaky://b/c") == ["a.txt", "s/b.md", "s/f.jsonl"]
    store.pipe("/b/c/x[1].txt", b"x")
    assert listed("flaky://b/c/x[1].txt") == ["x[1].txt"]
    file = stores.list_store("flaky://b/c", SUFFIXES)["s/f.jsonl"]
    assert file.size == 2 and file.url.endswith("b/c/s/f.jsonl")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("flaky://b/none", "flaky://b/none cannot be reached: FileNotFoundError: "),
        ("flaky://b/*.parquet", r"flaky://b/\*\.parquet has no text: no file there matches"),
        ("flaky://b/c", "flaky://b/c has no text: no file there has the suffix .txt or .md or"),
        ("flaky://", "flaky:// names no folder; pass flaky://NAME/FOLDER"),
        ("gs:///c", "gs:///c names no folder; pass gs://NAME/FOLDER"),
        ("nope://b/c", "nope://b/c: Protocol not known: nope"),
        ("https://b/c/", "https://b/c/: a web server has no folders; pass a file or a pattern"),
    ],
)
def test_addresses_without_text_are_named(store, url, message):
    store.pipe("/b/c/table.csv", b"x")
    with pytest.raises(ValueError, match=f"^{message}"):
        listed(url)


def test_a_missing_package_is_named(monkeypatch):
    def missing(url):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ImportError, match=r"^gs://b/c needs a package .*: pip install gcsfs$"):
        listed("gs://b/c")


def test_a_download_goes_on_where_the_connection_ended(store, tmp_path, caplog):
    store.pipe("/b/a.txt", TEXT)
    store.faults[:] = [
        ConnectionResetError("reset"),
        9_000,
        RefusalError(503),
        12_500,
        TimeoutError(),
    ]
    assert downloaded(tmp_path / "a") == TEXT
    assert len(store.opened) == 6 and not store.faults
    with caplog.at_level(logging.WARNING):
        store.faults[:] = [RefusalError(429)]
        assert downloaded(tmp_path / "a") == TEXT
    assert "/b/a.txt: RefusalError: status 429; trying again in 0 s" in caplog.messages[-1]


def test_pauses_grow_and_end_in_one_sentence(store, tmp_path, monkeypatch):
    pauses, clock = list[float](), [0.0]

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(stores.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stores.time, "sleep", sleep)
    monkeypatch.setattr(stores, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(stores, "MAX_PAUSES", (60.0, 100.0))
    store.pipe("/b/a.txt", TEXT)
    store.faults[:] = [OSError("away")] * 99
    message = r"b/a\.txt cannot be reached, after 7 tries in 63 seconds: OSError: away$"
    with pytest.raises(ValueError, match=message):
        downloaded(tmp_path / "a")
    assert sum(pauses) == pytest.approx(1 + 2 + 4 + 8 + 16 + 32) and max(pauses) == 0.2


@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), PermissionError("no"), RefusalError(403)]
)
def test_what_does_not_pass_is_not_tried_again(store, tmp_path, error):
    store.pipe("/b/a.txt", TEXT)
    store.faults[:] = [error]
    with pytest.raises(ValueError, match=rf"b/a\.txt cannot be reached: {type(error).__name__}: "):
        downloaded(tmp_path / "a")
    assert len(store.opened) == 1


def test_a_full_disk_is_not_tried_again(store):
    store.pipe("/b/a.txt", TEXT)
    with pytest.raises(OSError, match="No space left") as error:
        downloaded(Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC and len(store.opened) == 1


def test_a_file_that_changed_is_named(store, tmp_path):
    store.pipe("/b/a.txt", TEXT)
    (file,) = stores.list_store("flaky://b/a.txt", SUFFIXES).values()
    store.pipe("/b/a.txt", TEXT[::-1])
    with pytest.raises(ValueError, match=r"b/a\.txt has changed since the run began. Restore it"):
        stores.download(file, tmp_path / "a", lambda: None)


def test_versions_are_those_of_the_store():
    info = {"size": 3, "ETag": "x", "mtime": 1.5}
    same = stores._version({"size": 3, "ETag": "x", "mtime": 2.5})
    assert stores._version(info) == same != stores._version({**info, "ETag": "y"})


def test_a_full_store_is_not_tried_again(store, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(TEXT)
    calls = []

    def full(*arguments):
        calls.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Flaky, "put_file", full)
    with pytest.raises(ValueError, match="flaky://b/c/a cannot be reached: OSError: .*No space"):
        stores.upload([tmp_path / "a"], "flaky://b/c")
    assert len(calls) == 1


def test_a_stalled_read_does_not_delay_the_end(store, tmp_path, monkeypatch):
    store.pipe("/b/a.txt", TEXT)
    (file,) = stores.list_store("flaky://b/a.txt", SUFFIXES).values()
    stalled, asked = threading.Event(), []
    monkeypatch.setattr(Flaky, "_open", lambda *_, **__: stalled.wait(60))

    def check_stop():
        asked.append(None)
        if len(asked) > 3:
            raise InterruptedError("the end")

    with pytest.raises(InterruptedError, match="the end"):
        stores.download(file, tmp_path / "a", check_stop)
    stalled.set()
