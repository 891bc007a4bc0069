"""Leaves out the validation and test files of a dataset, which are not for training."""

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from jaxformer.data.records import RECORD_SUFFIXES, data_suffix

LOG = logging.getLogger("jaxformer.data")
# The words by which the library datasets recognizes splits.
TRAIN = frozenset({"train", "training"})
EVALUATION = frozenset(
    {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}
)
SOURCE_CODE = (".py",)  # test.py is no split
NUM_SHOWN = 3


def training_files(names: Sequence[str], where: str | Path, *, always: bool = False) -> list[str]:
    """The files of a dataset without those that its names reserve for evaluation.

    A word of the file's name says its split, as in ``test-00000-of-00001.parquet`` or
    ``wiki.valid.txt``, or a word of a folder, as in ``dev/a.jsonl``; what has none is read. Texts
    that are no records are left out only beside a file for training, whatever its suffix. What is
    left out is logged once. If all files are for evaluation, all are kept: they are asked for.

    Args:
        names: Paths relative to the folder, with ``/``.
        where: The folder, for the log.
        always: Whether the files are records whatever their suffix.

    Returns:
        The names to read, in order.

    Raises:
        ValueError: Folder and name of a file of records disagree, as in ``train/test.jsonl``.
    """
    parts = {name: _parts_for_training(name) for name in names}
    code = {name for name in names if data_suffix(Path(name)) in SOURCE_CODE}
    has_training = any(
        for_training[:1] == [True] for name, for_training in parts.items() if name not in code
    )
    left_out = list[str]()
    for name, for_training in parts.items():
        is_data = always or data_suffix(Path(name)) in RECORD_SUFFIXES
        if is_data and len(set(for_training)) > 1:
            raise ValueError(
                f"{name} of {where} is named both for training and for evaluation: rename it, or "
                "pass the files or folders to train on."
            )
        if for_training[:1] == [False] and (is_data or (has_training and name not in code)):
            left_out.append(name)
    if not left_out or len(left_out) == len(names):
        return list(names)
    shown = ", ".join(left_out[:NUM_SHOWN]) + ", ..." * (len(left_out) > NUM_SHOWN)
    _log_once(
        f"{len(left_out)} of the {len(names)} files of {where} are for validation or testing and "
        f"are left out: {shown}. To read them, pass them alone."
    )
    return [name for name in names if name not in set(left_out)]


def _parts_for_training(name: str) -> list[bool]:
    """Whether each part of a path that names splits names training, from the file outwards."""
    parts = [set(re.split(r"[-._ 0-9]+", x)) for x in reversed(PurePosixPath(name.lower()).parts)]
    return [bool(words & TRAIN) for words in parts if words & (TRAIN | EVALUATION)]


@cache
def _log_once(message: str) -> None:
    LOG.warning(message)
