"""Finds the files of a corpus in a folder."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxformer.checks import require
from jaxformer.data.dataset_splits import training_files
from jaxformer.data.records import TABLE_SUFFIXES, data_suffix, has_records
from jaxformer.json_files import get_field, read_json


def corpus_files(
    where: Path,
    suffixes: Sequence[str],
    keys: Sequence[str],
    leave_out: frozenset[str] = frozenset(),
) -> list[Path]:
    """The file itself, or the corpus files of a folder and its subfolders.

    A ``.json`` file is included only if its first record has one of the keys, as many programs
    write other JSON beside texts. For a saved dataset, its index lists the files. Validation and
    test files are left out, see `training_files`.

    Args:
        where: File or folder.
        suffixes: Suffixes of the files to include, in any case.
        keys: Keys of a record.
        leave_out: Names of folders to leave out.

    Returns:
        The files, sorted by path.

    Raises:
        ValueError: The path does not exist or is neither a file nor a folder; or a dataset has
            several splits, or a file of its index is missing.
        OSError: A folder cannot be read.
    """
    require(where.exists(), f"{where} does not exist.")
    if where.is_file():
        return [where]
    if not where.is_dir():
        raise ValueError(f"{where} is neither a file nor a folder; write the text to a file.")
    suffixes = [suffix.lower() for suffix in suffixes]
    paths = []
    for folder, folders, names in os.walk(where, onerror=_raise):
        folders[:] = [f for f in folders if f not in leave_out and not f.startswith(".")]
        for path in (Path(folder, name) for name in _corpus_names(Path(folder), names)):
            suffix = data_suffix(path)
            if suffix in suffixes and path.is_file():
                if suffix != ".json" or has_records(path, keys):
                    paths.append(path)
    names = sorted(path.relative_to(where).as_posix() for path in paths)
    return [where / name for name in training_files(names, where)]


def _raise(error: OSError) -> None:
    """Raise os.walk's error, as an unreadable folder would silently make the corpus smaller."""
    raise error


def _corpus_names(folder: Path, names: list[str]) -> list[str]:
    """The files of a folder; for a folder that the library datasets saved, those of its index."""
    # Files cache-*.arrow are results that the library cached.
    names = [x for x in names if not x.startswith(".") and not re.fullmatch(r"cache-.*\.arrow", x)]
    if "dataset_dict.json" in names:
        index = folder / "dataset_dict.json"
        splits = get_field(read_json(index), "splits", list, location=index)
        raise _several(folder, splits, "folder")
    if not any(name.endswith(TABLE_SUFFIXES) for name in names):
        return names
    index = folder / "state.json"
    state = read_json(index) if index.name in names else {}
    if "_data_files" in state:
        files = get_field(state, "_data_files", list, location=index)
        named = [get_field(file, "filename", str, location=index) for file in files]
        if missing := sorted(set(named) - set(names)):
            raise ValueError(f"{index} lists {', '.join(missing)}, not found in {folder}.")
        return named
    index = folder / "dataset_info.json"
    info = read_json(index) if index.name in names else {}
    parts = get_field(info, "splits", dict, location=index) if info.get("splits") else {}
    shards = {x: _shards(names, x, get_field(parts, x, dict, location=index)) for x in parts}
    present = {split: files for split, files in shards.items() if files}
    if len(present) > 1:
        raise _several(folder, list(present), "file")
    return next(iter(present.values()), names)


def _shards(names: list[str], split: str, info: dict[str, Any]) -> list[str]:
    """The files of a split, from its entry in dataset_info.json."""
    count = len(info.get("shard_lengths") or [0])
    number = rf"(-\d{{5}}-of-{count:05d}){'?' if count == 1 else ''}"
    pattern = re.compile(rf".+-{re.escape(split)}{number}\.(arrow|parquet)")
    return [name for name in names if pattern.fullmatch(name)]


def _several(folder: Path, splits: list[str], thing: str) -> ValueError:
    listed = ", ".join(sorted(splits))
    return ValueError(f"{folder} has the dataset splits {listed}; pass the {thing} of one split.")
