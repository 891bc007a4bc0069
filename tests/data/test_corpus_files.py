"""Which files of a folder are a corpus: by suffix, by what they hold, by a dataset's own index."""

import json

import pyarrow
import pytest

from jaxformer import data
from jaxformer.data import Instructions, TextFiles


def save(folder, **files):
    """Tables of one row, whose text is their name."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        columns = pyarrow.table({"text": [text]})
        path = folder / f"{name.replace('_', '-')}.arrow"
        with pyarrow.OSFile(str(path), "wb") as file:
            with pyarrow.ipc.new_stream(file, columns.schema) as writer:
                writer.write_table(columns)
    return folder


def texts(folder, **corpus):
    return [document.text for document in data.documents(TextFiles(path=str(folder), **corpus))]


def test_suffixes_count_in_small_letters_and_capitals(tmp_path):
    for name in ("A.TXT", "b.JSONL", "c.ndjson", "d.rst"):
        (tmp_path / name).write_text(json.dumps({"text": name}) if "j" in name.lower() else name)
    assert texts(tmp_path) == ["A.TXT", "b.JSONL", "c.ndjson"]
    assert texts(tmp_path, suffixes=(".TXT", ".Rst")) == ["A.TXT", "d.rst"]


def test_json_beside_texts_is_read_where_it_has_records(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "b.json").write_text('[{"text": "c"}]')
    (tmp_path / "package.json").write_text('{\n  "name": "x"\n}\n')
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "x.py").write_text("pass")
    assert texts(tmp_path) == ["a", "b", "c", "pass"]
    with pytest.raises(
        ValueError, match=r"no file in it or its subfolders has the suffix \.jsonl or"
    ):
        data.documents(Instructions(path=str(tmp_path)))


def test_of_a_saved_dataset_the_files_are_read_that_its_state_names(tmp_path):
    """An earlier save, in two shards, lies beside the later one, in one."""
    save(tmp_path, data_00000_of_00001="new", data_00000_of_00002="old", data_00001_of_00002="old")
    (tmp_path / "README.md").write_text("A card.")
    (tmp_path / "dataset_info.json").write_text('{"splits": {"train": {}, "test": {}}}')
    named = [{"filename": "data-00000-of-00001.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": named}))
    assert texts(tmp_path) == ["new"]
    named.append({"filename": "data-7.arrow"})
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": named}))
    with pytest.raises(ValueError, match=r"state\.json lists data-7\.arrow, not found in "):
        texts(tmp_path)


def test_of_a_prepared_dataset_the_shards_of_one_split_are_read(tmp_path):
    """As the cache of datasets lays it: the splits side by side."""
    save(
        tmp_path,
        json_train_00000_of_00002="a",
        json_train_00001_of_00002="b",
        json_train="old",
        cache_12="no",
    )
    splits = {"train": {"shard_lengths": [1, 1]}, "test": {"shard_lengths": None}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"splits": splits}))
    assert texts(tmp_path) == ["a", "b"]
    save(tmp_path, json_test="c")
    with pytest.raises(
        ValueError, match="has the dataset splits test, train; pass the file of one"
    ):
        texts(tmp_path)
    assert texts(tmp_path / "json-test.arrow") == ["c"]


def test_the_splits_are_those_that_the_index_names(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "dev"]}')
    with pytest.raises(
        ValueError, match="has the dataset splits dev, train; pass the folder of one"
    ):
        texts(tmp_path)


def test_a_text_may_be_named_like_what_datasets_keep(tmp_path):
    (tmp_path / "cache-coherence.txt").write_text("a")
    (tmp_path / "state.json").write_text("[]")
    assert texts(tmp_path) == ["a"]
