"""Files that a dataset's names reserve for evaluation are not trained on, and are named."""

import json
import logging
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxformer import data
from jaxformer.data.dataset_splits import training_files
from jaxformer.data.shard_files import token_shards
from jaxformer.data.stores import list_store

SHARDED = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]


@pytest.mark.parametrize(
    "kept, left_out",
    [
        (SHARDED, ["data/test-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"]),
        (["train_sft-00000-of-00003.parquet"], ["test_sft-00000-of-00001.parquet"]),
        (["train/a.jsonl", "train/b.jsonl"], ["dev/a.jsonl", "test/en/b.jsonl", "val/a.jsonl"]),
        (["all/auxiliary_train/0.parquet"], ["all/test/0.parquet", "all/dev/0.parquet"]),
        (["wiki.train.raw"], ["wiki.test.raw", "wiki.valid.raw"]),
        (["Stories-train.txt"], ["Stories-valid.txt"]),
        (["x.jsonl"], ["eval.jsonl", "TEST.jsonl.gz", "my testing 2.ndjson", "evaluation1.json"]),
        (["train.json"], ["test.txt", "valid/wiki.tokens"]),
        (["train.raw", "notes.txt"], ["test.md"]),
        (["notes.txt", "test.md", "train.py"], []),  # of source code
        (["training/plan.txt"], ["training/test.md"]),  # no records
        (["train_test.jsonl", "contest.jsonl", "latest/x.jsonl", "a.jsonl"], ["b-test.jsonl"]),
        (["train.py", "test.py", "test/x.py", "notes.md", "test_plan.md"], []),
        (["test/a.jsonl", "validation/b.jsonl"], []),  # alone, they are asked for
        ([], []),
    ],
)
def test_names_of_validation_and_test_files(kept, left_out, caplog):
    names = [*left_out, *kept]
    where = f"folder of {names}"
    for _ in range(2):
        assert training_files(names, where) == kept
    said = [record.getMessage() for record in caplog.records]
    count = f"{len(left_out)} of the {len(names)} files of {where} are for validation or testing"
    assert [text.startswith(count) for text in said] == [True] * bool(left_out)
    assert all(name in said[0] for name in left_out[:3])


def test_a_folder_and_a_name_that_disagree_are_refused():
    for name in ("test/train.jsonl", "train/test-0.parquet", "training set/dev-v1.1.json"):
        message = rf"{name} of here is named both for training and for evaluation: rename it"
        with pytest.raises(ValueError, match=message):
            training_files(["a.jsonl", name], "here")
    with pytest.raises(ValueError, match=r"val/x_train\.bin of here is named both"):
        training_files(["val/x_train.bin"], "here", always=True)


def test_tokens_are_left_out_by_their_names_alone(caplog):
    names = ["fineweb_train_000001.bin", "fineweb_val_000000.bin", "x.bin"]
    assert training_files(names, "a", always=True) == [names[0], names[2]]
    assert training_files(["val.bin", "x.bin"], "b") == ["val.bin", "x.bin"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A folder and a store with files of three splits, whose texts have the split's name."""
    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"text": f"{split} {i} of a text"}) for i in range(40)]
        path = Path(f"data/{split}-00000-of-00001.jsonl")
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines))
        np.full(40, len(split), "<u2").tofile(f"data/{split}.bin")
        for file in (path, Path(f"data/{split}.bin")):
            store.pipe(f"/splits/{file}", file.read_bytes())
    return tmp_path


def test_a_folder_is_read_without_them(dataset, caplog):
    texts = [document.text for document in data.documents(data.TextFiles(path="data"))]
    assert len(texts) == 40 and all(text.startswith("train") for text in texts)
    assert caplog.record_tuples[0][:2] == ("jaxformer.data", logging.WARNING)
    (alone,) = {
        x.text[:4] for x in data.documents(data.TextFiles(path="data/test-00000-of-00001.jsonl"))
    }
    assert alone == "test"
    packed = data.Corpus(
        data.Packed(path="data"), tokenizer=data.ByteTokenizer(), folder=Path("cache"), held_out=0.2
    )
    assert set(packed.record["files"]) == {"train.bin"}


@pytest.mark.parametrize("address", ["memory://splits/data", "memory://splits/data/*.jsonl"])
def test_a_store_is_read_without_them(address, dataset, caplog):
    source = data.Corpus(data.TextFiles(path=address), folder=Path("cache"), held_out=0.2)
    assert len(source.record["files"]) == 1
    assert {x.text.split()[0] for x in source.documents("held_out")} == {"train"}
    assert f"2 of the 3 files of {address} are for validation" in caplog.text
    assert list(token_shards(list_store("memory://splits/data"), "here")) == ["train.bin"]
    alone = data.Corpus(
        data.TextFiles(path="memory://splits/data/test-*.jsonl"), folder=Path("cache")
    )
    assert {x.text.split()[0] for x in alone.documents("train")} == {"test"}
